"""Rows that panels share: a line of words, marks of a time axis, a table of requests, and rows with
a table beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from rich.segment import Segment
from rich.style import Style

from tracer.format import figures
from tracer.state.view import RequestView
from tracer.tui.naming import phase_text, short_id
from tracer.tui.toolkit.axis import Tick
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.theme import Look

BESIDE_FROM = 100
"""Cells from which a table stands beside its panel's other rows; below them otherwise."""

Entry = tuple[RequestView, Style, Sequence[tuple[str, Style]]]
"""A request, the style of its id, and a text and style for each column behind the id."""


def words(look: Look, width: int, text: str, style: Style | None = None) -> Row:
    """Return one row of text, dim without a `style`."""
    style = look.dim if style is None else style  # a style without attributes is false
    line = Line(width).add_text(text, style, ellipsis=look.glyphs.ellipsis)
    return line.end(look.text)


def grid_of(look: Look, cells: int, ticks: Sequence[Tick]) -> str:
    """Return the ground of a bar of `cells`, with a line at each tick but the first."""
    columns = {tick.column for tick in ticks if tick.column}
    return "".join(look.glyphs.grid if column in columns else " " for column in range(cells))


def add_ticks(line: Line, look: Look, at: int, cells: int, ticks: Sequence[Tick]) -> None:
    """Put the labels of `ticks` that have room above a bar of `cells` that starts in column `at`,
    and fill up to its end."""
    for tick in ticks:
        if at + tick.column >= line.used and tick.column + len(tick.label) < cells:
            line.fill_to(at + tick.column, look.dim).add(look.glyphs.tick + tick.label, look.dim)
    line.fill_to(at + cells, look.dim)


def id_cells(width: int) -> int:
    return min(width, 14, max(6, width // 4))


def filled(look: Look, rows: list[Row], width: int, height: int) -> list[Row]:
    """Return exactly `height` rows, with blank ones at the end where there are fewer."""
    return [*rows[:height], *[blank(width, look.text)] * (height - len(rows))]


def listed(
    look: Look, width: int, height: int, head: list[Row], entries: Iterable[Row], total: int
) -> list[Row]:
    """Return `head` and as many `entries` as fit into `height` rows; the last row counts those of
    the `total` that do not fit."""
    room = max(0, height - len(head))
    rows = [*head[:height], *islice(entries, room)]
    if 0 < room < total and len(rows) == height:
        rows[-1] = words(look, width, f"and {figures.count(total - room + 1)} more")
    return rows


def request_table(
    look: Look,
    width: int,
    height: int,
    heads: Mapping[str, int],
    entries: Iterable[Entry],
    total: int,
) -> list[Row]:
    """Return a table in exactly `height` rows: an id, the columns of `heads` with their cells (the
    first is that of the id, as wide as fits), and the phase."""
    names = id_cells(width)
    (first, _), *columns = heads.items()
    line = Line(width).add(first.ljust(names), look.dim)
    for name, cells in columns:
        line.add(name.rjust(cells), look.dim)
    head = line.add("  phase", look.dim).end(look.text)

    def row(view: RequestView, style: Style, values: Sequence[tuple[str, Style]]) -> Row:
        line = Line(width).add_text(short_id(view.id, names, look.glyphs.ellipsis), style, names)
        for (_, cells), (text, value_style) in zip(columns, values, strict=True):
            line.add(text.rjust(cells), value_style)
        phase, phase_style = phase_text(view, look)
        return line.add("  ", look.text).add_text(phase, phase_style).end(look.text)

    rows = listed(look, width, height, [head], (row(*entry) for entry in entries), total)
    return filled(look, rows, width, height)


def with_table(
    look: Look,
    width: int,
    height: int,
    panel: Callable[[int, int], list[Row]],
    table: Callable[[int, int], list[Row]],
    entries: int,
) -> list[Row]:
    """Return what `panel` and `table` draw for a width and a height: beside each other where there
    is room, else the table below in at most half of the rows."""
    if width < BESIDE_FROM:
        below = min(entries + 1, height // 2)
        above = height - below
        return filled(look, panel(width, above - 1), width, above) + table(width, below)
    left = width * 11 // 20
    gap = Segment(f" {look.glyphs.vertical} ", look.faint)
    rows = filled(look, panel(left, height), left, height)
    return [
        [*row, gap, *other]
        for row, other in zip(rows, table(width - left - 3, height), strict=True)
    ]

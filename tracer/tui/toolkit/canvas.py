"""The base of every widget: a block of prebuilt rows that sends only the cells which changed.

A canvas paints its rows from what it was given (`paint` is a pure function of that and of the
size), keeps one strip a row, and on `repaint` compares new with old: an unchanged row keeps its
strip, a changed one marks the columns that differ as dirty. A canvas has no border, padding or CSS
content of its own: the screen shows what `paint` returned, in ASCII where the look asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final

from rich.cells import split_graphemes
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from tracer.format.text import cell_width, clean, fit
from tracer.tui.toolkit.theme import ASCII, Look
from tracer.tui.toolkit.words import ascii_text

Row = Sequence[Segment]
"""Segments of one row, exactly as wide as the canvas."""

MERGE_GAP: Final = 4
"""Unchanged cells between two changed runs that are cheaper to send than to jump over (a jump costs
6-9 bytes)."""


LABEL_ROOM: Final = 400
"""Characters of a text from outside that are looked at where it is a label: more do not fit on any
screen."""


def label(text: str) -> str:
    """Return text from outside as a label: cleaned, and cut beyond any screen."""
    return clean(text[:LABEL_ROOM])


class Line:
    """One row, built from left to right and never wider than `width` cells."""

    __slots__ = ("segments", "used", "width")

    def __init__(self, width: int) -> None:
        self.width = max(0, width)
        self.used = 0
        self.segments: list[Segment] = []

    @property
    def room(self) -> int:
        """Cells left."""
        return self.width - self.used

    def add(self, text: str, style: Style) -> Line:
        """Append text of our own: every character one cell wide."""
        room = self.width - self.used
        if len(text) > room:
            text = text[:room]
        if text:
            self.segments.append(Segment(text, style))
            self.used += len(text)
        return self

    def add_text(
        self, text: str, style: Style, cells: int | None = None, ellipsis: str = "…"
    ) -> Line:
        """Append text from outside: cleaned, and cropped or padded to `cells` when given."""
        room = self.width - self.used
        # Text far beyond the room is not even looked at; the rest is long enough to be cropped.
        text = clean(text[: 4 * room + 256])
        wanted = min(cell_width(text) if cells is None else cells, room)
        text = fit(text, wanted, ellipsis=ellipsis)
        if text:
            self.segments.append(Segment(text, style))
            self.used += wanted
        return self

    def add_segments(self, segments: Iterable[Segment], cells: int) -> Line:
        """Append segments of known width. They must fit."""
        self.segments.extend(segments)
        self.used += cells
        return self

    def fill_to(self, column: int, style: Style, glyph: str = " ") -> Line:
        """Fill up to a column."""
        gap = min(column, self.width) - self.used
        if gap > 0:
            self.add(glyph * gap, style)
        return self

    def end(self, style: Style, glyph: str = " ") -> list[Segment]:
        """Return the row, filled up to its full width."""
        self.fill_to(self.width, style, glyph)
        return self.segments


def blank(width: int, style: Style) -> list[Segment]:
    return [Segment(" " * width, style)] if width > 0 else []


_plain: Final = re.compile(
    "[\x20-\x7e\xa0-\u02ff\u2010-\u2027\u2030-\u205e\u2190-\u21ff\u2500-\u25fc\u2800-\u28ff]*"
).fullmatch
"""Matches text of glyphs that every terminal draws one cell wide."""


def is_plain(row: Row) -> bool:
    """Return True if each character of a row is one cell wide."""
    return _plain("".join([text for text, _, _ in row])) is not None


class RowStrip(Strip):
    """A strip that does not cache itself as its only part: each strip that is replaced would be a
    cycle, and the garbage collector, with nothing else to do here, would stop a frame for 50 ms
    every few seconds.
    """

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Return the parts between `cuts`."""
        within = [cut for cut in cuts if cut <= self.cell_length]
        return [self] if within == [self.cell_length] else super().divide(within)


def changed_columns(old: Row, new: Row) -> list[tuple[int, int]]:
    """Return the runs [start, end) of columns in which two rows differ, joined over small gaps.

    No run starts or ends inside a two-cell glyph of either row.
    """
    first, last_old, last_new = 0, len(old), len(new)
    while first < last_old and first < last_new and old[first] == new[first]:
        first += 1
    while last_old > first and last_new > first and old[last_old - 1] == new[last_new - 1]:
        last_old -= 1
        last_new -= 1
    column = sum([cell_width(text) for text, _, _ in new[:first]])
    pairs = zip_longest(_cells(old[first:last_old]), _cells(new[first:last_new]))
    runs: list[tuple[int, int]] = []
    for at, (before, after) in enumerate(pairs, column):
        if before == after:
            continue
        if runs and at - runs[-1][1] <= MERGE_GAP:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs


def _cells(row: Row) -> list[tuple[str, Style | None, int]]:
    """Return one entry a cell: the grapheme, its style, and 1 for its second cell."""
    if is_plain(row):
        return [(character, style, 0) for text, style, _ in row for character in text]
    cells: list[tuple[str, Style | None, int]] = []
    for text, style, _ in row:
        for begin, end, width in split_graphemes(text)[0]:
            if width:
                cells += [(text[begin:end], style, half) for half in range(width)]
            elif cells:  # belongs to the cell before it
                cells[-1] = (cells[-1][0] + text[begin:end], *cells[-1][1:])
    return cells


class Canvas(Widget):
    """A widget whose content is rows of cells; see the module's description."""

    ALLOW_SELECT = False
    DEFAULT_CSS = "Canvas { height: 1fr; width: 1fr; border: none; padding: 0; }"

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="tile")
        self.look = look
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._painted: Size | None = None
        self._stale = True

    def paint(self, width: int, height: int) -> list[Row]:
        """Return the rows for this size, each exactly `width` cells; missing rows are blank. Must
        not change anything."""
        raise NotImplementedError

    def repaint(self) -> None:
        """Paint again and mark the cells that differ. Cheap when nothing did."""
        size = self.size
        if not self.is_mounted or not size:
            return
        if self._painted != size:
            self._stale = True
            self.refresh()
            return
        rows = self._paint(size)
        dirty: list[Region] = []
        for y, (old, new) in enumerate(zip(self._rows, rows, strict=True)):
            if old is new or old == new:
                continue
            self._rows[y], self._strips[y] = new, RowStrip(new, size.width)
            runs = changed_columns(old, new)
            dirty.extend(Region(begin, y, end - begin, 1) for begin, end in runs)
        if dirty:
            self.refresh(*dirty)

    def restyle(self, look: Look) -> None:
        self.look = look
        self._stale = True
        self.refresh()

    def _paint(self, size: Size) -> list[Row]:
        width, height = size
        rows = self.paint(width, height)[:height]
        rows += [blank(width, self.look.text)] * (height - len(rows))
        if self.look.glyphs is ASCII:
            rows = [[Segment(ascii_text(text), style) for text, style, _ in row] for row in rows]
        return rows

    def _ensure(self, size: Size) -> None:
        if self._stale or self._painted != size:
            self._rows = self._paint(size)
            self._strips = [RowStrip(row, size.width) for row in self._rows]
            self._painted = size
            self._stale = False

    def render_line(self, y: int) -> Strip:
        self._ensure(self.size)
        return self._strips[y] if 0 <= y < len(self._strips) else Strip.blank(self.size.width)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the cached strips of a region: no styling pass, no filters, no copies of full
        rows."""
        size = self.size
        self._ensure(size)
        strips = self._strips[crop.y : crop.bottom]
        if crop.x or crop.width != size.width:
            strips = [strip.crop(crop.x, crop.right) for strip in strips]
        return strips

    def on_focus(self) -> None:
        self.repaint()

    def on_blur(self) -> None:
        self.repaint()

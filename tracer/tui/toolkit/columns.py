"""Columns of stacked parts, drawn with eighths of cells: what every plot of the Numbers screen is
made of.

A part has a colour and, for where colour cannot be relied on, a glyph of its own. With 24-bit
colours a cell holds two parts (glyph and ground), so a boundary is right to an eighth of a cell;
without, the part that fills most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from tracer.tui.toolkit.theme import ASCII, Look


@dataclass(frozen=True, slots=True)
class Tone:
    """How a part is drawn: a colour, a glyph without colours, and one in ASCII."""

    colour: str
    glyph: str
    ascii: str


Column = Sequence[tuple[float, Tone]]
"""Amounts from below, each with its tone."""
Cell = tuple[str, Style]


def column_cells(look: Look, column: Column, height: int, top: float) -> list[Cell]:
    """Return `height` cells, the topmost first; `top` fills all of them. Any amount above 0 is
    seen."""
    units = height * 8
    edges: list[tuple[int, Tone]] = []
    total = 0.0
    for amount, tone in column:
        total += max(0.0, amount)
        edges.append((min(units, round(total / top * units)) if top > 0 else 0, tone))
    if total > 0 and edges and edges[-1][0] == 0:
        edges[-1] = (1, edges[-1][1])
    cells: list[Cell] = []
    for low in range(0, units, 8):
        inside: list[tuple[int, Tone]] = []
        begin = low
        for edge, tone in edges:
            end = min(edge, low + 8)
            if end > begin:
                inside.append((end - begin, tone))
                begin = end
        cells.append(_cell(look, inside))
    return cells[::-1]


def _cell(look: Look, inside: list[tuple[int, Tone]]) -> Cell:
    if not inside:
        return " ", look.text
    filled = sum(size for size, _ in inside)
    if look.fine:
        size, tone = inside[0]
        if size == 8:
            return "█", look.style(tone.colour)
        ground = inside[1][1].colour if len(inside) > 1 else None
        if ground is not None and filled < 8 and inside[1][0] > size:
            # Two parts and air in one cell: the glyph can only tell one of them.
            return look.glyphs.rises[filled], look.style(ground)
        return look.glyphs.rises[size], look.style(tone.colour, ground)
    size, tone = max(inside, key=lambda part: part[0])
    colour = look.style(tone.colour)
    if filled < 8 and len(inside) == 1 and look.glyphs is not ASCII and tone.glyph == "█":
        return look.glyphs.rises[filled], colour
    if filled < 3:
        return look.glyphs.rises[filled], colour
    return (tone.ascii if look.glyphs is ASCII else tone.glyph), colour


def rows_of(columns: Sequence[Sequence[Cell]], height: int) -> list[list[Segment]]:
    """Return columns of cells as rows; neighbours of one style are one segment."""
    rows: list[list[Segment]] = []
    for y in range(height):
        segments: list[Segment] = []
        text, style = "", None
        for column in columns:
            glyph, own = column[y]
            if own is style:
                text += glyph
                continue
            if text:
                segments.append(Segment(text, style))
            text, style = glyph, own
        if text:
            segments.append(Segment(text, style))
        rows.append(segments)
    return rows


def blank_column(look: Look, height: int) -> list[Cell]:
    return [(" ", look.text)] * height


def bars(
    look: Look, columns: Sequence[Column], height: int, top: float, cells: int
) -> tuple[list[list[Cell]], int]:
    """Return columns side by side in `cells` cells, as wide as fits with a gap where there is room,
    and the width of one with its gap. Columns beyond the cells are left out."""
    if not columns or cells < 1:
        return [], 1
    slot = max(1, min(9, cells // len(columns)))
    wide = slot - 1 if slot > 2 else slot
    drawn: list[list[Cell]] = []
    for column in columns[: cells // slot]:
        own = column_cells(look, column, height, top)
        drawn += [own] * wide + [blank_column(look, height)] * (slot - wide)
    return drawn, slot

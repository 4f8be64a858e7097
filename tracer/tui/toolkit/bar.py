"""Bars of stages: stretches of time turned into cells.

A bar is first painted into eighths of cells (whole cells where the terminal has no colours or no
block glyphs), so that every edge stays where it is in time. Each cell can show two colours, split
at an eighth: where more than two stages share one, the longest keeps its side and the rest shares
the other. What is shorter than an eighth is not blown up, unless it is asked for or all there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from rich.segment import Segment
from rich.style import Style

from engine_hooks.protocol.stages import Stage
from tracer.tui.toolkit.theme import Look

EMPTY: Final = 0
UNATTRIBUTED: Final = 13
WAIT: Final = 16
"""Added to a stage's number: the same stage, waiting."""


class Stretch(NamedTuple):
    """A part of a bar from unit `begin` to `end` (eighths of cells, or cells). `code`: stage
    number, `WAIT` added."""

    begin: int
    end: int
    code: int


class Bars:
    """Draws bars `width` cells wide with a look; `grid` is what empty cells show (spaces and tick
    marks)."""

    def __init__(self, look: Look, width: int, grid: str = "") -> None:
        self.look = look
        self.width = max(0, width)
        self.grid = grid[: self.width].ljust(self.width)
        self.unit = 8 if look.fine else 1
        self.units = self.width * self.unit
        self.shade = 0

    def draw(
        self,
        stretches: Iterable[Stretch],
        back: str | None = None,
        *,
        marks: Sequence[tuple[int, str]] = (),
        head: int | None = None,
        cut: bool = False,
        shade: int = 0,
        keep_short: bool = False,
        expected: int | None = None,
    ) -> list[Segment]:
        """Return the bar as segments, exactly `width` cells.

        `back`: background of the row. `marks`: (column, glyph) laid over it, for preemptions.
        `head`: column of the running end, drawn as a glyph where a bar is made of whole cells.
        `cut`: the bar began before the page. `shade`: which of the look's `bar_colours`.
        `keep_short`: give the shortest stretch an eighth too. `expected`: unit at which a tick says
        where the bar should have ended; a tick off the end is drawn as an arrow there.
        """
        units = self.units
        if not units:
            return []
        look = self.look
        canvas = bytearray(units)
        unit = self.unit
        last = None
        for begin, end, code in stretches:
            if keep_short:
                end = max(end, begin + 1)
            begin, end = max(0, begin), min(units, end)
            if end > begin:
                canvas[begin:end] = bytes((code,)) * (end - begin)
            elif 0 <= begin < units:
                last = (begin, code)
        if last is not None and not canvas[last[0]]:
            canvas[last[0]] = last[1]
        self.shade = shade
        ground = look.palette.back if back is None else back
        segments = (
            self._whole(bytes(canvas), ground) if unit == 1 else self._fine(bytes(canvas), ground)
        )
        for column, glyph in marks:
            segments = _replaced(segments, column, glyph, look.overlay(look.palette.bad, ground))
        if head is not None and unit == 1:
            style = look.overlay(look.palette.text, ground)
            segments = _replaced(segments, head, look.glyphs.head, style)
        if cut and any(canvas[:unit]):
            style = look.overlay(look.palette.text, ground)
            segments = _replaced(segments, 0, look.glyphs.cut, style)
        if expected is None or expected < 0:
            return segments
        return self._ticked(segments, expected, ground)

    def _whole(self, data: bytes, back: str) -> list[Segment]:
        """Return whole cells: one glyph for each stage group, a light one for waiting."""
        segments: list[Segment] = []
        at = 0
        while at < len(data):
            code = data[at]
            end = len(data) - len(data[at:].lstrip(bytes((code,))))
            segments.append(self._solid(code, at, end, back))
            at = end
        return segments

    def _solid(self, code: int, begin: int, end: int, back: str) -> Segment:
        """Return cells `begin` to `end` of one kind."""
        look = self.look
        if code == EMPTY:
            style = look.style(look.palette.grid, back, "" if look.palette.grid else "dim")
            return Segment(self.grid[begin:end], style)
        if code == UNATTRIBUTED:
            return Segment(look.glyphs.dot * (end - begin), look.style(look.palette.dim, back))
        stage = Stage(code & 15)
        colours = look.bar_colours[self.shade]
        if code & WAIT:
            ground = look.wait_colours[stage] if look.fine else back
            return Segment(look.glyphs.wait * (end - begin), look.style(colours[stage], ground))
        return Segment(look.fill(stage) * (end - begin), look.style(colours[stage], back))

    def _fine(self, data: bytes, back: str) -> list[Segment]:
        segments: list[Segment] = []
        append = segments.append
        at, size = 0, len(data)
        while at < size:
            code = data[at]
            end = size - len(data[at:].lstrip(bytes((code,))))
            if at % 8 == 0 and end - at >= 8:
                stop = end - end % 8
                append(self._solid(code, at // 8, stop // 8, back))
                at = stop
            else:
                append(self._mixed(data[at : at + 8], back))
                at += 8
        return segments

    def _mixed(self, cell: bytes, back: str) -> Segment:
        """Return one cell that several stages share."""
        look = self.look
        key = (cell, back, self.shade)
        found = look.mixed.get(key)
        if found is None:
            left, right, split = _two_sides(cell)
            style = look.style(self._colour(left, back), self._colour(right, back))
            if len(look.mixed) > 20_000:
                look.mixed.clear()
            found = look.mixed[key] = Segment(look.glyphs.eighths[split], style)
        return found

    def _colour(self, code: int, back: str) -> str:
        if code == EMPTY:
            return back
        if code == UNATTRIBUTED:
            return self.look.palette.faint
        if code & WAIT:
            return self.look.wait_colours[code & 15]
        return self.look.bar_colours[self.shade][code]

    def _ticked(self, segments: list[Segment], expected: int, back: str) -> list[Segment]:
        """Put the tick in: a notch where there is bar, a mark where there is none."""
        look = self.look
        column = expected // self.unit
        glyph = look.glyphs.expected if column < self.width else look.glyphs.beyond
        column = min(column, self.width - 1)
        under = _segment_at(segments, column)
        style = look.overlay(look.palette.text, back)
        if look.fine and under.text[:1] == "█" and under.style and under.style.color:
            style = look.style(back, under.style.color.name, "bold")
        return _replaced(segments, column, glyph, style)


def _segment_at(segments: list[Segment], column: int) -> Segment:
    """Return the segment that covers a column of a bar."""
    for segment in segments:
        if column < len(segment.text):
            return segment
        column -= len(segment.text)
    return Segment("")


def _replaced(segments: list[Segment], column: int, glyph: str, style: Style) -> list[Segment]:
    """Return the bar with one cell replaced; a column off the bar changes nothing."""
    replaced: list[Segment] = []
    start = 0
    for text, own, _ in segments:
        at, start = column - start, start + len(text)
        if not 0 <= at < len(text):
            replaced.append(Segment(text, own))
            continue
        pieces = ((text[:at], own), (glyph, style), (text[at + 1 :], own))
        replaced += [Segment(piece, piece_style) for piece, piece_style in pieces if piece]
    return replaced


def _two_sides(cell: bytes) -> tuple[int, int, int]:
    """Reduce a cell's eighths to (left code, right code, eighths of the left)."""
    runs = [(code, len(list(same))) for code, same in groupby(cell)]
    if len(runs) == 1:
        return runs[0][0], runs[0][0], 8
    # A short stage next to empty cells is the one thing that must not disappear.
    longest = max(range(len(runs)), key=lambda i: (runs[i][1], runs[i][0] != EMPTY))
    before = sum(length for _, length in runs[:longest])
    after = sum(length for _, length in runs[longest + 1 :])
    if before > after:
        left = max(runs[:longest], key=lambda run: (run[0] != EMPTY, run[1]))[0]
        return left, runs[longest][0], before
    right = max(runs[longest + 1 :], key=lambda run: (run[0] != EMPTY, run[1]))[0]
    return runs[longest][0], right, 8 - after

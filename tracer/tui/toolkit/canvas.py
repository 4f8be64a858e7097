"""The base of every widget here: a block of prebuilt rows that sends only the cells which changed.

A canvas paints its rows from what it was given (`paint` is a pure function of that and of the
size), keeps one strip a row, and on `repaint` compares new with old: an unchanged row keeps its
strip, a changed one marks the columns that differ as dirty. Nothing else is drawn, sent or measured
again. A canvas has no border, padding or CSS content of its own: what is on the screen is what
`paint` returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from rich.cells import split_graphemes
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from tracer.format.text import cell_width, clean, fit
from tracer.tui.toolkit.theme import Look

Row = Sequence[Segment]
"""Segments of one row, exactly as wide as the canvas."""

MERGE_GAP: Final = 4
"""Unchanged cells between two changed runs that are cheaper to send than to jump over (a jump costs
6-9 bytes)."""


LABEL_ROOM: Final = 400
"""Characters of a text from outside that are looked at where it is a label: more do not fit on any
screen."""


def label(text: str) -> str:
    """Text from outside as a label: cleaned, and cut where no screen is wide enough for it."""
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

    def put(self, text: str, style: Style) -> Line:
        """Append text of our own: every character one cell wide."""
        room = self.width - self.used
        if len(text) > room:
            text = text[:room]
        if text:
            self.segments.append(Segment(text, style))
            self.used += len(text)
        return self

    def put_text(
        self, text: str, style: Style, cells: int | None = None, ellipsis: str = "…"
    ) -> Line:
        """Append text from outside: cleaned, and cropped or padded to `cells` when given."""
        room = self.width - self.used
        # What lies far beyond the room is not even looked at; what remains is long enough to be
        # cropped.
        text = clean(text[: 4 * room + 256])
        wanted = min(cell_width(text) if cells is None else cells, room)
        text = fit(text, wanted, ellipsis=ellipsis)
        if text:
            self.segments.append(Segment(text, style))
            self.used += wanted
        return self

    def put_segments(self, segments: Iterable[Segment], cells: int) -> Line:
        """Append segments of known width. They must fit."""
        self.segments.extend(segments)
        self.used += cells
        return self

    def fill_to(self, column: int, style: Style, glyph: str = " ") -> Line:
        """Fill up to a column."""
        gap = min(column, self.width) - self.used
        if gap > 0:
            self.put(glyph * gap, style)
        return self

    def end(self, style: Style, glyph: str = " ") -> list[Segment]:
        """The finished row, filled up to its full width."""
        self.fill_to(self.width, style, glyph)
        return self.segments


def blank(width: int, style: Style) -> list[Segment]:
    """An empty row."""
    return [Segment(" " * width, style)] if width > 0 else []


plain: Final = re.compile(
    "[\x20-\x7e\xa0-\u02ff\u2010-\u2027\u2030-\u205e\u2190-\u21ff\u2500-\u25fc\u2800-\u28ff]*"
).fullmatch
"""Matches text of glyphs that every terminal draws one cell wide."""


class RowStrip(Strip):
    """A strip that does not remember itself as its only part: each one that is replaced would be a
    cycle, and the garbage collector, which else has nothing to do here, would stop a frame for 50
    ms every few seconds to find them.
    """

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """As the stock one."""
        within = [cut for cut in cuts if cut <= self.cell_length]
        return [self] if within == [self.cell_length] else super().divide(within)


class PlainStrip(RowStrip):
    """A strip of which every character is one cell wide, so that columns are found by slicing."""


def is_plain(row: Row) -> bool:
    """Whether each character of a row is one cell wide."""
    return plain("".join([text for text, _, _ in row])) is not None


def strip_of(row: Row, width: int) -> Strip:
    """The row as a strip, a plain one where it is."""
    return PlainStrip(row, width) if is_plain(row) else RowStrip(row, width)


def changed_columns(old: Row, new: Row, both_plain: bool | None = None) -> list[tuple[int, int]]:
    """Column runs [begin, end) in which two rows of the same width differ, merged over small gaps.

    A run never begins or ends inside a two-cell glyph of either row. `both_plain`: whether that is
    known of both rows.
    """
    first, last_old, last_new = 0, len(old), len(new)
    while first < last_old and first < last_new and old[first] == new[first]:
        first += 1
    while last_old > first and last_new > first and old[last_old - 1] == new[last_new - 1]:
        last_old -= 1
        last_new -= 1
    if first == last_old and first == last_new:
        return []
    before, after = old[first:last_old], new[first:last_new]
    if both_plain is None:
        both_plain = is_plain(old) and is_plain(new)
    if both_plain:
        column = sum([len(text) for text, _, _ in new[:first]])
        runs = _plain_runs(before, after)
    else:
        column = sum([cell_width(text) for text, _, _ in new[:first]])
        runs = _runs(before, after)
    merged: list[tuple[int, int]] = []
    for begin, end in runs:
        if merged and column + begin - merged[-1][1] <= MERGE_GAP:
            merged[-1] = (merged[-1][0], column + end)
        else:
            merged.append((column + begin, column + end))
    return merged


def _plain_runs(old: Row, new: Row) -> list[tuple[int, int]]:
    """Differing runs where a character is a cell: pieces of both rows are compared as they
    overlap."""
    runs: list[tuple[int, int]] = []
    at = 0
    old_left, old_style, new_left, new_style = "", None, "", None
    old_index = new_index = 0
    while True:
        while not old_left and old_index < len(old):
            old_left, old_style, _ = old[old_index]
            old_index += 1
        while not new_left and new_index < len(new):
            new_left, new_style, _ = new[new_index]
            new_index += 1
        size = min(len(old_left), len(new_left))
        if not size:
            rest = max(len(old_left), len(new_left))
            if rest:
                runs.append((at, at + rest))
            return runs
        # a look shares its styles: what is not the same one is another
        if old_style is not new_style:
            runs.append((at, at + size))
        elif old_left[:size] != new_left[:size]:
            begin, end = 0, size
            while old_left[begin] == new_left[begin]:
                begin += 1
            while old_left[end - 1] == new_left[end - 1]:
                end -= 1
            same = 0
            for index in range(begin, end):
                if old_left[index] == new_left[index]:
                    same += 1
                    continue
                if same > MERGE_GAP:
                    runs.append((at + begin, at + index - same))
                    begin = index
                same = 0
            runs.append((at + begin, at + end))
        old_left, new_left = old_left[size:], new_left[size:]
        at += size


def _runs(old: Row, new: Row) -> list[tuple[int, int]]:
    """Differing runs cell by cell."""
    before, after = _cells(old), _cells(new)
    length = max(len(before), len(after))
    before += [("", None)] * (length - len(before))
    after += [("", None)] * (length - len(after))
    runs: list[tuple[int, int]] = []
    index = 0
    while index < length:
        if before[index] == after[index]:
            index += 1
            continue
        begin = index
        while index < length and before[index] != after[index]:
            index += 1
        while begin > 0 and (not before[begin][0] or not after[begin][0]):
            begin -= 1
        while index < length and (not before[index][0] or not after[index][0]):
            index += 1
        runs.append((begin, index))
    return runs


def _cells(segments: Row) -> list[tuple[str, Style | None]]:
    """One entry a cell: the grapheme, and an empty string for its second cell."""
    cells: list[tuple[str, Style | None]] = []
    for text, style, _ in segments:
        for begin, end, width in split_graphemes(text)[0]:
            if width == 0:
                if cells:  # belongs to the cell before it
                    cells[-1] = (cells[-1][0] + text[begin:end], cells[-1][1])
                continue
            cells.append((text[begin:end], style))
            cells.extend([("", style)] * (width - 1))
    return cells


class Canvas(Widget):
    """A widget whose content is rows of cells; see the module's description."""

    ALLOW_SELECT = False
    DEFAULT_CSS = "Canvas { height: 1fr; width: 1fr; border: none; padding: 0; }"

    def __init__(self, look: Look, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look = look
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._painted: Size | None = None
        self._stale = True

    def paint(self, width: int, height: int) -> list[Row]:
        """The rows for this size, each exactly `width` cells. Missing rows are blank. Must not
        change anything."""
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
            strip = strip_of(new, size.width)
            runs = changed_columns(old, new, type(strip) is type(self._strips[y]) is PlainStrip)
            if not runs:
                continue
            self._rows[y], self._strips[y] = new, strip
            dirty.extend(Region(begin, y, end - begin, 1) for begin, end in runs)
        if dirty:
            self.refresh(*dirty)

    def restyle(self, look: Look) -> None:
        """Take on another look and draw everything again."""
        self.look = look
        self._stale = True
        self.refresh()

    def _paint(self, size: Size) -> list[Row]:
        width, height = size
        rows = self.paint(width, height)[:height]
        while len(rows) < height:
            rows.append(blank(width, self.look.text))
        return rows

    def _ensure(self, size: Size) -> None:
        if self._stale or self._painted != size:
            self._rows = self._paint(size)
            self._strips = [strip_of(row, size.width) for row in self._rows]
            self._painted = size
            self._stale = False

    def render_line(self, y: int) -> Strip:
        """Row `y` as a strip."""
        self._ensure(self.size)
        return self._strips[y] if 0 <= y < len(self._strips) else Strip.blank(self.size.width)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The cached strips of a region: no styling pass, no filters, no copies unless columns are
        cropped."""
        size = self.size
        self._ensure(size)
        strips = self._strips[crop.y : crop.bottom]
        if crop.x or crop.width != size.width:
            strips = [strip.crop(crop.x, crop.right) for strip in strips]
        return strips

    def on_focus(self) -> None:
        """Show the focus."""
        self.repaint()

    def on_blur(self) -> None:
        """Hide the focus."""
        self.repaint()

"""A line of tabs."""

from __future__ import annotations

from itertools import accumulate

from rich.segment import Segment
from textual import events
from textual.message import Message

from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.panel import clean_note
from tracer.tui.toolkit.theme import Look


class TabLine(Canvas):
    """Names in a rule, the current one marked; a click chooses."""

    class Chosen(Message):
        """A tab was clicked."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, look: Look, names: tuple[str, ...]) -> None:
        super().__init__(look, id="tabs")
        self.names = names
        self.current = 0
        self.note: list[Segment] = []

    def show(self, current: int, note: list[Segment]) -> None:
        """Mark a tab, with a note at the right end."""
        self.current, self.note = current, note
        self.repaint()

    def _places(self) -> list[tuple[int, int]]:
        """Return the first cell and the cells of each tab."""
        cells = [len(name) + 2 for name in self.names]
        starts = accumulate(cells, lambda at, size: at + size + 1, initial=1)
        return list(zip(starts, cells, strict=False))

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        line = Line(width)
        for index, ((at, _), name) in enumerate(zip(self._places(), self.names, strict=True)):
            line.fill_to(at, look.faint, look.glyphs.horizontal)
            chosen = index == self.current
            line.add(f" {name} ", look.tab_on if chosen else look.dim)
        note, cells = clean_note(self.note)
        if cells and line.room >= cells + 4:
            line.fill_to(width - cells - 3, look.faint, look.glyphs.horizontal)
            line.add(" ", look.faint).add_segments(note, cells).add(" ", look.faint)
        return [line.end(look.faint, look.glyphs.horizontal)]

    def on_click(self, event: events.Click) -> None:
        for index, (at, cells) in enumerate(self._places()):
            if at <= event.x < at + cells:
                self.post_message(self.Chosen(index))
                return

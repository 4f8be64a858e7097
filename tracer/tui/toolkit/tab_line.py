"""A line of tabs."""

from __future__ import annotations

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
        self.add_class("tile")
        self.names = names
        self.current = 0
        self.note: list[Segment] = []

    def show(self, current: int, note: list[Segment]) -> None:
        """Mark a tab, and say something about what it shows at the right end."""
        self.current, self.note = current, note
        self.repaint()

    def _places(self) -> list[tuple[int, int]]:
        places, at = [], 1
        for name in self.names:
            places.append((at, len(name) + 2))
            at += len(name) + 3
        return places

    def paint(self, width: int, height: int) -> list[Row]:
        """The line."""
        look = self.look
        line = Line(width)
        for index, ((at, _), name) in enumerate(zip(self._places(), self.names, strict=True)):
            line.fill_to(at, look.faint, look.glyphs.horizontal)
            chosen = index == self.current
            line.put(f" {name} ", look.tab_on if chosen else look.dim)
        note, cells = clean_note(self.note)
        if cells and line.room >= cells + 4:
            line.fill_to(width - cells - 3, look.faint, look.glyphs.horizontal)
            line.put(" ", look.faint).put_segments(note, cells).put(" ", look.faint)
        return [line.end(look.faint, look.glyphs.horizontal)]

    def on_click(self, event: events.Click) -> None:
        """Choose a tab."""
        for index, (at, cells) in enumerate(self._places()):
            if at <= event.x < at + cells:
                self.post_message(self.Chosen(index))
                return

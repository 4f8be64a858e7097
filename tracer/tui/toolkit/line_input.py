"""One line to type in, shown above the keys while it is open: a filter, a prompt, a path."""

from __future__ import annotations

from textual import events
from textual.message import Message
from textual.widgets import Input

from tracer.format.text import clean
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look


class LineLabel(Canvas):
    """The purpose of the line beside it."""

    def __init__(self, look: Look, *, id: str = "line-label") -> None:
        super().__init__(look, id=id)
        self.purpose = ""

    def show(self, purpose: str) -> None:
        self.purpose = purpose
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        return [Line(width).add(f" {self.purpose}", self.look.key).end(self.look.key)]


class LineInput(Input):
    """An input that is shown only between `open` and `close`."""

    DEFAULT_CSS = """
    LineInput { height: 1; border: none; padding: 0; background: $surface; }
    LineInput:focus { border: none; background-tint: transparent 0%; }
    """

    class Cancelled(Message):
        """Left with Escape."""

    def __init__(self, look: Look, *, id: str = "line") -> None:
        super().__init__(id=id, compact=True, select_on_focus=False)
        self.add_class("tile")
        self.look = look
        self.shown = False
        self.purpose = ""
        self.can_focus = False

    def open(self, purpose: str, value: str, placeholder: str) -> None:
        """Show the line with a value, for one of the screen's purposes."""
        self.purpose = purpose
        self.placeholder = placeholder
        with self.prevent(Input.Changed):
            self.value = value
        self.cursor_position = len(value)
        self.shown = True
        self.can_focus = True
        self.call_after_refresh(self.focus)  # keys until then: `TracerApp.on_event`

    def close(self) -> None:
        self.shown = False
        self.can_focus = False

    def validate_value(self, value: str) -> str:
        return clean(value)  # pasted text may hold anything

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.post_message(self.Cancelled())

"""One line to type in, shown above the keys while it is needed: the filter, or a prompt."""

from __future__ import annotations

from textual import events
from textual.message import Message
from textual.widgets import Input

from tracer.format.text import clean
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look


class LineLabel(Canvas):
    """What the line beside it is for."""

    def __init__(self, look: Look, *, id: str = "line-label") -> None:
        super().__init__(look, id=id)
        self.add_class("tile")
        self.purpose = ""

    def show(self, purpose: str) -> None:
        """Name the purpose."""
        self.purpose = purpose
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """One row."""
        return [Line(width).put(f" {self.purpose}", self.look.key).end(self.look.key)]


class LineInput(Input):
    """An input that is there only between `open` and `close`."""

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
        """Show it with a value, for one of the screen's purposes."""
        self.purpose = purpose
        self.placeholder = placeholder
        with self.prevent(Input.Changed):
            self.value = value
        self.cursor_position = len(value)
        self.shown = True
        self.can_focus = True
        self.call_after_refresh(self.focus)  # what is typed until then: `TracerApp.on_event`

    def close(self) -> None:
        """Take it away."""
        self.shown = False
        self.can_focus = False

    def validate_value(self, value: str) -> str:
        """What is pasted may hold anything; the terminal is shown none of it raw."""
        return clean(value)

    def on_key(self, event: events.Key) -> None:
        """Escape leaves it."""
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.post_message(self.Cancelled())

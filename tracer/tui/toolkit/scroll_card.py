"""Panels whose rows may be more than there is room for: scrolled, or with a selected row."""

from __future__ import annotations

from rich.style import Style
from textual import events
from textual.message import Message

from tracer.tui.toolkit.canvas import Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look


class ScrollCard(Panel):
    """Shows the part of its `rows` that fits, from `top` on."""

    pad = 1
    top = 0

    def rows(self, width: int) -> list[Row]:
        """Return all rows, each exactly `width` cells."""
        raise NotImplementedError

    def body(self, width: int, height: int) -> list[Row]:
        rows = self.rows(width)
        top = max(0, min(self.top, len(rows) - height))
        return rows[top : top + height]

    @property
    def inner(self) -> tuple[int, int]:
        """Cells and rows inside."""
        margin = 3 if self.edge else 2 * self.pad
        return max(1, self.size.width - margin), max(1, self.size.height - self.titled)

    def scroll_rows(self, rows: int) -> None:
        """Scroll by rows (+ is down)."""
        width, height = self.inner
        most = max(0, len(self.rows(width)) - height)
        self.top = max(0, min(most, min(self.top, most) + rows))
        self.repaint()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_rows(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_rows(3)


class SelectionPanel(Panel):
    """A heading and below it `entries` in rows, of which one is selected and stays in sight."""

    class Opened(Message):
        """A row was clicked twice."""

    def __init__(self, look: Look, *, id: str, edge: bool = False) -> None:
        super().__init__(look, id=id, edge=edge)
        self.selected = 0

    @property
    def entries(self) -> int:
        """How many there are."""
        raise NotImplementedError

    def select(self, row: int) -> None:
        """Select an entry, or the one nearest to it."""
        self.selected = max(0, min(self.entries - 1, row))
        self.repaint()

    def on(self, style: Style, selected: bool) -> Style:
        """Return `style` as it is in a row, selected or not."""
        return self.look.on(style, self.look.palette.selected, reverse=True) if selected else style

    def in_sight(self, height: int) -> range:
        """Return the entries that are seen in `height` rows, the heading included."""
        room = max(0, height - 1)
        first = max(0, self.selected - max(1, room) + 1)
        return range(first, min(self.entries, first + room))

    def on_click(self, event: events.Click) -> None:
        seen = self.in_sight(self.size.height - self.titled)
        row = event.y - self.titled - 1
        if 0 <= row < len(seen):
            self.select(seen[row])
            if event.chain >= 2:
                self.post_message(self.Opened())

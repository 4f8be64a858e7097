"""A panel whose rows may be more than it has room for."""

from __future__ import annotations

from textual import events

from tracer.tui.toolkit.canvas import Row
from tracer.tui.toolkit.panel import Panel


class ScrollCard(Panel):
    """Subclasses give all `rows` of a width; what fits from `top` on is shown."""

    pad = 1

    def rows(self, width: int) -> list[Row]:
        """All rows, each exactly `width` cells."""
        raise NotImplementedError

    top = 0

    def body(self, width: int, height: int) -> list[Row]:
        """What of the rows fits."""
        rows = self.rows(width)
        top = max(0, min(self.top, len(rows) - height))
        return rows[top : top + height]

    @property
    def inner(self) -> tuple[int, int]:
        """Cells and rows inside."""
        margin = 3 if self.edge else 2 * self.pad
        return max(1, self.size.width - margin), max(
            1, self.size.height - (1 if self.titled else 0)
        )

    def scroll_rows(self, rows: int) -> None:
        """Scroll by rows (+ is down)."""
        width, height = self.inner
        most = max(0, len(self.rows(width)) - height)
        self.top = max(0, min(most, min(self.top, most) + rows))
        self.repaint()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Back."""
        event.stop()
        self.scroll_rows(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """On."""
        event.stop()
        self.scroll_rows(3)

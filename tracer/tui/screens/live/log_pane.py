"""The engine's own output: kept off the screen and shown here, the newest line last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual import events

from tracer.format.text import cell_width, clean, fit
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

LINE_ROOM = 4_000
"""Characters of a line that are looked at; a longer one is cut."""


class LogPane(Panel):
    """The last lines that fit; up and down look back."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="log")
        self.lines: Sequence[str] = ()
        self.path = ""
        self.back = 0
        """Lines between the last one and the last one shown."""
        self.total = 0

    def show(self, lines: Sequence[str], path: str) -> None:
        """Draw the tail of `lines`, which are as the engine wrote them."""
        room = max(1, self.size.height - 1)
        end = len(lines) - self.back
        # A deque is sliced from its end: only what is shown is touched.
        wanted = [lines[index] for index in range(max(0, end - room), max(0, end))]
        self.lines, self.path = wanted, path
        self.total = len(lines)
        self.repaint()

    def title(self) -> str:
        return "engine log" if self.path else "events"

    def note(self) -> list[Segment]:
        path = clean(self.path)
        room = max(0, self.size.width - 24)
        if cell_width(path) > room:
            path = fit(path, room, ellipsis=self.look.glyphs.ellipsis)
        return [Segment(path, self.look.dim)] if path else []

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        for text in self.lines[-height:] if height else ():
            plain = text[:LINE_ROOM].rstrip("\r\n")
            lowered = plain.lower()
            style = look.text
            if "error" in lowered or "traceback" in lowered or "critical" in lowered:
                style = look.bad
            elif "warn" in lowered:
                style = look.warn
            rows.append(
                Line(width).put_text(plain, style, ellipsis=look.glyphs.ellipsis).end(look.text)
            )
        if not rows:
            nothing = (
                "the engine has written nothing yet" if self.path else "nothing has happened yet"
            )
            rows.append(Line(width).put(nothing, look.dim).end(look.text))
        return rows

    def look_back(self, lines: int) -> None:
        """Move back (+) or forward (-) by lines."""
        most = max(0, self.total - max(1, self.size.height - 1))
        self.back = max(0, min(most, self.back + lines))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Older lines."""
        event.stop()
        self.look_back(3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Newer lines."""
        event.stop()
        self.look_back(-3)

"""The engine's own output: kept off the screen and shown here, the newest line last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment

from tracer.format.text import cell_width, clean, fit
from tracer.tui.screens.live.rows import words
from tracer.tui.toolkit.canvas import Row
from tracer.tui.toolkit.scroll_card import ScrollCard
from tracer.tui.toolkit.theme import Look

LINE_ROOM = 4_000
"""Characters of a line that are looked at; a longer one is cut."""


class LogPane(ScrollCard):
    """The last lines that fit; up and down look back."""

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
        self.lines = [lines[index] for index in range(max(0, end - room), max(0, end))]
        self.path, self.total = path, len(lines)
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
            line = text[:LINE_ROOM].rstrip("\r\n")
            lowered = line.lower()
            style = look.warn if "warn" in lowered else look.text
            if any(word in lowered for word in ("error", "traceback", "critical")):
                style = look.bad
            rows.append(words(look, width, line, style))
        if rows:
            return rows
        nothing = "the engine has written nothing yet" if self.path else "nothing has happened yet"
        return [words(look, width, nothing)]

    def scroll_rows(self, rows: int) -> None:
        """Scroll by rows (+ is down, to newer lines)."""
        most = max(0, self.total - max(1, self.size.height - 1))
        self.back = max(0, min(most, self.back - rows))

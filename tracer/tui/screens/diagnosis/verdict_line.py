"""The first rows of the Diagnosis screen: the verdict in one sentence, and its scope."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.wrapped import wrap


class VerdictLine(Canvas):
    """The verdict on all rows but the last, and there, dimmed, its scope."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="verdict")
        self.verdict = ""
        self.scope = ""
        self.status = ""
        self.style: Style = look.text
        self.status_style: Style = look.good

    def show(
        self, verdict: str, style: Style, scope: str, status: str, status_style: Style
    ) -> None:
        """Draw a verdict in its style, its scope, and the status of the stream."""
        self.verdict, self.style, self.scope = verdict, style, scope
        self.status, self.status_style = label(status), status_style
        self.repaint()

    def wanted(self, width: int) -> int:
        """Return the rows wanted."""
        return len(self._wrapped(width)) + 1

    def _wrapped(self, width: int) -> list[list[Segment]]:
        room = max(20, width - 4 - cell_width(self.status))
        return wrap(self.verdict, room, self.style, self.style)

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        wrapped = self._wrapped(width)
        shown = wrapped[: max(1, height - 1)]
        rows: list[Row] = []
        for number, segments in enumerate(shown):
            line = Line(width).add("   " if number else f" {look.glyphs.bullet} ", self.style)
            for text, _, _ in segments:
                line.add_text(text, self.style)
            if number == len(shown) - 1 < len(wrapped) - 1:
                line.add(look.glyphs.ellipsis, self.style)
            if number == 0 and self.status and line.used + cell_width(self.status) < width:
                line.fill_to(width - cell_width(self.status) - 1, look.text)
                line.add_text(self.status, self.status_style)
            rows.append(line.end(look.text))
        if height > 1:
            rows.append(Line(width).add_text(f"   {self.scope}", look.dim).end(look.text))
        return rows

"""The first rows of the Diagnosis screen: what is wrong in one sentence, and what was looked at."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.wrapped import wrap


class VerdictLine(Canvas):
    """The verdict on as many rows as there are but one, and below it, dimmed, its scope."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="verdict")
        self.add_class("tile")
        self.verdict = ""
        self.scope = ""
        self.status = ""
        self.style: Style = look.text
        self.status_style: Style = look.good

    def show(
        self, verdict: str, style: Style, scope: str, status: str, status_style: Style
    ) -> None:
        """Draw a verdict in its style, what it is about, and the status of the stream."""
        self.verdict, self.style, self.scope = verdict, style, scope
        self.status, self.status_style = status, status_style
        self.repaint()

    def wanted(self, width: int) -> int:
        """Rows wanted: the verdict's and one for its scope."""
        return len(self._wrapped(width)) + 1

    def _wrapped(self, width: int) -> list[list[Segment]]:
        room = max(20, width - 4 - cell_width(label(self.status)))
        return wrap(self.verdict, room, self.style, self.style)

    def paint(self, width: int, height: int) -> list[Row]:
        """The rows."""
        look = self.look
        status = label(self.status)
        wrapped = self._wrapped(width)
        rows: list[Row] = []
        for number, segments in enumerate(wrapped[: max(1, height - 1)]):
            line = Line(width).put(f" {look.glyphs.bullet} " if number == 0 else "   ", self.style)
            last = number == max(1, height - 1) - 1 and len(wrapped) > number + 1
            for text, _, _ in segments:
                line.put_text(text, self.style, ellipsis=look.glyphs.ellipsis)
            if last:
                line.put(look.glyphs.ellipsis, self.style)
            if number == 0 and status and line.used + cell_width(status) < width:
                line.fill_to(width - cell_width(status) - 1, look.text).put_text(
                    status, self.status_style
                )
            rows.append(line.end(look.text))
        if height > 1:
            line = Line(width).put_text(f"   {self.scope}", look.dim, ellipsis=look.glyphs.ellipsis)
            rows.append(line.end(look.text))
        return rows

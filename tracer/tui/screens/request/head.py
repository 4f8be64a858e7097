"""The first lines of the Request screen: who it is, what came of it, and its figures."""

from __future__ import annotations

from rich.style import Style

from tracer.format.text import cell_width
from tracer.state.view import Phase, RequestView
from tracer.tui.naming import phase_text
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look


class RequestHead(Canvas):
    """Two rows: identity and fate, then numbers."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="head")
        self.add_class("tile")
        self.view: RequestView | None = None
        self.missing = ""
        self.status = ""
        self.status_style: Style = look.good
        self.now = 0

    def show(
        self, view: RequestView | None, now: int, status: str, style: Style, missing: str = ""
    ) -> None:
        """Draw a request, or why there is none."""
        self.view, self.now, self.status, self.status_style, self.missing = (
            view,
            now,
            status,
            style,
            missing,
        )
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """The rows."""
        look, view = self.look, self.view
        line = Line(width)
        status = label(self.status)
        room = max(0, width - cell_width(status) - 2)
        if view is None:
            line.put_text(
                f" {self.missing}", look.warn, min(room, width), ellipsis=look.glyphs.ellipsis
            )
            return [self._with_status(line, status, width)]
        phase, style = phase_text(view, look)
        parts: list[tuple[str, Style]] = [(view.id, look.accent), (phase, style)]
        if view.error:
            parts.append((view.error, look.bad))
        if view.incomplete:
            parts.append(("incomplete: events were lost", look.warn))
        if view.route:
            parts.append((view.route, look.text))
        if view.streaming is not None:
            parts.append(("streaming" if view.streaming else "not streaming", look.dim))
        if view.status_code is not None:
            parts.append(
                (f"HTTP {view.status_code}", look.bad if view.status_code >= 400 else look.dim)
            )
        if view.disconnected:
            parts.append(("client hung up", look.warn))
        line.put(" ", look.text)
        for index, (text, part_style) in enumerate(parts):
            left = room - line.used - (3 if index else 0)
            if left < 4:
                break
            if index:
                line.put(f" {look.glyphs.dot} ", look.faint)
            line.put_text(
                text, part_style, min(cell_width(label(text)), left), ellipsis=look.glyphs.ellipsis
            )
        rows: list[Row] = [self._with_status(line, status, width)]
        if height > 1:
            rows.append(self._numbers(view, width))
        return rows

    def _with_status(self, line: Line, status: str, width: int) -> Row:
        if status and line.used + cell_width(status) < width:
            line.fill_to(width - cell_width(status) - 1, self.look.text)
            line.put_text(status, self.status_style)
        return line.end(self.look.text)

    def _numbers(self, view: RequestView, width: int) -> Row:
        look = self.look
        live = view.closed is None and view.phase not in (Phase.DONE, Phase.LOST)
        prompt = figures.count(view.prompt_tokens)
        if view.cached_tokens:
            share = view.cached_tokens / view.prompt_tokens if view.prompt_tokens else None
            prompt += f" ({figures.count(view.cached_tokens)} cached, {figures.percent(share)}%)"
        out = figures.count(view.output_tokens)
        if live and view.max_tokens is not None:
            out += f" of {figures.count(view.max_tokens)}"
        e2e = view.e2e_ms
        if e2e is None:
            e2e = ((self.now if view.closed is None else view.closed) - view.received) / 1e6
        items = [
            ("prompt", prompt),
            ("out", out),
            ("E2E" if not live else "so far", f"{figures.milliseconds(e2e)} ms"),
            ("TTFT", figures.milliseconds(view.ttft_ms)),
            ("queue", figures.milliseconds(view.queue_ms)),
            ("TPOT", figures.milliseconds(view.tpot_ms)),
            ("batch", figures.count(view.batch)),
            ("preempted", figures.count(view.preemptions)),
            ("engine TTFT", figures.milliseconds(view.engine_ttft_ms)),
        ]
        if not view.preemptions:
            del items[7]
        line = Line(width).put(" ", look.text)
        for index, (name, value) in enumerate(items):
            cells = len(name) + len(value) + 1
            if line.room < cells + 3:
                break
            line.put("   " if index else "", look.text).put(name + " ", look.dim).put(
                value, look.bold
            )
        return line.end(look.text)

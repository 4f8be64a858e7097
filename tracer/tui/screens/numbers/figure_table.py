"""The figures, window beside window: six latencies with their percentiles and samples, then what
else is counted."""

from __future__ import annotations

from collections.abc import Callable

from rich.segment import Segment

from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import Attainment, Lengths, Numbers, Window
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row, label
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

LATENCIES = (
    ("QUEUE", "queue"),
    ("PREFILL", "prefill"),
    ("TTFT", "ttft"),
    ("ITL", "itl"),
    ("TPOT", "tpot"),
    ("E2E", "e2e"),
)
NAMES = {key: name for name, key in LATENCIES}
FIRST = 11
"""Cells of the names."""
CELLS = 33
"""Cells of one window: p50, p95, p99, samples."""


class FigureTable(Panel):
    """Shows the chosen window and as many others as fit, in their order."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="figures")
        self.numbers: Numbers | None = None

    def show(self, numbers: Numbers | None) -> None:
        """Draw these."""
        self.numbers = numbers
        self.repaint()

    def title(self) -> str:
        numbers = self.numbers
        if numbers is None or not numbers.ask.text:
            return "figures of all requests" if self.size.width >= 60 else "figures"
        return f"figures of {numbers.groups} of the groups: {numbers.ask.text}"

    def note(self) -> list[Segment]:
        numbers = self.numbers
        if numbers is None:
            return []
        slo = str(numbers.ask.slo) or "no targets: o sets them"
        return [Segment(label(slo), self.look.dim)]

    def wanted(self, width: int) -> int:
        """Rows that it fills when there is room."""
        return 2 + len(LATENCIES) + len(self._lines()) if width >= FIRST + CELLS else 8

    def windows(self, width: int) -> list[Window]:
        """The windows that fit: the chosen one, then the longest, then the others."""
        numbers = self.numbers
        if numbers is None:
            return []
        fit = max(1, (width - FIRST) // CELLS)
        chosen = numbers.window(numbers.window_s)
        order = [chosen, numbers.windows[-1], *numbers.windows]
        kept: list[Window] = []
        for window in order:
            if window not in kept and len(kept) < fit:
                kept.append(window)
        return sorted(kept, key=lambda window: window.window_s)

    def body(self, width: int, height: int) -> list[Row]:
        look, numbers = self.look, self.numbers
        if numbers is None:
            return []
        windows = self.windows(width)
        cells = max(CELLS, (width - FIRST) // max(1, len(windows)))
        rows: list[Row] = [self._head(width, windows, cells)]
        for name, key in LATENCIES:
            line = Line(width).put(f"{name} ms".ljust(FIRST), look.accent)
            for window in windows:
                self._latency(line, window.all.timers.get(key, Quantiles()), cells)
            rows.append(line.end(look.text))
        for name, value in self._lines():
            if len(rows) >= height:
                break
            line = Line(width).put(name.ljust(FIRST)[:FIRST], look.accent)
            for window in windows:
                text = value(window)
                line.put_text(
                    text[: cells - 1],
                    look.dim if text == figures.UNKNOWN else look.text,
                    cells,
                    ellipsis=look.glyphs.ellipsis,
                )
            rows.append(line.end(look.text))
        return rows[:height]

    def _head(self, width: int, windows: list[Window], cells: int) -> Row:
        look, numbers = self.look, self.numbers
        line = Line(width).fill_to(FIRST, look.dim)
        for window in windows:
            chosen = numbers is not None and window.window_s == numbers.window_s
            name = figures.span(window.window_s)
            at = line.used
            line.put("p50".ljust(8), look.dim).put("p95".ljust(8), look.dim).put(
                "p99".ljust(8), look.dim
            )
            line.put("n, ", look.dim).put(name, look.tab_on if chosen else look.dim)
            line.fill_to(at + cells, look.dim)
        return line.end(look.text)

    def _latency(self, line: Line, timer: Quantiles, cells: int) -> None:
        look = self.look
        at = line.used
        if timer.p50 is None:
            line.put(figures.UNKNOWN, look.dim)
        else:
            line.put(figures.milliseconds(timer.p50).ljust(8), look.bold)
            line.put(figures.milliseconds(timer.p95).ljust(8), look.text)
            line.put(figures.milliseconds(timer.p99).ljust(8), look.text)
            line.put(figures.short_count(timer.count), look.dim)
        line.fill_to(at + cells, look.text)

    def _lines(self) -> list[tuple[str, Callable[[Window], str]]]:
        lines: list[tuple[str, Callable[[Window], str]]] = [
            (
                "REQUESTS",
                lambda w: f"{figures.count(w.all.requests)}  {figures.rate(w.all.request_rate)}/s",
            ),
            ("TOKENS", _tokens),
            ("HITS", _hits),
            ("BUDGET", _budget),
            ("PREEMPTED", lambda w: figures.count(w.all.preemptions)),
        ]
        if self.numbers is not None and self.numbers.ask.slo:
            lines.append(("GOODPUT", lambda w: _goodput(w.all.slo)))
            lines.append(("ATTAINED", lambda w: _attained(w.all.slo)))
        lines += [
            ("ENDED", _ended),
            ("PROMPT tok", lambda w: _lengths(w.all.prompt)),
            ("OUTPUT tok", lambda w: _lengths(w.all.output)),
        ]
        return lines


def _tokens(window: Window) -> str:
    into, out = (
        figures.short_count(window.all.tokens_in),
        figures.short_count(window.all.tokens_out),
    )
    return f"in {into}/s  out {out}/s"


def _hits(window: Window) -> str:
    figure = window.all
    if figure.hit_share is None:
        return figures.UNKNOWN
    own = (
        ""
        if figure.hit_requests is None
        else f"  {figures.percent(figure.hit_requests)}% of ended had any"
    )
    return f"{figures.percent(figure.hit_share)}%{own}"


def _budget(window: Window) -> str:
    if window.budget_use is None:
        return figures.UNKNOWN
    return f"{figures.percent(window.budget_use)}%  of {figures.short_count(window.steps)} steps"


def _goodput(slo: Attainment | None) -> str:
    if slo is None or slo.share is None:
        return figures.UNKNOWN
    return f"{slo.goodput:.2f}/s  {figures.percent(slo.share)}% of {figures.count(slo.judged)}"


def _attained(slo: Attainment | None) -> str:
    if slo is None:
        return figures.UNKNOWN
    return "  ".join(
        f"{NAMES.get(name, name)} "
        f"{figures.UNKNOWN if share is None else figures.percent(share) + '%'}"
        for name, _, share in slo.each
    )


def _ended(window: Window) -> str:
    figure = window.all
    if not figure.ended:
        return figures.UNKNOWN
    return f"{figures.count(figure.ended)}  " + "  ".join(
        f"{reason} {figures.count(count)}" for reason, count in figure.reasons
    )


def _lengths(lengths: Lengths) -> str:
    if lengths.p50 is None:
        return figures.UNKNOWN
    return "".join(
        f"{figures.short_count(value):<8}" for value in (lengths.p50, lengths.p95, lengths.p99)
    ) + (f"max {figures.short_count(lengths.most)}")

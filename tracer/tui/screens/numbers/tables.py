"""The tables of the Numbers screen: the figures, window beside window; engines, routes or tenants
beside each other; and the engines now in one row."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from rich.segment import Segment

from tracer.format import figures
from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import Gauges, GroupFigures, Lengths, Numbers, Window
from tracer.tui.screens.live.rows import words
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

LATENCIES = ("queue", "prefill", "ttft", "itl", "tpot", "e2e")
FIRST = 11
"""Cells of the names."""
CELLS = 33
"""Cells of one window: p50, p95, p99, samples."""


class NumbersPart(Canvas):
    """A part of the screen that draws from the figures given last."""

    numbers: Numbers | None = None

    def show(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.repaint()


class GaugeLine(NumbersPart):
    """The engines now, in one row: KV blocks by what they are for, queue, batch, preemptions. Names
    shorten, then the least telling figures leave, when the row gets narrow."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="gauges")
        self.add_class("tile")

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        line = Line(width).add(" ", look.text)
        for name, value, more in self._items(wide=width >= 132):
            if line.room < len(name) + len(value) + len(more) + 4:
                break
            line.add(name + " ", look.accent).add(value, look.bold).add(more + "   ", look.dim)
        return [line.end(look.text)]

    def _items(self, *, wide: bool) -> list[tuple[str, str, str]]:
        """Return name, value, and what stands behind the value."""
        gauges = self.numbers.gauges if self.numbers is not None else Gauges()
        count = figures.count

        def blocks(value: int | None) -> tuple[str, str]:
            share = gauges.share(value)
            return figures.percentage(
                share
            ), f" {count(value)}" if wide and share is not None else ""

        def of(value: int | None, most: int | None) -> tuple[str, str]:
            known = most is not None and value is not None
            return count(value), f"/{count(most)}" if known else ""

        return [
            ("KV live", *blocks(gauges.live)),
            ("cached", *blocks(gauges.cached)),
            ("free", *blocks(gauges.free)),
            ("queue" if wide else "Q", count(gauges.waiting), ""),
            ("running" if wide else "run", count(gauges.running), ""),
            ("batch" if wide else "B", *of(gauges.batch, gauges.max_batch)),
            ("preempted" if wide else "P", count(gauges.preemptions), ""),
            ("step tokens", *of(gauges.step_tokens, gauges.max_batch_tokens)),
            ("evicted", count(gauges.evicted), " blocks"),
        ]


class FigureTable(Panel, NumbersPart):
    """Shows the chosen window and as many others as fit, in their order."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="figures")

    def title(self) -> str:
        numbers = self.numbers
        if numbers is None or not numbers.ask.text:
            return "figures of all requests" if self.size.width >= 60 else "figures"
        return f"figures of {numbers.groups} groups that match {numbers.ask.text}"

    def note(self) -> list[Segment]:
        numbers = self.numbers
        if numbers is None:
            return []
        slo = str(numbers.ask.slo) or "no SLO targets (o to set)"
        return [Segment(label(slo), self.look.dim)]

    def wanted(self, width: int) -> int:
        return 2 + len(LATENCIES) + len(self._lines()) if width >= FIRST + CELLS else 8

    def windows(self, width: int) -> list[Window]:
        """Return the windows that fit: the chosen one, then the longest, then the others."""
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
        line = Line(width).fill_to(FIRST, look.dim)
        for window in windows:
            at = line.used
            chosen = window.window_s == numbers.window_s
            line.add("p50".ljust(8) + "p95".ljust(8) + "p99".ljust(8) + "n, ", look.dim)
            line.add(figures.span(window.window_s), look.tab_on if chosen else look.dim)
            line.fill_to(at + cells, look.dim)
        rows: list[Row] = [line.end(look.text)]
        for name in LATENCIES:
            line = Line(width).add(f"{name.upper()} ms".ljust(FIRST), look.accent)
            for window in windows:
                at = line.used
                self._latency(line, window.all.timers.get(name, Quantiles()))
                line.fill_to(at + cells, look.text)
            rows.append(line.end(look.text))
        for name, value in self._lines():
            line = Line(width).add(name.ljust(FIRST)[:FIRST], look.accent)
            for window in windows:
                text, at = value(window), line.used
                style = look.dim if text == figures.UNKNOWN else look.text
                line.add_text(text, style, cells - 1, ellipsis=look.glyphs.ellipsis)
                line.fill_to(at + cells, look.text)
            rows.append(line.end(look.text))
        return rows[:height]

    def _latency(self, line: Line, timer: Quantiles) -> None:
        look = self.look
        if timer.p50 is None:
            line.add(figures.UNKNOWN, look.dim)
            return
        line.add(figures.milliseconds(timer.p50).ljust(8), look.bold)
        line.add(figures.milliseconds(timer.p95).ljust(8), look.text)
        line.add(figures.milliseconds(timer.p99).ljust(8), look.text)
        line.add(figures.short_count(timer.count), look.dim)

    def _lines(self) -> list[tuple[str, Callable[[Window], str]]]:
        """Return name and text of each row below the latencies."""
        slo = self.numbers is not None and bool(self.numbers.ask.slo)
        return [
            ("REQUESTS", _requests),
            ("TOKENS", _tokens),
            ("HITS", _hits),
            ("BUDGET", _budget),
            ("PREEMPTED", lambda window: figures.count(window.all.preemptions)),
            *([("GOODPUT", _goodput), ("ATTAINED", _attained)] if slo else []),
            ("ENDED", _ended),
            ("PROMPT tok", lambda window: _lengths(window.all.prompt)),
            ("OUTPUT tok", lambda window: _lengths(window.all.output)),
        ]


def _requests(window: Window) -> str:
    figure = window.all
    return f"{figures.count(figure.requests)}  {figures.rate(figure.request_rate)}/s"


def _tokens(window: Window) -> str:
    figure = window.all
    into, out = figures.short_count(figure.tokens_in), figures.short_count(figure.tokens_out)
    return f"in {into}/s  out {out}/s"


def _hits(window: Window) -> str:
    figure = window.all
    if figure.hit_share is None or figure.hit_requests is None:
        return figures.percentage(figure.hit_share)
    tokens, requests = figures.percentage(figure.hit_share), figures.percentage(figure.hit_requests)
    return f"{tokens} of tokens, {requests} of requests"


def _budget(window: Window) -> str:
    if window.budget_use is None:
        return figures.UNKNOWN
    return (
        f"{figures.percentage(window.budget_use)} used ({figures.short_count(window.steps)} steps)"
    )


def _goodput(window: Window) -> str:
    slo = window.all.slo
    if slo is None or slo.share is None:
        return figures.UNKNOWN
    return f"{slo.goodput:.2f}/s  {figures.percentage(slo.share)} of {figures.count(slo.judged)}"


def _attained(window: Window) -> str:
    slo = window.all.slo
    if slo is None:
        return figures.UNKNOWN
    return "  ".join(f"{name.upper()} {figures.percentage(share)}" for name, _, share in slo.each)


def _ended(window: Window) -> str:
    figure = window.all
    if not figure.ended:
        return figures.UNKNOWN
    reasons = "  ".join(f"{reason} {figures.count(count)}" for reason, count in figure.reasons)
    return f"{figures.count(figure.ended)}  {reasons}"


def _lengths(lengths: Lengths) -> str:
    if lengths.p50 is None:
        return figures.UNKNOWN
    quantiles = (lengths.p50, lengths.p95, lengths.p99)
    texts = "".join(f"{figures.short_count(value):<8}" for value in quantiles)
    return f"{texts}max {figures.short_count(lengths.most)}"


COLUMNS = (
    ("req/s", 7), ("TTFT p50", 9), ("p95", 8), ("ITL p50", 8), ("p95", 8), ("out/s", 7),
    ("hits", 7), ("good", 7), ("QUEUE p95", 10), ("E2E p50", 9), ("n", 6),
)  # fmt: skip
"""Heads and cells, the most telling first: what does not fit is left out."""


class GroupTable(Panel, NumbersPart):
    """A row a group."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="groups")
        self.dimension = "tenant"
        self.rows: tuple[GroupFigures, ...] = ()
        self.titles: dict[str, str] = {}
        """Names for people of engines."""
        self.chosen = 0

    def show(self, numbers: Numbers) -> None:
        self.rows = numbers.window(numbers.window_s).groups.get(self.dimension, ())
        self.chosen = max(0, min(self.chosen, len(self.rows) - 1))
        super().show(numbers)

    def title(self) -> str:
        return f"by {self.dimension}"

    def note(self) -> list[Segment]:
        numbers = self.numbers
        if numbers is None:
            return []
        more = ", the rest as other" if numbers.overflow else ""
        text = f"{len(self.rows)}{more}, {figures.span(numbers.window_s)}"
        return [Segment(text, self.look.dim)]

    @property
    def choice(self) -> str:
        return self.rows[self.chosen].name if self.rows else ""

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.rows:
            return [words(look, width, f"no {self.dimension} has sent a request yet")]
        first = max(10, min(28, width // 3))
        line = Line(width).add(self.dimension.ljust(first), look.dim)
        columns = [cells for _, cells in COLUMNS]
        fits = sum(end <= line.room for end in accumulate(columns))
        for head, cells in COLUMNS[:fits]:
            line.add(head.rjust(cells), look.dim)
        rows: list[Row] = [line.end(look.text)]
        seen = max(1, height - 1)
        top = max(0, min(self.chosen - seen // 2, len(self.rows) - seen))
        for index, group in enumerate(self.rows[top : top + seen], top):
            chosen = index == self.chosen and self.has_focus
            name = self.titles.get(group.name) or group.name or "(none)"
            line = Line(width).add(look.glyphs.select if chosen else " ", look.accent)
            style = look.bold if chosen else look.text
            line.add_text(name, style, first - 1, ellipsis=look.glyphs.ellipsis)
            for cells, text in zip(columns[:fits], _values(group), strict=False):
                style = look.dim if text == figures.UNKNOWN else look.text
                line.add(text.rjust(cells)[-cells:], style)
            rows.append(line.end(look.text))
        return rows


def _values(group: GroupFigures) -> list[str]:
    """Return the texts of `COLUMNS`."""
    figure = group.figures
    ttft, itl, queue, e2e = (
        figure.timers.get(name, Quantiles()) for name in ("ttft", "itl", "queue", "e2e")
    )
    return [
        figures.rate(figure.request_rate),
        figures.milliseconds(ttft.p50),
        figures.milliseconds(ttft.p95),
        figures.milliseconds(itl.p50),
        figures.milliseconds(itl.p95),
        figures.short_count(figure.tokens_out),
        figures.percentage(figure.hit_share),
        figures.percentage(None if figure.slo is None else figure.slo.share),
        figures.milliseconds(queue.p95),
        figures.milliseconds(e2e.p50),
        figures.short_count(ttft.count),
    ]

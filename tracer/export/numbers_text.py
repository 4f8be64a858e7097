"""The Numbers view as lines of plain text, for `text.report`: every window side by side, then what
belongs to one."""

from __future__ import annotations

import math
from typing import Final

from tracer.export.page import Page
from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import Attainment, Curve, Figures, Lengths, Numbers, Window

LABELS: Final = {
    "queue": "queue",
    "prefill": "prefill",
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
}


def window_name(window_s: float) -> str:
    """``10 s``, ``1 min``, ``all``."""
    if math.isinf(window_s):
        return "all"
    return f"{window_s / 60:g} min" if window_s >= 60 else f"{window_s:g} s"


def told_windows(numbers: Numbers) -> list[Window]:
    """The windows that differ: those that are longer than the trace say what *all* says."""
    whole = numbers.windows[-1]
    return [window for window in numbers.windows if window is whole or window.span_s < whole.span_s]


def latency_lines(page: Page, numbers: Numbers) -> None:
    """p50/p95/p99 and samples of each latency over every window, as many windows as there is room
    for."""
    cells, first = 32, 8
    windows = told_windows(numbers)
    fit = max(1, (page.width - first) // cells)
    if len(windows) > fit:
        windows = windows[-fit:]
    heads = [f"p50 / p95 / p99 · {window_name(window.window_s)}" for window in windows]
    page.line("ms".ljust(first) + "".join(f"{head:>{cells}}" for head in heads))
    for name, label in LABELS.items():
        page.line(
            label.ljust(first)
            + "".join(f"{_triple(w.all.timers.get(name)):>{cells}}" for w in windows)
        )


def figure_lines(page: Page, numbers: Numbers) -> None:
    """Throughput, hits, budget, lengths, ends and targets over every window; groups of the whole
    trace."""
    for window in told_windows(numbers):
        figures = window.all
        name = window_name(window.window_s)
        page.flow(
            f"{name}: {figures.requests:,} requests", f"{figures.request_rate:.2f}/s",
            f"{figures.tokens_in:,.0f} tok/s in, {figures.tokens_out:,.0f} out",
            _share("hits", figures.hit_share), _share("token budget", window.budget_use),
            f"preemptions {figures.preemptions:,}", _ends(figures), _goodput(figures.slo),
        )  # fmt: skip
    whole = numbers.windows[-1]
    for name, lengths in (("prompt", whole.all.prompt), ("output", whole.all.output)):
        if lengths.count:
            page.flow(f"{name} tokens {_lengths(lengths)}", f"{lengths.count:,} requests ended")
    for name, curve in (
        ("batch size", numbers.by_batch),
        ("sequence position", numbers.by_position),
    ):
        if curve.rise is not None:
            page.line(f"ITL against {name}: {_rise(curve)}")
    _groups(page, whole)


def _groups(page: Page, window: Window) -> None:
    for dimension, groups in window.groups.items():
        if len(groups) < 2:
            continue
        for group in groups:
            figures = group.figures
            page.flow(
                f"{dimension} {group.name or '(none)'}: {figures.requests:,} requests",
                f"TTFT {_triple(figures.timers.get('ttft'))}",
                f"ITL {_triple(figures.timers.get('itl'))}",
                _share("hits", figures.hit_share),
                _goodput(figures.slo),
            )


def _triple(timer: Quantiles | None) -> str:
    if timer is None or timer.p50 is None:
        return "-"
    return f"{_ms(timer.p50)} / {_ms(timer.p95)} / {_ms(timer.p99)} · {timer.count:,}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def _lengths(lengths: Lengths) -> str:
    return f"{lengths.p50:,} / {lengths.p95:,} / {lengths.p99:,}, at most {lengths.most:,}"


def _ends(figures: Figures) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in figures.reasons)


def _share(name: str, share: float | None) -> str:
    return "" if share is None else f"{name} {share:.1%}"


def _goodput(slo: Attainment | None) -> str:
    if slo is None:
        return ""
    share = "-" if slo.share is None else f"{slo.share:.1%}"
    targets = ", ".join(f"{LABELS[name]} {ms:g} ms" for name, ms, _ in slo.each)
    return f"within {targets}: {share} of {slo.judged:,}, goodput {slo.goodput:.2f}/s"


def _rise(curve: Curve) -> str:
    first, last = curve.points[0], curve.points[-1]
    return (
        f"×{curve.rise:.2f} from {first.low:,} to {last.high:,} (p50 {_ms(first.p50)} to "
        f"{_ms(last.p50)} ms)"
    )

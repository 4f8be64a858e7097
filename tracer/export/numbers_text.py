"""The Numbers view as lines of plain text, for `text.report`: every window side by side, then what
belongs to one."""

from __future__ import annotations

from tracer.export.page import Page
from tracer.export.summary import TIMERS, quantiles
from tracer.format import figures
from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import Attainment, Curve, Figures, Lengths, Numbers, Window


def shown_windows(numbers: Numbers) -> list[Window]:
    """Return the windows that differ: one longer than the trace shows what *all* shows."""
    whole = numbers.windows[-1]
    return [window for window in numbers.windows if window is whole or window.span_s < whole.span_s]


def latency_lines(page: Page, numbers: Numbers) -> None:
    """Append p50/p95/p99 and samples of each latency, over as many windows as there is room for."""
    cells, first = 32, 8
    windows = shown_windows(numbers)[-max(1, (page.width - first) // cells) :]
    heads = [f"p50 / p95 / p99 · {figures.span(window.window_s)}" for window in windows]
    page.row(("ms", -first), *((head, cells) for head in heads))
    for name, label in TIMERS.items():
        texts = [_triple(window.all.timers.get(name)) for window in windows]
        page.row((label, -first), *((text, cells) for text in texts))


def figure_lines(page: Page, numbers: Numbers) -> None:
    """Append throughput, hits, budget, lengths, ends and targets over every window, and groups of
    the whole trace."""
    for window in shown_windows(numbers):
        figure = window.all
        page.flow(
            f"{figures.span(window.window_s)}: {figure.requests:,} requests",
            f"{figures.rate(figure.request_rate)}/s",
            f"{figures.count(figure.tokens_in)} tok/s in, {figures.count(figure.tokens_out)} out",
            _share("hits", figure.hit_share),
            _share("token budget used", window.budget_use),
            f"preemptions {figure.preemptions:,}",
            ", ".join(f"{count:,} {reason}" for reason, count in figure.reasons),
            _goodput(figure.slo),
        )
    whole = numbers.windows[-1]
    for name, lengths in (("prompt", whole.all.prompt), ("output", whole.all.output)):
        if lengths.count:
            page.flow(f"{name} tokens {_lengths(lengths)}", f"{lengths.count:,} requests ended")
    for name, curve in (
        ("batch size", numbers.by_batch),
        ("sequence position", numbers.by_position),
    ):
        if curve.rise is not None:
            page.line(f"ITL against {name}: {_rise(curve, curve.rise)}")
    for dimension, groups in whole.groups.items():
        for group in groups if len(groups) > 1 else ():
            _group(page, f"{dimension} {group.name or '(none)'}", group.figures)


def _group(page: Page, name: str, figure: Figures) -> None:
    page.flow(
        f"{name}: {figure.requests:,} requests",
        f"TTFT {_triple(figure.timers.get('ttft'))}",
        f"ITL {_triple(figure.timers.get('itl'))}",
        _share("hits", figure.hit_share),
        _goodput(figure.slo),
    )


def _triple(timer: Quantiles | None) -> str:
    if timer is None or timer.p50 is None:
        return figures.UNKNOWN
    return f"{' / '.join(quantiles(timer))} · {timer.count:,}"


def _lengths(lengths: Lengths) -> str:
    return f"{lengths.p50:,} / {lengths.p95:,} / {lengths.p99:,}, at most {lengths.most:,}"


def _share(name: str, share: float | None) -> str:
    return "" if share is None else f"{name} {figures.percentage(share)}"


def _goodput(slo: Attainment | None) -> str:
    if slo is None:
        return ""
    targets = ", ".join(f"{TIMERS[name]} {ms:g} ms" for name, ms, _ in slo.each)
    return (
        f"within {targets}: {figures.percentage(slo.share)} of {slo.judged:,}, "
        f"goodput {figures.rate(slo.goodput)}/s"
    )


def _rise(curve: Curve, rise: float) -> str:
    first, last = curve.points[0], curve.points[-1]
    before, after = figures.milliseconds(first.p50), figures.milliseconds(last.p50)
    return f"×{rise:.2f} from {first.low:,} to {last.high:,} (p50 {before} to {after} ms)"

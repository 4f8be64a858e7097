"""The Numbers view from the counters: every figure of docs/numbers.md, computed here alone.

Latencies of the whole trace come from the six timers, rates of the whole trace from the logs that
the context strip reads; those of groups, and of what a filter leaves, from the windowed counts.
Ends, lengths and targets are exact: they come from the table's rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.state.metrics.counters import STEP_BUDGET, STEP_TOKENS, STEPS
from tracer.state.metrics.gap_counter import BY_BATCH, BY_PLACE, COLUMNS, COUNTERS, TIMERS, WIDTH
from tracer.state.metrics.groups import OTHER
from tracer.state.metrics.histogram import WINDOWS_S, Quantiles, nearest_window
from tracer.state.metrics.numbers import (
    Ask,
    Attainment,
    Curve,
    Figures,
    Gauges,
    GroupFigures,
    History,
    Lengths,
    Numbers,
    Point,
    PromptPoint,
    Stretch,
    Window,
)
from tracer.state.metrics.octaves import RANGES, high_of, low_of, range_of
from tracer.state.metrics.rates import per_second
from tracer.state.metrics.windowed import STRIDE, Slot, quantiles_by_row, value_ns
from tracer.state.request.outcome import CANCELLED, FAILED
from tracer.state.view import EngineView, engines_among

if TYPE_CHECKING:
    from tracer.state.fold import Fold

SHARES: Final = (0.5, 0.95, 0.99)
STALL_NS: Final = 100 * NS_PER_MS
STALL_STEPS: Final = 1.5
"""Members that wait longer than both (ns, typical steps) between two steps are stalled: as `tracer
diagnose` has it."""
ENOUGH: Final = 0.01
"""Share of a curve's samples that one of its ranges must hold to speak for an end of it."""

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def numbers(
    state: Fold, now: int, window_s: float, ask: Ask, engines: Sequence[EngineView]
) -> Numbers:
    """Everything at `now` (ns); curves and history over the window nearest to `window_s`."""
    counters = state.counters
    text = ask.text.lower()
    chosen = np.array([not text or group.matches(text) for group in counters.groups.known])
    rows = counters.finished_table.columns()
    rows = {
        name: column[(rows["over"] <= now) & chosen[rows["group"]]] for name, column in rows.items()
    }
    windows = tuple(
        [_window(state, now, place, ask, chosen, rows) for place in range(len(WINDOWS_S))]
    )
    place = nearest_window(window_s)
    slot, _ = counters.counts.over(now, place)
    since = max(state.began, now - _length(WINDOWS_S[place], now))
    return Numbers(
        now=now,
        began=state.began,
        ask=ask,
        window_s=WINDOWS_S[place],
        windows=windows,
        gauges=_gauges(engines),
        by_batch=_curve(slot, BY_BATCH),
        by_position=_curve(slot, BY_PLACE),
        by_prompt=_by_prompt(
            {name: column[rows["over"] >= since] for name, column in rows.items()}
        ),
        history=_history(state, text, since, now, engines),
        groups=int(chosen[1:].sum()),
        overflow=bool((slot.keys // (STRIDE * WIDTH) == OTHER).any()),
        ledger_from_s=counters.finished_table.since(state.began),
    )


def _length(window_s: float, now: int) -> int:
    return now if math.isinf(window_s) else int(window_s * NS_PER_S)


# --- one window -----------------------------------------------------------------------------------


def _window(
    state: Fold, now: int, place: int, ask: Ask, chosen: Mask, rows: dict[str, Ints]
) -> Window:
    counters, window_s = state.counters, WINDOWS_S[place]
    length = _length(window_s, now)
    slot, begin = counters.counts.over(now, place)
    span = min(length, max(0, now - state.began))
    slots_span = max(0, now - max(begin or 0, state.began))
    ended = {name: column[rows["over"] >= now - length] for name, column in rows.items()}
    series = slot.keys.astype(np.int64) // STRIDE
    everyone = np.where(chosen, 0, -1)
    whole = _parts(
        counters.finished_table.reasons, slot, series, everyone, 1, slots_span, span, ended, ask
    )[0]
    if not ask.text:
        whole = _exact(state, now, length, span, place, whole)
    groups: dict[str, tuple[GroupFigures, ...]] = {}
    for dimension in ask.by if window_s in ask.grouped else ():
        names: dict[str, int] = {}
        belongs = np.full(len(chosen), -1)
        for number, group in enumerate(counters.groups.known):
            if chosen[number] and (number != OTHER or (series // WIDTH == OTHER).any()):
                belongs[number] = names.setdefault(getattr(group, dimension), len(names))
        parts = _parts(
            counters.finished_table.reasons,
            slot,
            series,
            belongs,
            len(names),
            slots_span,
            span,
            ended,
            ask,
        )
        groups[dimension] = tuple(map(GroupFigures, names, parts))
    steps, tokens, budget = (
        int(slot.counts[series == place].sum()) for place in (STEPS, STEP_TOKENS, STEP_BUDGET)
    )
    return Window(
        window_s=window_s,
        span_s=span / NS_PER_S,
        all=whole,
        steps=steps,
        budget_use=tokens / budget if budget else None,
        groups=groups,
    )


def _exact(state: Fold, now: int, length: int, span: int, place: int, whole: Figures) -> Figures:
    """The figures of the whole trace as every other screen has them."""
    (received,) = state.received.over(now, length)
    prompt, cached = state.scheduled.over(now, length)
    (produced,) = state.produced.over(now, length)
    return Figures(
        timers=state.timers.quantiles(now, WINDOWS_S[place]),
        requests=received,
        request_rate=per_second(received, span),
        tokens_in=per_second(prompt, span),
        tokens_out=per_second(produced, span),
        hit_share=cached / prompt if prompt else None,
        preemptions=whole.preemptions,
        ended=whole.ended,
        reasons=whole.reasons,
        prompt=whole.prompt,
        output=whole.output,
        hit_mean=whole.hit_mean,
        hit_requests=whole.hit_requests,
        slo=whole.slo,
    )


def _parts(
    reasons: Sequence[str],
    slot: Slot,
    series: Ints,
    belongs: Ints,
    number: int,
    slots_span: int,
    span: int,
    ended: dict[str, Ints],
    ask: Ask,
) -> list[Figures]:
    """Figures of `number` parts; `belongs` says which part each group is in, -1 for none."""
    group, column = series // WIDTH, series % WIDTH
    part = np.where(group < len(belongs), belongs[np.minimum(group, len(belongs) - 1)], -1)
    timed = np.where(column < len(TIMERS), part, -1)
    rows = np.where(timed >= 0, timed * len(TIMERS) + column, -1)
    counts, buckets = quantiles_by_row(rows, slot, number * len(TIMERS), SHARES)
    sums = np.zeros((number, len(COLUMNS)), np.int64)
    counted = (part >= 0) & (column >= len(TIMERS)) & (column < len(COLUMNS))
    np.add.at(sums, (part[counted], column[counted]), slot.counts[counted])
    owner = belongs[ended["group"]]
    return [
        _figures(
            reasons,
            {
                name: _quantiles(int(counts[at]), [int(row[at]) for row in buckets])
                for at, name in enumerate(TIMERS, index * len(TIMERS))
            },
            dict(zip(COUNTERS, sums[index][len(TIMERS) :].tolist(), strict=True)),
            slots_span,
            span,
            ended
            if number == 1 and not (owner != 0).any()
            else {n: c[owner == index] for n, c in ended.items()},
            ask,
        )
        for index in range(number)
    ]


def _figures(
    reasons: Sequence[str],
    timers: dict[str, Quantiles],
    counters: dict[str, int],
    slots_span: int,
    span: int,
    ended: dict[str, Ints],
    ask: Ask,
) -> Figures:
    prompts = ended["prompt"]
    known = (prompts > 0) & (ended["cached"] >= 0)
    hits = ended["cached"][known] / prompts[known]
    found = np.bincount(ended["reason"], minlength=len(reasons)).tolist()
    ends = sorted(
        ((reasons[place], count) for place, count in enumerate(found) if count),
        key=lambda end: -end[1],
    )
    tokens_in = counters["tokens_in"]
    return Figures(
        timers=timers,
        requests=counters["requests"],
        request_rate=per_second(counters["requests"], slots_span),
        tokens_in=per_second(tokens_in, slots_span),
        tokens_out=per_second(counters["tokens_out"], slots_span),
        hit_share=counters["tokens_cached"] / tokens_in if tokens_in else None,
        preemptions=counters["preemptions"],
        ended=len(prompts),
        reasons=tuple(ends),
        prompt=_lengths(prompts[prompts >= 0]),
        output=_lengths(ended["output"]),
        hit_mean=float(hits.mean()) if len(hits) else None,
        hit_requests=float((hits > 0).mean()) if len(hits) else None,
        slo=_attainment(reasons, ended, ask, span) if ask.slo else None,
    )


def _quantiles(count: int, buckets: list[int]) -> Quantiles:
    p50, p95, p99 = (None if ns is None else ns / NS_PER_MS for ns in map(value_ns, buckets))
    return Quantiles(count, p50, p95, p99)


def _lengths(tokens: Ints) -> Lengths:
    if not len(tokens):
        return Lengths()
    ordered = np.sort(tokens)
    p50, p95, p99 = (int(ordered[max(1, math.ceil(share * len(ordered))) - 1]) for share in SHARES)
    return Lengths(len(ordered), float(ordered.mean()), p50, p95, p99, int(ordered[-1]))


def _attainment(reasons: Sequence[str], ended: dict[str, Ints], ask: Ask, span: int) -> Attainment:
    """Who was within the targets. A request that failed was within none, one that its client
    cancelled says nothing about them. A request of one token has no gap, and so none that is too
    long."""
    word = np.array([(reason in FAILED) + 2 * (reason in CANCELLED) for reason in reasons])[
        ended["reason"]
    ]
    judged, broken = word != 2, word == 1
    met, missed = ~broken, broken.copy()
    each: list[tuple[str, float, float | None]] = []
    for name, target in ask.slo.targets:
        value = ended[name]
        known = value >= 0
        within = known & (value <= target * NS_PER_MS)
        if name in ("itl", "tpot"):
            single = (ended["output"] >= 0) & (ended["output"] <= 1)
            known, within = known | single, within | single
        within &= ~broken
        told = judged & (known | broken)
        each.append((name, target, float(within[told].mean()) if told.any() else None))
        met &= within
        missed |= known & ~within
    good = int((met & judged).sum())
    bad = int((missed & judged).sum())
    return Attainment(
        good, good + bad, int(judged.sum()) - good - bad, per_second(good, span), tuple(each)
    )


# --- gauges, curves, history ----------------------------------------------------------------------


def _gauges(views: Sequence[EngineView]) -> Gauges:
    engines = engines_among(views)
    if not engines:
        return Gauges()

    def total(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    pools = [
        engine.num_blocks
        if engine.num_blocks is not None or engine.used is None or engine.free is None
        else engine.used + (engine.cached or 0) + engine.free
        for engine in engines
    ]
    return Gauges(
        blocks=total(pools),
        live=total([engine.used for engine in engines]),
        cached=total([engine.cached for engine in engines]),
        free=total([engine.free for engine in engines]),
        waiting=sum(engine.waiting for engine in engines),
        running=sum(engine.running for engine in engines),
        batch=sum(engine.batch for engine in engines),
        max_batch=total([engine.max_batch for engine in engines]),
        step_tokens=sum(engine.step_tokens for engine in engines),
        max_batch_tokens=total([engine.max_batch_tokens for engine in engines]),
        preemptions=sum(engine.preempted for engine in engines),
        evicted=sum(engine.evicted for engine in engines),
    )


def _curve(slot: Slot, first: int) -> Curve:
    series = slot.keys.astype(np.int64) // STRIDE
    mine = (series >= first) & (series < first + RANGES)
    counts, (middle, high) = quantiles_by_row(
        np.where(mine, series - first, -1), slot, RANGES, (0.5, 0.95)
    )
    points = []
    for place in np.flatnonzero(counts).tolist():
        p50, p95 = (
            value_ns(int(middle[place]), coarse=True),
            value_ns(int(high[place]), coarse=True),
        )
        if p50 is not None and p95 is not None:
            points.append(
                Point(
                    low_of(place),
                    high_of(place),
                    int(counts[place]),
                    p50 / NS_PER_MS,
                    p95 / NS_PER_MS,
                )
            )
    enough = [point for point in points if point.count >= max(20, ENOUGH * counts.sum())]
    rise = enough[-1].p50 / enough[0].p50 if len(enough) > 1 and enough[0].p50 else None
    return Curve(tuple(points), rise)


def _by_prompt(rows: dict[str, Ints]) -> tuple[PromptPoint, ...]:
    """TTFT of the requests that ended, by the length of their prompts."""
    known = (rows["prompt"] > 0) & (rows["ttft"] >= 0)
    prompts, ttft = rows["prompt"][known], rows["ttft"][known]
    queue, prefill = rows["queue"][known], rows["prefill"][known]
    places = np.array([range_of(number) for number in prompts.tolist()], np.int64)
    points = []
    for place in np.unique(places).tolist():
        mine = places == place
        ordered = np.sort(ttft[mine]) / NS_PER_MS
        points.append(
            PromptPoint(
                low_of(place),
                high_of(place),
                len(ordered),
                _nearest(ordered, 0.5),
                _nearest(ordered, 0.95),
                _median(queue[mine]),
                _median(prefill[mine]),
            )
        )
    return tuple(points)


def _nearest(ordered: npt.NDArray[np.float64], share: float) -> float:
    return float(ordered[max(1, math.ceil(share * len(ordered))) - 1])


def _median(values: Ints) -> float | None:
    known = np.sort(values[values >= 0]) / NS_PER_MS
    return _nearest(known, 0.5) if len(known) else None


def _history(
    state: Fold, text: str, since: int, now: int, engines: Sequence[EngineView]
) -> History:
    titles = {view.source: view.title for view in engines}
    best: tuple[int, str] | None = None
    for source, series in state.counters.engine_series.items():
        if (
            text
            and text not in source.lower()
            and not any(
                group.engine == source and group.matches(text)
                for group in state.counters.groups.known
            )
        ):
            continue
        _, columns = series.columns(since)
        steps = int(columns["steps"].sum())
        if best is None or steps > best[0]:
            best = (steps, source)
    if best is None:
        return History()
    grain, columns = state.counters.engine_series[best[1]].columns(since)
    keep = columns["begin"] <= now
    columns = {name: column[keep] for name, column in columns.items()}
    means = columns["step_sum"] / np.maximum(1, columns["steps"])
    typical = float(np.median(means)) if len(means) else 0.0
    limit = max(STALL_NS, STALL_STEPS * typical)
    table = {name: column.tolist() for name, column in columns.items()}
    stretches = [
        Stretch(
            begin_s=(begin - state.began) / NS_PER_S,
            steps=steps,
            step=mean / NS_PER_MS,
            step_max=longest / NS_PER_MS,
            wait=wait / NS_PER_MS,
            stalled=wait > limit,
            batch=batch,
            used=_known(used),
            cached=_known(cached),
            free=_known(free),
            waiting=waiting,
        )
        for begin, steps, mean, longest, wait, batch, used, cached, free, waiting in zip(
            table["begin"],
            table["steps"],
            means.tolist(),
            table["step_max"],
            table["wait_max"],
            table["batch_max"],
            table["used"],
            table["cached"],
            table["free"],
            table["waiting"],
            strict=True,
        )
    ]
    return History(best[1], titles.get(best[1], ""), grain / NS_PER_S, tuple(stretches))


def _known(value: int) -> int | None:
    return None if value < 0 else value

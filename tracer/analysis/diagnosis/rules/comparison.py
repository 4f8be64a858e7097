"""What is slower than it was (a baseline trace) or than it should be (the budget model)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import median, ms, series
from tracer.analysis.diagnosis.records import EngineFacts, RequestFacts
from tracer.analysis.diagnosis.rules.front_end import SPANS
from tracer.state.request.latency import interval

SLOWER: Final = Cause(
    "slower-than-baseline",
    None,
    0.7,
    "what changed since the baseline in this stage",
    comparison=True,
)
STRETCHED: Final = Cause(
    "everything-slower",
    None,
    0.75,
    "other programs on the machine, CPU quotas and clocks, another kind of machine",
    where="the machine, not one stage",
    explains=("host-overhead", "stream-lag", "front-end"),
    comparison=True,
)
BUDGET: Final = Cause(
    "slower-than-budget",
    Stage.DECODE,
    0.6,
    "whether the budget's device and dtype are the traced ones; then host time between steps",
    comparison=True,
)


def _prefill_of_1000(request: RequestFacts) -> float | None:
    if request.prefill is None or request.uncached < 16:
        return None
    return 1000 * (request.prefill / request.uncached)


Value = Callable[[RequestFacts], float | None]
Units = Callable[[RequestFacts], float]

_FIGURES: Final[tuple[tuple[Stage, str, Value, Units], ...]] = (
    (Stage.RECEIVE, "receive", lambda r: interval(r.received, r.receive_end), lambda r: 1),
    (Stage.TEMPLATE, "template", SPANS[Stage.TEMPLATE], lambda r: 1),
    (Stage.TOKENISE, "tokenise", SPANS[Stage.TOKENISE], lambda r: 1),
    (Stage.ADMISSION, "queue time", lambda r: r.queue, lambda r: 1),
    (Stage.PREFILL, "prefill of 1,000 tokens", _prefill_of_1000, lambda r: r.uncached / 1000),
    (
        Stage.STREAM,
        "handing out the first token",
        lambda r: interval(r.first_token, r.handed_out) if r.streamed else None,
        lambda r: 1,
    ),
    (
        Stage.DECODE,
        "ITL",
        lambda r: None if len(r.tokens) < 3 else r.tpot,
        lambda r: len(r.tokens) - 1,
    ),
)
"""Stage, name, ns per unit, units of a request: a request lost the difference times its units."""


@rule(SLOWER, STRETCHED)
def against_baseline(case: Case) -> Results:
    """Stages take clearly longer than in the baseline trace, for the same amount of work."""
    if case.baseline is None:
        return
    evidence = case.evidence
    found = []
    factors: list[float] = []
    for stage, name, value, units in _FIGURES:
        requests = [r for r in evidence.requests if value(r) is not None]
        values = np.array([value(r) for r in requests], float)
        then = np.array([v for r in case.baseline.requests if (v := value(r)) is not None], float)
        if min(len(values), len(then)) < limit.SLOWER_SAMPLES:
            continue
        before, after = median(then), median(values)
        # share of pairs in which the later value is larger
        order = np.searchsorted(np.sort(then), values, "left").mean() / len(then)
        if order < limit.GREW_ORDER:
            continue
        if before > 0:
            factors.append(after / before)
        if after < limit.SLOWER * before or after - before < limit.SLOWER_MS * NS_PER_MS:
            continue
        excess = np.maximum(values - before, 0) * [units(r) for r in requests]
        finding = SLOWER.finding(
            f"{name} takes {ms(after):,.1f} ms, in the baseline {ms(before):,.1f} ms (p50 of "
            f"{len(values)} and {len(then)} requests)",
            (requests[0].begin, requests[-1].over),
            requests,
            float(excess.sum()),
            series(name, "ms", [r.begin for r in requests], values / NS_PER_MS),
            stage=stage,
        )
        found.append(finding)
    low, high = min(factors, default=0.0), max(factors, default=0.0)
    if len(factors) < 4 or low < limit.SLOWER or high > 3 * low:
        yield from found
        return
    yield STRETCHED.finding(
        f"all of {len(factors)} stages take {low:,.1f} to {high:,.1f} times as long as in the "
        "baseline: the machine is slower, not one stage",
        (evidence.began, None),
        evidence.requests,
        sum(finding.lost_ms for finding in found) * NS_PER_MS,
        slowdown=median(factors),
    )


@rule(BUDGET, each_engine=True)
def against_budget(case: Case, engine: EngineFacts) -> Results:
    """Decode steps take a multiple of what the budget model expects for their batch and context."""
    if case.budget is None:
        return
    table = engine.steps
    plain = np.flatnonzero(table.plain & (table.context > 0))
    if len(plain) < 3 * limit.STEPS:
        return
    chosen = plain[:: max(1, len(plain) // 400)]
    took = table.interval[chosen] / NS_PER_MS
    sizes, context = table.sizes[chosen].astype(float), table.context[chosen]
    expected = np.asarray(case.budget.cycle_ms(sizes, sizes, context, context), float)
    ratio = median(took / np.maximum(expected, 1e-6))
    if ratio < limit.BUDGET or median(took) - median(expected) < 2.0:
        return
    excess = (np.maximum(took - expected, 0) * sizes).sum() * len(plain) / len(chosen)
    yield BUDGET.finding(
        f"a decode step takes {median(took):,.1f} ms, {ratio:,.1f} times the "
        f"{median(expected):,.1f} ms of the budget",
        table.window(plain[0], plain[-1]),
        [request for request in engine.requests if len(request.tokens) > 1],
        float(excess) * NS_PER_MS,
        series("step", "ms", table.begin[chosen], took),
        series("budget", "ms", table.begin[chosen], expected),
    )

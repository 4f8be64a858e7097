"""What is slower than it was (a baseline trace) or than it should be (the budget model)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, Evidence, median, ms
from tracer.analysis.diagnosis.spell import points
from tracer.state.request.latency import interval

SLOWER, STRETCHED, BUDGET = "slower-than-baseline", "everything-slower", "slower-than-budget"


def _per_token(request: Asked) -> float | None:
    return (
        None
        if request.prefill is None or request.uncached < 16
        else request.prefill / request.uncached
    )


def _tpot(request: Asked) -> float | None:
    if len(request.tokens) < 3:
        return None
    return float(request.tokens[-1] - request.tokens[0]) / (len(request.tokens) - 1)


def _handing_out(request: Asked) -> float | None:
    return interval(request.first_token, request.handed_out) if request.streamed else None


_FIGURES: Final[
    tuple[tuple[Stage, str, Callable[[Asked], float | None], Callable[[Asked], float]], ...]
] = (
    (Stage.RECEIVE, "receive", lambda r: interval(r.received, r.receive_end), lambda r: 1.0),
    (
        Stage.TEMPLATE,
        "template",
        lambda r: interval(r.template_begin, r.template_end),
        lambda r: 1.0,
    ),
    (
        Stage.TOKENISE,
        "tokenise",
        lambda r: interval(r.tokenise_begin, r.tokenise_end),
        lambda r: 1.0,
    ),
    (Stage.ADMISSION, "queue time", lambda r: r.queue, lambda r: 1.0),
    (
        Stage.PREFILL,
        "prefill of 1,000 tokens",
        lambda r: None if (c := _per_token(r)) is None else 1000 * c,
        lambda r: r.uncached / 1000,
    ),
    (Stage.STREAM, "handing out the first token", _handing_out, lambda r: 1.0),
    (Stage.DECODE, "ITL", _tpot, lambda r: float(max(0, len(r.tokens) - 1))),
)
"""Stage, name, value in ns per unit, units of a request: what a request lost is the difference
times its units."""


def against_baseline(case: Case) -> Sequence[Said]:
    """Stages that take clearly longer than in the baseline trace, for the same amount of work."""
    if case.baseline is None:
        return []
    evidence, baseline = case.evidence, case.baseline
    said: list[Said] = []
    stretched: list[float] = []
    for stage, name, value, units in _FIGURES:
        now = [(v, r) for r in evidence.requests if (v := value(r)) is not None]
        then = np.array([v for r in baseline.requests if (v := value(r)) is not None], float)
        if min(len(now), len(then)) < limit.SLOWER_SAMPLES:
            continue
        values = np.array([v for v, _ in now], float)
        before, after = median(then), median(values)
        order = _order(then, values)
        if before > 0 and order >= limit.GREW_ORDER:
            stretched.append(after / before)
        if (
            after < limit.SLOWER * before
            or after - before < limit.SLOWER_MS * NS_PER_MS
            or order < limit.GREW_ORDER
        ):
            continue
        requests = [r for _, r in now]
        said.append(
            found(
                evidence,
                SLOWER,
                stage,
                f"{name} takes {ms(after):,.1f} ms, in the baseline {ms(before):,.1f} ms (p50 of "
                f"{len(now)} and "
                f"{len(then)} "
                "requests)",
                check="what changed since the baseline in this stage",
                lost_ns=sum(max(0.0, (v - before) * units(r)) for v, r in now),
                start=requests[0].begin,
                end=requests[-1].over,
                confidence=0.7,
                affected=requests,
                exhibits=[
                    Exhibit(
                        name,
                        "ms",
                        points(np.array([r.begin for r in requests]), values / NS_PER_MS),
                    )
                ],
            )
        )
    if (
        len(stretched) >= 4
        and min(stretched) >= limit.SLOWER
        and max(stretched) <= 3 * min(stretched)
    ):
        return [_everything(evidence, stretched, said)]
    return said


def _everything(evidence: Evidence, stretched: Sequence[float], said: Sequence[Said]) -> Said:
    lost = sum(getattr(one, "lost_ms", 0.0) for one in said) * NS_PER_MS
    return found(
        evidence,
        STRETCHED,
        None,
        f"all of {len(stretched)} stages take {min(stretched):,.1f} to {max(stretched):,.1f} times "
        "as long as in the "
        "baseline: the machine is slower, not one stage",
        check="other programs on the machine, CPU quotas and clocks, another kind of machine",
        lost_ns=lost,
        start=evidence.began,
        end=None,
        confidence=0.75,
        affected=evidence.requests,
        slowdown=median(stretched),
    )


def _order(before: np.ndarray, after: np.ndarray) -> float:
    """Share of pairs in which the later value is larger."""
    places = np.searchsorted(np.sort(before), after, "left")
    return float(places.mean()) / len(before)


def against_budget(case: Case) -> Sequence[Said]:
    """Decode steps that take a multiple of what the budget model expects for their batch and
    context."""
    if case.budget is None:
        return []
    said: list[Said] = []
    for engine in case.evidence.engines:
        table = engine.steps
        plain = np.flatnonzero(table.plain & (table.context > 0))
        if len(plain) < 3 * limit.STEPS:
            continue
        chosen = plain[:: max(1, len(plain) // 400)]
        took = table.interval[chosen] / NS_PER_MS
        sizes, context = table.sizes[chosen].astype(float), table.context[chosen]
        expected = np.asarray(case.budget.cycle_ms(sizes, sizes, context, context), float)
        ratio = median(took / np.maximum(expected, 1e-6))
        if ratio < limit.BUDGET or median(took) - median(expected) < 2.0:
            continue
        begin, end = int(table.begin[plain[0]]), int(table.end[plain[-1]])
        excess = (
            (np.maximum(took - expected, 0) * table.sizes[chosen]).sum() * len(plain) / len(chosen)
        )
        said.append(
            found(
                case.evidence,
                BUDGET,
                Stage.DECODE,
                f"a decode step takes {median(took):,.1f} ms, {ratio:,.1f} times the "
                f"{median(expected):,.1f} ms of the "
                "budget",
                check=(
                    "whether the budget's device and dtype are the traced ones; then host time "
                    "between steps"
                ),
                lost_ns=float(excess) * NS_PER_MS,
                start=begin,
                end=end,
                confidence=0.6,
                affected=[r for r in engine.requests if len(r.tokens) > 1],
                engine=engine,
                exhibits=[
                    Exhibit("step", "ms", points(table.begin[chosen], took)),
                    Exhibit("budget", "ms", points(table.begin[chosen], expected)),
                ],
            )
        )
    return said

"""Stage 9: choosing the next token costs as much as computing it (logprobs, penalties,
grammars)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, median, ms
from tracer.analysis.diagnosis.spell import points, spell
from tracer.analysis.diagnosis.steps import Flags

SAMPLER = "sampler"


def sampler(case: Case) -> Sequence[Said]:
    """Steps of which sampling takes a large part."""
    return [said for engine in case.evidence.engines for said in _at(case.evidence, engine)]


def _at(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    known = np.flatnonzero(table.sampling >= 0)
    if len(known) < limit.STEPS:
        return []
    work, whole = (
        table.sampling[known].astype(float),
        np.maximum(table.duration[known], 1).astype(float),
    )
    slow: Flags = (work >= limit.SAMPLER_MS * NS_PER_MS) & (work >= limit.SAMPLER_SHARE * whole)
    stretch = spell(slow, share=0.3)
    if stretch is None or stretch.hits < limit.STEPS:
        return []
    inside = np.arange(stretch.first, stretch.last + 1)
    hit = inside[slow[inside]]
    usual = median(work[~slow]) if int((~slow).sum()) >= limit.SAMPLES else 0.0
    excess = work[hit] - usual
    begin, end = int(table.begin[known[stretch.first]]), int(table.end[known[stretch.last]])
    touched = [
        r for r in engine.requests if len(r.tokens) and r.tokens[0] <= end and r.tokens[-1] >= begin
    ]
    asked = [r for r in touched if r.logprobs]
    culprits = _always_there(engine, touched, known[hit], known[np.flatnonzero(~slow)])
    total = float(whole[hit].sum())
    return [
        found(
            evidence,
            SAMPLER,
            Stage.SAMPLE,
            f"sampling takes {ms(median(work[hit])):,.1f} ms of {ms(median(whole[hit])):,.1f} ms "
            "(p50) in "
            f"{len(hit):,} steps, {float(excess.sum()) / total:.0%} of their time"
            + (f"; {len(asked)} of {len(touched)} requests asked for logprobs" if asked else "")
            + (f"; only while {culprits[0].name} is in the batch" if len(culprits) == 1 else ""),
            check="logprobs, penalties, grammars and logits processors of these requests",
            lost_ns=float((excess * table.sizes[known[hit]]).sum()),
            start=begin,
            end=end,
            confidence=0.9,
            affected=touched,
            culprit=culprits[0] if len(culprits) == 1 and len(touched) > 1 else None,
            engine=engine,
            exhibits=[
                Exhibit("sampling", "ms a step", points(table.begin[known], work / NS_PER_MS)),
                Exhibit("step", "ms", points(table.begin[known], whole / NS_PER_MS)),
            ],
            slowdown=total / max(total - float(excess.sum()), total / 100),
        )
    ]


def _always_there(
    engine: EngineFacts, touched: Sequence[Asked], slow: np.ndarray, fast: np.ndarray
) -> list[Asked]:
    """Requests that were in (nearly) all slow steps and in (nearly) no fast one."""
    if len(fast) < limit.STEPS:
        return []
    times = engine.steps.tokens_at
    slow_times, fast_times = times[slow], times[fast]
    out = []
    for request in touched:
        begin, end = int(request.tokens[0]), int(request.tokens[-1])
        inside = np.mean((slow_times >= begin) & (slow_times <= end))
        outside = np.mean((fast_times > begin) & (fast_times <= end))
        if inside >= 0.97 and outside <= 0.03:
            out.append(request)
    return out

"""Stage 9: choosing the next token (logprobs, penalties, grammars) costs as much as computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import median, ms, percent, series, stretched, window_of
from tracer.analysis.diagnosis.records import EngineFacts, RequestFacts
from tracer.analysis.diagnosis.steps import Ints

SAMPLER: Final = Cause(
    "sampler", Stage.SAMPLE, 0.9, "logprobs, penalties, grammars and logits processors in use"
)


@rule(SAMPLER, each_engine=True)
def sampler(case: Case, engine: EngineFacts) -> Results:
    """Sampling takes a large part of the steps."""
    table = engine.steps
    known = np.flatnonzero(table.sampling >= 0)
    work = table.sampling[known].astype(float)
    whole = np.maximum(table.duration[known], 1).astype(float)
    slow = (work >= limit.SAMPLER_MS * NS_PER_MS) & (work >= limit.SAMPLER_SHARE * whole)
    window = window_of(slow, limit.STEPS, share=0.3)
    if window is None:
        return
    hit = window.hit
    usual = median(work[~slow]) if int((~slow).sum()) >= limit.SAMPLES else 0.0
    excess = work[hit] - usual
    lost, total = float(excess.sum()), float(whole[hit].sum())
    begin, end = table.window(known[window.first], known[window.last])
    touched = engine.decoding(begin, end)
    logprobs = sum(request.logprobs for request in touched)
    culprits = _always_there(engine, touched, known[hit], known[~slow])
    only = culprits[0] if len(culprits) == 1 else None
    yield SAMPLER.finding(
        f"sampling takes {ms(median(work[hit])):,.1f} ms of {ms(median(whole[hit])):,.1f} ms (p50) "
        f"in {len(hit):,} steps, {percent(lost / total)} of their time"
        + (f"; {logprobs} of {len(touched)} requests asked for logprobs" if logprobs else "")
        + (f"; only while {only.name} is in the batch" if only else ""),
        (begin, end),
        touched,
        float((excess * table.sizes[known[hit]]).sum()),
        series("sampling", "ms a step", table.begin[known], work / NS_PER_MS),
        series("step", "ms", table.begin[known], whole / NS_PER_MS),
        culprit=only if len(touched) > 1 else None,
        slowdown=stretched(total, lost, 100),
    )


def _always_there(
    engine: EngineFacts, touched: Sequence[RequestFacts], slow: Ints, fast: Ints
) -> list[RequestFacts]:
    """Return the requests that were in (nearly) all slow steps and in (nearly) no fast one."""
    if len(fast) < limit.STEPS:
        return []
    slow_times, fast_times = engine.steps.tokens_at[slow], engine.steps.tokens_at[fast]
    out = []
    for request in touched:
        begin, end = request.tokens[0], request.tokens[-1]
        inside = np.mean((slow_times >= begin) & (slow_times <= end))
        outside = np.mean((fast_times > begin) & (fast_times <= end))
        if inside >= 0.97 and outside <= 0.03:
            out.append(request)
    return out

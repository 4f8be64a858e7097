"""Stage 4 by preemption: requests lose their place, wait, and are computed again."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import counted, median, ms, percent, stretched
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import EngineFacts

PREEMPTION: Final = Cause(
    "preemption",
    Stage.ADMISSION,
    0.95,
    "more KV blocks, fewer sequences at once, or a scheduler that admits only what can finish",
    explains=("kv-blocks", "prefix-evicted", "prefix-no-hit", "batch-limit", "over-capacity"),
)


@rule(PREEMPTION, each_engine=True)
def preemption(case: Case, engine: EngineFacts) -> Results:
    """Preemptions cost time: in the queue, in prefill, and in everybody's steps."""
    evidence, table = case.evidence, engine.steps
    victims = [request for request in engine.requests if request.preemptions]
    events = sorted(
        (lost.begin, victim.index, lost.resumed or min(evidence.until(victim), evidence.now))
        for victim in victims
        for lost in victim.preemptions
    )
    if len(events) < limit.PREEMPTIONS:
        return
    waited = sum(max(0, resumed - begin) for begin, _, resumed in events)
    places = np.unique([
        ran.place
        for victim in victims
        for ran in (*victim.passes, *victim.redone)
        if ran.place >= 0 and table.begin[ran.place] >= victim.preemptions[0].begin
    ]).astype(int)  # fmt: skip
    again = np.maximum(table.duration[places] - table.typical, 0)
    lost_ns = waited + float(again.sum()) + float((again * table.decoding[places]).sum())
    begin = events[0][0]
    end = max([*(resumed for _, _, resumed in events), *table.end[places[-1:]]])
    there = evidence.alive(engine.requests, begin, end)
    if lost_ns < limit.PREEMPT_SHARE * sum(map(evidence.lived, there)):
        return
    index, most = Counter(index for _, index, _ in events).most_common(1)[0]
    worst = evidence.requests[index]
    thrashing = most >= limit.PREEMPTIONS and most >= len(events) / 2
    affected = sorted(victims, key=lambda request: -len(request.preemptions))
    if thrashing:
        decoding = engine.decoding_at(table.tokens_at[places])
        affected += [request for request in decoding if not request.preemptions]
    recomputed = sum(victim.recomputed for victim in victims)
    busy = float(table.span[table.between(begin, end)].sum())
    yield PREEMPTION.finding(
        f"{counted(len(events), 'preemption')} of {counted(len(victims), 'request')}: "
        f"{counted(recomputed, 'token')} computed again, {ms(waited):,.0f} ms spent in the queue "
        f"once more{_pressure(engine, [at for at, _, _ in events])}"
        + (f"; {worst.name} lost its place {most} times" if thrashing else ""),
        (begin, end),
        affected,
        lost_ns,
        Exhibit(
            "preemptions",
            "of a request",
            tuple((at, float(number)) for number, (at, _, _) in enumerate(events, 1)),
            "running count",
        ),
        culprit=worst if thrashing else None,
        slowdown=stretched(busy, float(again.sum()), 10),
    )


def _pressure(engine: EngineFacts, times: list[int]) -> str:
    """Return how full the KV cache was when requests lost their place, in words."""
    used = engine.steps.column("used")
    if engine.num_blocks <= 0 or not (used >= 0).any():
        return ""
    places = np.clip(np.searchsorted(engine.steps.begin, times) - 1, 0, len(used) - 1)
    return f", KV at {percent(median(used[places]) / engine.num_blocks)}"

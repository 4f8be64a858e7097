"""Stage 4 by preemption: requests lose their place, wait again, and have their tokens computed
again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, ms

PREEMPTION = "preemption"


def preemption(case: Case) -> Sequence[Said]:
    """Preemptions that cost time: in the queue again, in prefill again, and in everybody's steps
    meanwhile."""
    return [said for engine in case.evidence.engines for said in _at(case.evidence, engine)]


def _at(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    victims = [request for request in engine.requests if request.preemptions]
    events = sorted(
        (lost.begin, request.index) for request in victims for lost in request.preemptions
    )
    if len(events) < limit.PREEMPTIONS:
        return []
    begin = events[0][0]
    ends = [lost.resumed or min(request.over or evidence.now, evidence.now)
            for request in victims for lost in request.preemptions]  # fmt: skip
    waited = sum(
        max(0, (lost.resumed or min(request.over or evidence.now, evidence.now)) - lost.begin)
        for request in victims
        for lost in request.preemptions
    )
    again = sum(request.recomputed for request in victims)
    table = engine.steps
    places = np.array(sorted({
        ran.place
        for request in victims
        for ran in (*request.passes, *request.redone)
        if ran.place >= 0 and table.begin[ran.place] >= request.preemptions[0].begin
    }), np.int64)  # fmt: skip
    recomputing = np.maximum(table.duration[places] - table.typical, 0) if len(places) else places
    redone = float(recomputing.sum())
    others = float((recomputing * table.decoding[places]).sum()) if len(places) else 0.0
    lost_ns = waited + redone + others
    end = max([*ends, *(int(table.end[place]) for place in places[-1:])])
    lived = sum((request.over or evidence.now) - request.begin for request in engine.requests
                if (request.over or evidence.now) >= begin and request.begin <= end)  # fmt: skip
    if lost_ns < limit.PREEMPT_SHARE * lived:
        return []
    counts: dict[int, int] = {}
    for _, index in events:
        counts[index] = counts.get(index, 0) + 1
    index, most = max(counts.items(), key=lambda item: item[1])
    worst = evidence.requests[index]
    thrashing = most >= limit.PREEMPTIONS and most >= len(events) / 2
    affected = sorted(victims, key=lambda request: -len(request.preemptions))
    pressed = _pressure(engine, events)
    return [
        found(
            evidence,
            PREEMPTION,
            Stage.ADMISSION,
            f"{len(events)} preemptions of {len(victims)} "
            f"request{'s' if len(victims) > 1 else ''}: {again:,} tokens "
            f"computed again, {ms(waited):,.0f} ms spent in the queue once more{pressed}"
            + (f"; {worst.name} lost its place {most} times" if thrashing else ""),
            check=(
                "more KV blocks, fewer sequences at once, or a scheduler that admits only what can "
                "finish"
            ),
            lost_ns=lost_ns,
            start=begin,
            end=end,
            confidence=0.95,
            affected=[*affected, *_slowed(engine, places, victims)] if thrashing else affected,
            culprit=worst if thrashing else None,
            engine=engine,
            exhibits=[
                Exhibit(
                    "preemptions",
                    "of a request",
                    tuple((t, float(n)) for n, (t, _) in enumerate(events, 1)),
                    "running count",
                )
            ],
            slowdown=_slowdown(engine, begin, end, float(recomputing.sum())),
        )
    ]


def _pressure(engine: EngineFacts, events: list[tuple[int, int]]) -> str:
    table = engine.steps
    used = table.column("used")
    if engine.num_blocks <= 0 or not len(used) or not (used >= 0).any():
        return ""
    places = np.clip(np.searchsorted(table.begin, [t for t, _ in events]) - 1, 0, len(used) - 1)
    return f", KV at {float(np.median(used[places])) / engine.num_blocks:.0%}"


def _slowed(engine: EngineFacts, places: np.ndarray, victims: Sequence[Asked]) -> list[Asked]:
    """Requests that decoded in the steps in which lost tokens were computed again."""
    if not len(places):
        return []
    times = engine.steps.tokens_at[places]
    return [
        request for request in engine.requests
        if not request.preemptions and len(request.tokens)
        and bool(((times >= request.tokens[0]) & (times <= request.tokens[-1])).any())
    ]  # fmt: skip


def _slowdown(engine: EngineFacts, begin: int, end: int, recomputing: float) -> float:
    chosen = engine.steps.between(begin, end)
    busy = float(engine.steps.span[chosen].sum())
    return busy / max(busy - recomputing, busy / 10) if busy > 0 else 1.0

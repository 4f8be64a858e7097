"""Stages 1 to 3: parsing, templating and tokenising that take a large part of TTFT, or fill the
core they run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import LOOK, median, ms, percent, series, window_of
from tracer.analysis.diagnosis.records import Evidence, RequestFacts
from tracer.analysis.diagnosis.steps import Floats, Ints
from tracer.state.request.latency import interval

FRONT_END: Final = Cause("front-end", None, 0.85, "the stage that is named")
SATURATED: Final = Cause(
    "front-end-core",
    None,
    0.7,
    "more API workers, tokenising and detokenising off the event loop, fewer chunks a second",
    explains=("front-end", "stream-lag"),
)

_CHECKS: Final = {
    Stage.RECEIVE: "the size of the bodies, and what else runs on the event loop that reads them",
    Stage.TEMPLATE: "the chat template and the length of the histories",
    Stage.TOKENISE: "a fast tokeniser, off the event loop; very long prompts",
}

SPANS: Final[dict[Stage, Callable[[RequestFacts], int | None]]] = {
    Stage.RECEIVE: lambda r: None if r.offline else interval(r.received, r.receive_end),
    Stage.TEMPLATE: lambda r: interval(r.template_begin, r.template_end),
    Stage.TOKENISE: lambda r: interval(r.tokenise_begin, r.tokenise_end),
}
"""ns that each stage of the front end took, None where no event told it."""


@rule(FRONT_END)
def front_end(case: Case) -> Results:
    """One stage of the front end takes a large part of TTFT."""
    for stage, span in SPANS.items():
        asked = [r for r in case.evidence.requests if r.ttft and span(r) is not None]
        took = np.array([span(r) for r in asked], float)
        whole = np.array([r.ttft for r in asked], float)
        slow = (took >= limit.FRONT_MS * NS_PER_MS) & (took >= limit.FRONT_SHARE * whole)
        window = window_of(slow, limit.SAMPLES, share=0.5)
        if window is None:
            continue
        hit = window.hit
        requests = [asked[place] for place in hit]
        yield FRONT_END.finding(
            f"{stage.id} takes {ms(median(took[hit])):,.0f} ms of a TTFT of "
            f"{ms(median(whole[hit])):,.0f} ms (p50) in {len(hit)} requests",
            (requests[0].begin, requests[-1].handed_out or requests[-1].first_token),
            requests,
            float(took[hit].sum()),
            series(stage.id, "ms", [r.begin for r in asked], took / NS_PER_MS),
            stage=stage,
            check=_CHECKS[stage],
        )


@rule(SATURATED)
def saturated_core(case: Case) -> Results:
    """Front-end and streaming work fill the core on which they run."""
    evidence = case.evidence
    work = _work(evidence.requests)
    count = int((evidence.now - evidence.began) // NS_PER_S)
    if len(work) < limit.STEPS or count < limit.STARVED_BEATS:
        return
    seconds, load = _load(evidence, work, count)
    window = window_of(load >= limit.FRONT_CORE, limit.STARVED_BEATS, share=0.6)
    if window is None:
        return
    begin, end = int(seconds[window.first]), int(seconds[window.last]) + NS_PER_S
    inside = evidence.alive(evidence.requests, begin, end)
    share = _median(load[window.first : window.last + 1], (end - begin) // NS_PER_S)
    parts = {stage: sum(span(r) or 0 for r in inside) for stage, span in SPANS.items()}
    front = sum(parts.values())
    stream = sum(send.work for r in inside for send in r.sends[-1:] if send.work > 0)
    queued = sum(
        max(0, (r.handed_out or 0) - r.first_token) for r in inside if r.streamed and r.first_token
    )
    stage = Stage.STREAM if stream >= front else max(parts, key=lambda stage: parts[stage])
    yield SATURATED.finding(
        f"front-end and streaming work keep {percent(min(share, 1.0))} of one core busy for "
        f"{(end - begin) / NS_PER_S:,.0f} s (most of it: {stage.id})",
        (begin, end),
        inside,
        float(stream + front + queued),
        series("front-end work", "cores", seconds, load),
        stage=stage,
    )


def _work(requests: Sequence[RequestFacts]) -> list[tuple[int, int]]:
    """Return (instant, ns) of each piece of work; that on chunks when it was reported."""
    work: list[tuple[int, int]] = []
    for request in requests:
        for begin, end in (
            (request.template_begin, request.template_end),
            (request.tokenise_begin, request.tokenise_end),
        ):
            if begin is not None and end is not None and end > begin:
                work.append((begin, end - begin))
        for before, send in pairwise(request.sends):
            if before.work >= 0 and send.work > before.work:
                work.append((send.t, send.work - before.work))
    return work


def _load(evidence: Evidence, work: Sequence[tuple[int, int]], count: int) -> tuple[Ints, Floats]:
    """Return seconds of the trace, as instants in ns, and the cores that `work` filled in each. Of
    the seconds without work, days of them perhaps, only those next to one with work."""
    at, took = (np.array(column) for column in zip(*work, strict=True))
    places = np.clip((at - evidence.began) // NS_PER_S, 0, count - 1)
    busy, which = np.unique(places, return_inverse=True)
    told = np.unique(np.clip(busy[:, None] + np.arange(-LOOK, LOOK + 1), 0, count - 1))
    load = np.zeros(len(told))
    load[np.searchsorted(told, busy)] = np.bincount(which, weights=took) / NS_PER_S
    return evidence.began + told * NS_PER_S, load


def _median(values: Floats, count: int) -> float:
    """Return the median of `count` values, of which those that are not among `values` are 0."""
    ranked = np.sort(values)
    untold = count - len(ranked)
    middle = ((count - 1) // 2, count // 2)
    return float(np.mean([ranked[rank - untold] if rank >= untold else 0.0 for rank in middle]))

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
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, Evidence, median, ms
from tracer.analysis.diagnosis.spell import LOOK, points, spell
from tracer.analysis.diagnosis.steps import Floats
from tracer.state.request.latency import interval

FRONT_END, SATURATED = "front-end", "front-end-core"

_CHECKS: Final = {
    Stage.RECEIVE: "the size of the bodies, and what else runs on the event loop that reads them",
    Stage.TEMPLATE: "the chat template and the length of the histories",
    Stage.TOKENISE: "a fast tokeniser, off the event loop; very long prompts",
}

_SPANS: Final[tuple[tuple[Stage, Callable[[Asked], int | None]], ...]] = (
    (Stage.RECEIVE, lambda r: None if r.offline else interval(r.received, r.receive_end)),
    (Stage.TEMPLATE, lambda r: interval(r.template_begin, r.template_end)),
    (Stage.TOKENISE, lambda r: interval(r.tokenise_begin, r.tokenise_end)),
)
"""What each stage of the front end took (ns), None where it was not told."""


def front_end(case: Case) -> Sequence[Said]:
    """One stage of the front end takes a large part of TTFT."""
    evidence = case.evidence
    said: list[Said] = []
    for stage, span in _SPANS:
        asked = [r for r in evidence.requests if r.ttft and span(r) is not None]
        if len(asked) < limit.SAMPLES:
            continue
        took = np.array([span(r) for r in asked], float)
        whole = np.array([r.ttft for r in asked], float)
        slow = (took >= limit.FRONT_MS * NS_PER_MS) & (took >= limit.FRONT_SHARE * whole)
        stretch = spell(slow, share=0.5)
        if stretch is None or stretch.hits < limit.SAMPLES:
            continue
        hit = np.flatnonzero(slow[stretch.first : stretch.last + 1]) + stretch.first
        requests = [asked[place] for place in hit]
        said.append(
            found(
                evidence,
                FRONT_END,
                stage,
                f"{stage.id} takes {ms(median(took[hit])):,.0f} ms of a TTFT of "
                f"{ms(median(whole[hit])):,.0f} ms (p50) "
                f"in {len(hit)} requests",
                check=_CHECKS[stage],
                lost_ns=float(took[hit].sum()),
                start=requests[0].begin,
                end=requests[-1].handed_out or requests[-1].first_token,
                confidence=0.85,
                affected=requests,
                exhibits=[
                    Exhibit(
                        stage.id, "ms", points(np.array([r.begin for r in asked]), took / NS_PER_MS)
                    )
                ],
            )
        )
    return said


def saturated_core(case: Case) -> Sequence[Said]:
    """All front-end and streaming work together fill the core on which it runs, second after
    second."""
    evidence = case.evidence
    at, work = _work(evidence)
    count = int((evidence.now - evidence.began) // NS_PER_S)
    if len(at) < limit.STEPS or count < limit.STARVED_BEATS:
        return []
    places = np.clip((np.array(at, np.int64) - evidence.began) // NS_PER_S, 0, count - 1)
    busy, which = np.unique(places, return_inverse=True)
    # Of the seconds without work, days of them perhaps, those that a spell looks at from one with
    # work.
    told = np.unique(np.clip(busy[:, None] + np.arange(-LOOK, LOOK + 1), 0, count - 1))
    load = np.zeros(len(told))
    load[np.searchsorted(told, busy)] = np.bincount(which, weights=np.array(work, float)) / NS_PER_S
    seconds = evidence.began + told * NS_PER_S
    full = load >= limit.FRONT_CORE
    stretch = spell(full, share=0.6)
    if stretch is None or stretch.hits < limit.STARVED_BEATS:
        return []
    begin, end = int(seconds[stretch.first]), int(seconds[stretch.last]) + NS_PER_S
    inside = [r for r in evidence.requests if r.begin <= end and (r.over or evidence.now) >= begin]
    share = _median(
        load[stretch.first : stretch.last + 1], int(told[stretch.last] - told[stretch.first]) + 1
    )
    stream = sum(send.work for r in inside for send in r.sends[-1:] if send.work > 0)
    front = sum(span(r) or 0 for r in inside for _, span in _SPANS)
    stage = (
        Stage.STREAM
        if stream >= front
        else max(
            (stage for stage, _ in _SPANS),
            key=lambda s: sum(span(r) or 0 for r in inside for t, span in _SPANS if t == s),
        )
    )
    queued = sum(
        max(0, (r.handed_out or 0) - (r.first_token or 0))
        for r in inside
        if r.streamed and r.first_token
    )
    return [
        found(
            evidence,
            SATURATED,
            stage,
            f"front-end and streaming work keep {min(share, 1.0):.0%} of one core busy for "
            f"{(end - begin) / 1e9:,.0f} s "
            f"(most of it: {stage.id})",
            check=(
                "more API workers, tokenising and detokenising off the event loop, fewer chunks a "
                "second"
            ),
            lost_ns=float(stream + front + queued),
            start=begin,
            end=end,
            confidence=0.7,
            affected=inside,
            exhibits=[Exhibit("front-end work", "cores", points(seconds, load))],
        )
    ]


def _median(values: Floats, count: int) -> float:
    """Median of `count` values, of which those that are not told are 0."""
    ranked = np.sort(values)
    untold = count - len(ranked)
    return float(
        np.mean(
            [
                ranked[rank - untold] if rank >= untold else 0.0
                for rank in ((count - 1) // 2, count // 2)
            ]
        )
    )


def _work(evidence: Evidence) -> tuple[list[int], list[int]]:
    """(instant, ns) of each piece of front-end work; that on chunks is laid where its progress was
    told."""
    at: list[int] = []
    work: list[int] = []
    for request in evidence.requests:
        for begin, end in (
            (request.template_begin, request.template_end),
            (request.tokenise_begin, request.tokenise_end),
        ):
            if begin is not None and end is not None and end > begin:
                at.append(begin)
                work.append(end - begin)
        for before, send in pairwise(request.sends):
            if before.work >= 0 and send.work > before.work:
                at.append(send.t)
                work.append(send.work - before.work)
    return at, work

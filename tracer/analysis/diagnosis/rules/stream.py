"""Stage 10, from a token that is known to bytes that are sent: Python work for each token, work
that grows with the output, a batcher before the first chunk, a busy event loop, chunks that leave
in clumps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, Evidence, median, ms
from tracer.analysis.diagnosis.spell import points, spell
from tracer.analysis.diagnosis.steps import Floats

WORK, GROWTH, FIRST_CHUNK, LAG, CLUMPS = (
    "stream-work", "detokeniser-growth", "first-chunk-delay", "stream-lag", "clumped-stream"
)  # fmt: skip


def _streams(evidence: Evidence) -> list[Asked]:
    return [r for r in evidence.requests if r.streamed and r.sent_tokens > 0 and r.sent_work >= 0]


def _pieces(request: Asked) -> list[tuple[int, int, int, int]]:
    """(begin, end, tokens, work in ns) between two progress reports; the whole stream when none
    were kept."""
    pieces = []
    previous_t, tokens, work = request.first_token or request.begin, 0, 0
    for send in request.sends:
        if send.tokens > tokens and send.work >= 0:
            pieces.append((previous_t, send.t, send.tokens - tokens, max(0, send.work - work)))
        previous_t, tokens, work = send.t, max(tokens, send.tokens), max(work, send.work)
    if not request.sends and request.sent_tokens > 0:
        end = request.closed or request.last_token or request.begin
        pieces.append((previous_t, end, request.sent_tokens, request.sent_work))
    return pieces


def stream_work(case: Case) -> Sequence[Said]:
    """Each token costs much Python work: detokenising, building the chunk, writing it. When the
    work also grows with the output's length it is the detokeniser's."""
    evidence = case.evidence
    streams = _streams(evidence)
    if len(streams) < 3:
        return []
    growth = _growth(evidence, [r for r in streams if r.sent_tokens >= 16])
    if growth:
        return growth
    pieces = sorted(
        (end, begin, tokens, work, r.index)
        for r in streams
        for begin, end, tokens, work in _pieces(r)
    )
    if not pieces:
        return []
    tokens = np.array([piece[2] for piece in pieces], float)
    work = np.array([piece[3] for piece in pieces], float)
    each = work / tokens
    gaps = np.array([max(1, piece[0] - piece[1]) for piece in pieces]) / tokens
    slow = (each >= limit.STREAM_MS * NS_PER_MS) & (each >= limit.STREAM_SHARE * gaps)
    stretch = spell(slow, share=0.6)
    if stretch is None or stretch.hits < limit.SAMPLES or tokens[slow].sum() < limit.STEPS:
        return []
    inside = np.arange(stretch.first, stretch.last + 1)
    hit = inside[slow[inside]]
    touched = [evidence.requests[i] for i in sorted({pieces[place][4] for place in hit})]
    cost = float(work[hit].sum()) / float(tokens[hit].sum())
    begin, end = min(pieces[place][1] for place in hit), pieces[stretch.last][0]
    core = float(work[hit].sum()) / max(1, end - begin)
    return [
        found(
            evidence,
            WORK,
            Stage.STREAM,
            f"handing out a token takes {ms(cost):,.1f} ms of Python work, for {len(touched)} "
            f"streams {core:.0%} of a core",
            check=(
                "detokenisation, logging and middleware on the way of each chunk; several tokens a "
                "chunk"
            ),
            lost_ns=float(work[hit].sum()),
            start=begin,
            end=end,
            confidence=0.85,
            affected=touched,
            exhibits=[
                Exhibit(
                    "work a token",
                    "ms",
                    points(np.array([piece[0] for piece in pieces]), each / NS_PER_MS),
                )
            ],
            slowdown=1 / max(0.05, 1 - min(core, 0.95)),
        )
    ]


def _growth(evidence: Evidence, streams: list[Asked]) -> list[Said]:
    """Work a token rises with the token's index: within a stream where progress was kept, else
    across streams."""
    index: list[float] = []
    cost: list[float] = []
    for request in streams:
        sent = 0
        for _, _, tokens, work in _pieces(request):
            index.append(sent + tokens / 2)
            cost.append(work / tokens)
            sent += tokens
    if len(cost) < 2 * limit.GREW_SAMPLES:
        return []
    places, costs = np.array(index), np.array(cost)
    low, high = np.percentile(places, [33, 67])
    if high < 2 * max(low, 1.0):
        return []
    early, late = median(costs[places <= low]), median(costs[places >= high])
    if late < limit.GROWTH * early or late - early < limit.GROWTH_MS * NS_PER_MS:
        return []
    if _rank_correlation(places, costs) < limit.GROWTH_ORDER:
        return []
    lost = sum(max(0.0, request.sent_work - early * request.sent_tokens) for request in streams)
    by_time = sorted(streams, key=lambda request: request.begin)
    order = np.argsort(places)
    return [
        found(
            evidence,
            GROWTH,
            Stage.STREAM,
            f"handing out a token costs {ms(early):,.2f} ms at the start of an output and "
            f"{ms(late):,.2f} ms near token "
            f"{median(places[places >= high]):,.0f}: the work grows with the output's length",
            check=(
                "a detokeniser that decodes the whole output again for each token: decode "
                "incrementally"
            ),
            lost_ns=lost,
            start=by_time[0].first_token or by_time[0].begin,
            end=by_time[-1].closed,
            confidence=0.85,
            affected=by_time,
            exhibits=[
                Exhibit(
                    "work a token",
                    "ms",
                    points(places[order].astype(np.int64), costs[order] / NS_PER_MS),
                    "by index of the output token",
                )
            ],
        )
    ]


def _rank_correlation(a: Floats, b: Floats) -> float:
    def ranks(values: Floats) -> Floats:
        out = np.empty(len(values))
        out[np.argsort(values, kind="stable")] = np.arange(len(values))
        return out

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def first_chunk(case: Case) -> Sequence[Said]:
    """The first token waits before its bytes are handed out: for a constant time (a timer, a
    batcher) or for its turn on a busy event loop."""
    evidence = case.evidence
    asked = [r for r in evidence.requests
             if r.streamed and r.first_token is not None and r.handed_out is not None
             and r.handed_out >= r.first_token]  # fmt: skip
    if len(asked) < 2 * limit.SAMPLES:
        return []
    asked.sort(key=lambda request: request.handed_out or 0)
    delays = np.array([(r.handed_out or 0) - (r.first_token or 0) for r in asked], float)
    slow = delays >= limit.FIRST_CHUNK_MS * NS_PER_MS
    stretch = spell(slow, share=0.8)
    if stretch is None or stretch.hits < 2 * limit.SAMPLES:
        return []
    inside = delays[stretch.first : stretch.last + 1]
    requests = asked[stretch.first : stretch.last + 1]
    low, middle, high = np.percentile(inside, [25, 50, 75])
    constant = high - low <= limit.FIRST_CHUNK_SPREAD * middle
    if not constant and middle < limit.STREAM_LAG_MS * NS_PER_MS:
        return []
    exhibits = [
        Exhibit(
            "first token known to first bytes sent",
            "ms",
            points(np.array([r.first_token for r in asked], np.int64), delays / NS_PER_MS),
        )
    ]
    common: dict[str, Any] = {
        "lost_ns": float(inside.sum()),
        "start": requests[0].first_token or 0,
        "end": requests[-1].handed_out,
        "affected": requests,
        "exhibits": exhibits,
    }
    if constant:
        return [
            found(
                evidence,
                FIRST_CHUNK,
                Stage.STREAM,
                f"every first token is held back for {ms(middle):,.0f} ms (quartiles "
                f"{ms(low):,.0f}-{ms(high):,.0f}) "
                "before "
                f"its bytes are sent, in {len(requests)} requests and at any load",
                check="a batcher, a flush interval or a polling loop between engine and socket",
                confidence=0.8,
                **common,
            )
        ]
    return [
        found(
            evidence,
            LAG,
            Stage.STREAM,
            f"first tokens wait {ms(middle):,.0f} ms (p50, up to {ms(float(inside.max())):,.0f} "
            "ms) for their turn to be "
            f"sent, in {len(requests)} requests",
            check="what keeps the event loop busy: tokenising, templates, other streams",
            confidence=0.7,
            **common,
        )
    ]


def clumps(case: Case) -> Sequence[Said]:
    """Chunks leave in clumps although the engine yields tokens steadily: something buffers on the
    way out."""
    evidence = case.evidence
    touched: list[Asked] = []
    holes: list[tuple[int, int, int]] = []
    for request in evidence.requests:
        if (
            not request.streamed
            or len(request.sends) < 2
            or len(request.tokens) < limit.CLUMP_TOKENS
        ):
            continue
        mine = _clumps_of(request)
        if len(mine) >= limit.CLUMPS:
            touched.append(request)
            holes += mine
    if not touched:
        return []
    holes.sort()
    lost = sum((end - begin) // 2 * tokens for begin, end, tokens in holes)
    sizes = [tokens for _, _, tokens in holes]
    pauses = [end - begin for begin, end, _ in holes]
    return [
        found(
            evidence,
            CLUMPS,
            Stage.STREAM,
            f"chunks leave in clumps of {median(sizes):,.0f} tokens every "
            f"{median(pauses) / 1e9:,.1f} s in {len(touched)} "
            "streams, while the engine yields tokens steadily",
            check=(
                "buffering between engine and client: gzip, a proxy's response buffer, a writer "
                "that does not flush"
            ),
            lost_ns=float(lost),
            start=holes[0][0],
            end=holes[-1][1],
            confidence=0.85,
            affected=touched,
            exhibits=[
                Exhibit(
                    "pause between chunks",
                    "s",
                    tuple((end, round((end - begin) / 1e9, 3)) for begin, end, _ in holes[:200]),
                )
            ],
        )
    ]


def _clumps_of(request: Asked) -> list[tuple[int, int, int]]:
    """(begin, end, tokens) of pauses between two progress reports in which the engine went on
    steadily."""
    out = []
    for before, after in zip(request.sends, request.sends[1:], strict=False):
        if after.t - before.t < limit.CLUMP_S * NS_PER_S:
            continue
        low, high = np.searchsorted(request.tokens, [before.t, after.t])
        inside = request.tokens[low:high]
        if len(inside) < limit.CLUMP_TOKENS:
            continue
        longest = int(np.diff(inside).max())
        if longest < (after.t - before.t) / 4 and after.chunks > before.chunks:
            out.append((before.t, after.t, len(inside)))
    return out

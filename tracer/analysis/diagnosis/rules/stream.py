"""Stage 10, from a token that is known to bytes that are sent: Python work for each token, work
that grows with the output, a batcher before the first chunk, a busy event loop, chunks that leave
in clumps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import median, ms, percent, ranks, series, window_of
from tracer.analysis.diagnosis.finding import events
from tracer.analysis.diagnosis.records import RequestFacts

WORK: Final = Cause(
    "stream-work",
    Stage.STREAM,
    0.85,
    "detokenisation, logging and middleware on the way of each chunk; several tokens a chunk",
    explains=("stream-lag", "first-chunk-delay", "front-end", "host-overhead", "front-end-core"),
)
GROWTH: Final = Cause(
    "detokeniser-growth",
    Stage.STREAM,
    0.85,
    "a detokeniser that decodes the whole output again for each token: decode incrementally",
    explains=("stream-work", "stream-lag", "front-end-core", "host-overhead"),
)
FIRST_CHUNK: Final = Cause(
    "first-chunk-delay",
    Stage.STREAM,
    0.8,
    "a batcher, a flush interval or a polling loop between engine and socket",
)
LAG: Final = Cause(
    "stream-lag",
    Stage.STREAM,
    0.7,
    "what keeps the event loop busy: tokenising, templates, other streams",
)
CLUMPS: Final = Cause(
    "clumped-stream",
    Stage.STREAM,
    0.85,
    "buffering between engine and client: gzip, a proxy's response buffer, a writer that "
    "does not flush",
)


class Piece(NamedTuple):
    """`tokens` handed out between two progress reports, for `work` ns of Python."""

    end: int
    begin: int
    tokens: int
    work: int
    request: int


def _pieces(request: RequestFacts) -> list[Piece]:
    """Return the pieces of a stream; the whole of it where no progress was kept."""
    index = request.index
    begin, tokens, work = request.first_token or request.begin, 0, 0
    if not request.sends:
        end = request.closed or request.last_token or request.begin
        return [Piece(end, begin, request.sent_tokens, request.sent_work, index)]
    pieces = []
    for send in request.sends:
        if send.tokens > tokens and send.work >= 0:
            spent = max(0, send.work - work)
            pieces.append(Piece(send.t, begin, send.tokens - tokens, spent, index))
        begin, tokens, work = send.t, max(tokens, send.tokens), max(work, send.work)
    return pieces


@rule(WORK, GROWTH)
def stream_work(case: Case) -> Results:
    """Each token costs much Python work: detokenising, building the chunk, writing it. Where the
    work also grows with the output's length, the detokeniser does it."""
    evidence = case.evidence
    streams = [request for request in evidence.requests if request.tells_work]
    if len(streams) < 3:
        return
    growth = list(_growth([request for request in streams if request.sent_tokens >= 16]))
    if growth:
        yield from growth
        return
    pieces = sorted(piece for request in streams for piece in _pieces(request))
    ends = np.array([piece.end for piece in pieces], np.int64)
    begins = np.array([piece.begin for piece in pieces], np.int64)
    tokens = np.array([piece.tokens for piece in pieces], float)
    work = np.array([piece.work for piece in pieces], float)
    each, gaps = work / tokens, np.maximum(ends - begins, 1) / tokens
    slow = (each >= limit.STREAM_MS * NS_PER_MS) & (each >= limit.STREAM_SHARE * gaps)
    window = window_of(slow, limit.SAMPLES, share=0.6)
    if window is None or tokens[slow].sum() < limit.STEPS:
        return
    hit = window.hit
    touched = [evidence.requests[i] for i in sorted({pieces[place].request for place in hit})]
    spent = float(work[hit].sum())
    begin, end = int(begins[hit].min()), int(ends[window.last])
    core = spent / max(1, end - begin)
    yield WORK.finding(
        f"handing out a token takes {ms(spent / float(tokens[hit].sum())):,.1f} ms of Python work, "
        f"for {len(touched)} streams {percent(core)} of a core",
        (begin, end),
        touched,
        spent,
        series("work a token", "ms", ends, each / NS_PER_MS),
        slowdown=1 / max(0.05, 1 - min(core, 0.95)),
    )


def _growth(streams: Sequence[RequestFacts]) -> Results:
    """Work a token rises with its index, within a stream or across streams."""
    index: list[float] = []
    cost: list[float] = []
    for request in streams:
        sent = 0
        for piece in _pieces(request):
            index.append(sent + piece.tokens / 2)
            cost.append(piece.work / piece.tokens)
            sent += piece.tokens
    if len(cost) < 2 * limit.GREW_SAMPLES:
        return
    places, costs = np.array(index), np.array(cost)
    low, high = np.percentile(places, [33, 67])
    if high < 2 * max(low, 1.0):
        return
    early, late = median(costs[places <= low]), median(costs[places >= high])
    if late < limit.GROWTH * early or late - early < limit.GROWTH_MS * NS_PER_MS:
        return
    if float(np.corrcoef(ranks(places), ranks(costs))[0, 1]) < limit.GROWTH_ORDER:
        return
    by_time = sorted(streams, key=lambda request: request.begin)
    order = np.argsort(places)
    yield GROWTH.finding(
        f"handing out a token costs {ms(early):,.2f} ms at the start of an output and "
        f"{ms(late):,.2f} ms near token {median(places[places >= high]):,.0f}: the work grows with "
        "the output's length",
        (by_time[0].first_token or by_time[0].begin, by_time[-1].closed),
        by_time,
        sum(max(0.0, request.sent_work - early * request.sent_tokens) for request in streams),
        series(
            "work a token",
            "ms",
            places[order],
            costs[order] / NS_PER_MS,
            "by index of the output token",
        ),
    )


@rule(FIRST_CHUNK, LAG)
def first_chunk(case: Case) -> Results:
    """First bytes wait: for a constant time (a batcher) or for a busy event loop."""
    timed = sorted(
        (r.handed_out, r.index, r.first_token)
        for r in case.evidence.requests
        if r.streamed
        and r.first_token is not None
        and r.handed_out is not None
        and r.handed_out >= r.first_token
    )
    known, order, out = np.array(timed, np.int64).reshape(-1, 3).T[[2, 1, 0]]
    delays = (out - known).astype(float)
    slow = delays >= limit.FIRST_CHUNK_MS * NS_PER_MS
    window = window_of(slow, 2 * limit.SAMPLES, share=0.8)
    if window is None:
        return
    inside = slice(window.first, window.last + 1)
    low, middle, high = np.percentile(delays[inside], [25, 50, 75])
    constant = high - low <= limit.FIRST_CHUNK_SPREAD * middle
    if not constant and middle < limit.STREAM_LAG_MS * NS_PER_MS:
        return
    requests = [case.evidence.requests[index] for index in order[inside]]
    if constant:
        cause = FIRST_CHUNK
        statement = (
            f"every first token is held back for {ms(middle):,.0f} ms (quartiles "
            f"{ms(low):,.0f}-{ms(high):,.0f}) before its bytes are sent, in {len(requests)} "
            "requests and at any load"
        )
    else:
        cause = LAG
        statement = (
            f"first tokens wait {ms(middle):,.0f} ms (p50, up to "
            f"{ms(float(delays[inside].max())):,.0f} ms) for their turn to be sent, in "
            f"{len(requests)} requests"
        )
    yield cause.finding(
        statement,
        (known[window.first], out[window.last]),
        requests,
        float(delays[inside].sum()),
        series("first token known to first bytes sent", "ms", known, delays / NS_PER_MS),
    )


@rule(CLUMPS)
def clumps(case: Case) -> Results:
    """Chunks leave in clumps although the engine yields tokens steadily."""
    touched: list[RequestFacts] = []
    holes: list[tuple[int, int, int]] = []
    for request in case.evidence.requests:
        mine = _clumps_of(request) if request.streamed else []
        if len(mine) >= limit.CLUMPS:
            touched.append(request)
            holes += mine
    if not touched:
        return
    begins, ends, tokens = np.array(sorted(holes), np.int64).T
    pauses = ends - begins
    yield CLUMPS.finding(
        f"chunks leave in clumps of {median(tokens):,.0f} tokens every "
        f"{median(pauses) / NS_PER_S:,.1f} s in {len(touched)} streams, while the engine yields "
        "tokens steadily",
        (begins[0], ends[-1]),
        touched,
        float((pauses // 2 * tokens).sum()),
        events("pause between chunks", "s", zip(ends.tolist(), pauses / NS_PER_S, strict=True)),
    )


def _clumps_of(request: RequestFacts) -> list[tuple[int, int, int]]:
    """Return (begin, end, tokens) of pauses in which the engine went on steadily."""
    out = []
    for before, after in pairwise(request.sends):
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

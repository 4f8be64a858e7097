"""What each latency is: every interval of the project is defined here, once, beside its arithmetic.

All take a `Request` and give ns, or None when an end of the interval is not known: a missing
milestone is missing, never zero, and an interval that would be negative (clocks that disagree, a
milestone told out of place) is none. A preemption and the tokens computed again lie inside these
intervals; they are counted beside them and never subtracted. *Token known* means known on the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tracer.state.request import decode
from tracer.state.request.outcome import error_of
from tracer.state.request.request import Request


def interval(begin: int | None, end: int | None) -> int | None:
    """`end` − `begin` in ns, when both are known and in that order."""
    if begin is None or end is None or end < begin:
        return None
    return end - begin


# --- instants that follow from others -------------------------------------------------------------


def admission(request: Request) -> int | None:
    """Begin of stage 4: the request was handed to the engine, or, if nobody saw that, its queue
    took it."""
    return request.queued if request.admission_begin is None else request.admission_begin


def last_token(request: Request) -> int | None:
    """The last token was known, or the engine knew that none will come: end of stage 11, begin of
    stage 12.

    `Finished.t`, or the token instant of the request's last step if that is later. None while it is
    not finished.
    """
    if request.finished is None:
        return None
    return max(request.finished, decode.last_token(request) or 0)


def released(request: Request) -> int | None:
    """End of stage 12: blocks released and response closed, whichever is later. A request that no
    client's response belongs to ends with its blocks."""
    if request.fronted:
        return None if request.closed is None else max(request.closed, request.released or 0)
    return (
        request.released if request.closed is None else max(request.closed, request.released or 0)
    )


def closed(request: Request) -> int | None:
    """End of E2E: the response was closed; offline, where there is none: blocks released, else last
    token."""
    if request.closed is not None or request.fronted:
        return request.closed
    if request.released is not None:
        return max(request.released, last_token(request) or 0)
    return last_token(request) if request.over is not None else None


# --- latencies ------------------------------------------------------------------------------------


def queue(request: Request) -> int | None:
    """Queue time = stage 4: handed to the engine → first scheduled (its prefix lookup starts)."""
    return interval(admission(request), request.lookup)


def prefill(request: Request) -> int | None:
    """Prefill time: first scheduled → first token known. Gaps between chunks and preemptions are
    inside."""
    return interval(request.lookup, request.first_token)


def ttft(request: Request) -> int | None:
    """Time to first token: received → first token handed out. Offline nothing is handed out: →
    first token known.

    What goes out without a token (an error, the end of an answer that was cancelled in the queue)
    is no first token, nor is what goes out when the client has gone. Where no engine tells of
    tokens, the answer has to end well first.
    """
    if request.offline:
        return interval(request.received, request.first_token)
    sent = request.stream_end
    if sent is None or (request.closed is not None and sent > request.closed):
        return None
    token = request.first_token is not None or request.output_tokens > 0
    if not token and (request.engaged or request.over is None or error_of(request)):
        return None
    return interval(request.received, sent)


def engine_ttft(request: Request) -> int | None:
    """TTFT as the engine sees it: its queue took the request → first token known."""
    return interval(request.queued, request.first_token)


def e2e(request: Request) -> int | None:
    """End to end: received → closed. None while it goes on."""
    return interval(request.received, closed(request))


def answer(request: Request) -> int | None:
    """E2E of an answer that was completed. None for one that failed or was cancelled: that is no
    answer's length."""
    return None if error_of(request) else e2e(request)


def decoding(request: Request) -> tuple[int, int] | None:
    """First and last token known so far and the tokens between them: (ns, tokens after the first).

    None unless the instants of both are known: when steps were lost, the last token seen may not be
    the last one.
    """
    first, last = request.first_token, decode.last_token(request)
    after = request.output_tokens - 1
    if first is None or last is None or after < 1 or request.observed + request.unseen < after + 1:
        return None
    length = interval(first, last)
    return None if length is None else (length, after)


def tpot(request: Request) -> float | None:
    """Time per output token: (last token − first token) / (tokens − 1), in ns. None below two
    tokens."""
    span = decoding(request)
    return None if span is None else span[0] / span[1]


def itl(times: array[int]) -> list[float]:
    """Inter-token latencies in ns: the gap before each token but the first.

    Per token: k tokens known at the same instant (speculative decoding) each took a k-th of the gap
    before them. Those known together with the first token took none.
    """
    gaps: list[float] = []
    if not times:
        return gaps
    previous, at = times[0], 1
    while at < len(times):
        instant, count = times[at], 1
        while at + count < len(times) and times[at + count] == instant:
            count += 1
        gaps.extend([(instant - previous) / count] * count)
        previous, at = instant, at + count
    return gaps


# --- what no stage covers -------------------------------------------------------------------------


def covered(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """Length in ns of the union of `intervals`, cut to `begin` … `end`. Stages overlap (10 and 12
    with 11, 6 with 7): what two of them cover counts once."""
    total, reached = 0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def unattributed(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """Time between `begin` and `end` that no stage covers, in ns."""
    return max(0, end - begin - covered(intervals, begin, end))

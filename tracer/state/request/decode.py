"""Output tokens of one request over the step history: their instants, the decode breakdown, and
copying both out of the history before it drops the steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from tracer.state.engine.step_history import PARTS, StepHistory, divide
from tracer.state.request.request import Pass, Request, Span

DECODE_PARTS: Final = (*PARTS, "recompute")
"""`step_history.PARTS` and the passes in which tokens lost to a preemption were computed again."""
_WAIT: Final = PARTS.index("wait")
_RECOMPUTE: Final = len(PARTS)


def token_limit(request: Request) -> int | None:
    """How many of the tokens that steps told of count: a step launched before the request was known
    to be finished may have given it one more, which the engine threw away. None while there is no
    exact count."""
    return None if request.final_tokens < 0 else max(0, request.final_tokens - request.unseen)


def spans(request: Request) -> Iterator[Span]:
    """The spans that are still in the history and yielded tokens, the running one included, cut at
    `token_limit`."""
    batch = request.batch
    if batch is None:
        return
    limit = token_limit(request)
    left = None if limit is None else limit - request.settled.count
    running = request.open_since
    pieces = (
        request.spans
        if running < 0
        else [*request.spans, Span(running, batch.history.last_index, 1, 1)]
    )
    for span in pieces:
        if left is not None:
            if left <= 0:
                return
            if span.produced == 1:
                count = span.last - span.first + 1
                if count > left:
                    span = Span(span.first, span.first + left - 1, 1, 1)
                left -= count
            else:
                if span.produced > left:
                    span = Span(span.first, span.last, span.scheduled, left)
                left -= span.produced
        if span.last >= span.first:
            yield span


def last_token(request: Request) -> int | None:
    """Instant of the last output token that a step told of (ns)."""
    if request.open_since >= 0 and request.final_tokens < 0 and request.batch is not None:
        return request.batch.history.tokens[-1]
    given = list(spans(request))
    if given and request.batch is not None:
        return request.batch.history.token(given[-1].last)
    settled, limit = request.settled, token_limit(request)
    if settled.count == 0 or limit == 0:
        return None
    if limit is not None and limit < len(settled.times):
        return settled.times[limit - 1]
    return settled.last


def second_token(request: Request) -> int | None:
    """Instant of the second output token that a step told of (ns)."""
    times = request.settled.times
    if len(times) > 1:
        return times[1]
    wanted = 1 - request.settled.count
    if request.batch is not None and wanted >= 0:
        for span in spans(request):
            count = (span.last - span.first + 1) * span.produced
            if wanted < count:
                return request.batch.history.token(span.first + wanted // span.produced)
            wanted -= count
    return None


def last_end(request: Request) -> int:
    """When the step of the last output token was over (ns); 0 when that is not known."""
    given = list(spans(request))
    if given and request.batch is not None:
        return request.batch.history.end(given[-1].last)
    return request.settled.end


def token_times(request: Request) -> tuple[array[int], array[int]]:
    """Instant (ns) and batch size for each output token that a step told of. O(tokens): for one
    request at a time."""
    limit = token_limit(request)
    times, batches = request.settled.times[:limit], request.settled.batches[:limit]
    if request.batch is not None:
        history = request.batch.history
        for span in spans(request):
            _copy(history, span, times, batches)
    return times, batches


def decode_parts(request: Request) -> list[int] | None:
    """First to last token in ns divided among `DECODE_PARTS`; the parts add up to it exactly.

    None when the first token's instant is not known: there is no interval to divide.
    """
    if request.first_token is None or request.batch is None:
        return None
    settled = request.settled
    totals = settled.parts.copy() or [0] * len(DECODE_PARTS)
    _accumulate(
        request,
        request.batch.history,
        list(spans(request)),
        totals,
        settled.step,
        settled.token,
        settled.end,
    )
    return totals


def settle(request: Request, history: StepHistory, base: int) -> bool:
    """Copy out what the history holds for this request before index `base`. Returns whether it
    still needs the rest."""
    early: list[Span] = []
    late: list[Span] = []
    for span in request.spans:
        if span.last < base:
            early.append(span)
        elif span.first < base:
            early.append(Span(span.first, base - 1, span.scheduled, span.produced))
            late.append(Span(base, span.last, span.scheduled, span.produced))
        else:
            late.append(span)
    produced = sum((span.last - span.first + 1) * span.produced for span in late)
    running = request.open_since
    if 0 <= running < base:
        early.append(Span(running, base - 1, 1, 1))
        request.open_since = base
    if early:
        settled = request.settled
        if request.first_token is not None:
            settled.parts = settled.parts or [0] * len(DECODE_PARTS)
            settled.step, settled.token, settled.end = _accumulate(
                request, history, early, settled.parts, settled.step, settled.token, settled.end
            )
        for span in early:
            _copy(history, span, settled.times, settled.batches)
            settled.count += (span.last - span.first + 1) * span.produced
        settled.last = history.token(early[-1].last)
        request.spans = late
        request.produced = produced
    request.passes = [_keep(item, history, base) for item in request.passes]
    request.redo = [_keep(item, history, base) for item in request.redo]
    return bool(
        request.spans
        or request.open_since >= 0
        or any(isinstance(item.step, int) for item in request.passes)
        or any(isinstance(item.step, int) for item in request.redo)
    )


def forget_times(request: Request) -> None:
    """Drop the instants of the settled tokens of a request that is over; their number, the last one
    and the breakdown stay."""
    settled = request.settled
    settled.last = last_token(request) or settled.last if not request.spans else settled.last
    settled.times, settled.batches = array("q"), array("I")


def _keep(item: Pass, history: StepHistory, base: int) -> Pass:
    if isinstance(item.step, int) and history.base <= item.step < base:
        return item._replace(step=history.step(item.step))
    return item


def _copy(history: StepHistory, span: Span, times: array[int], batches: array[int]) -> None:
    """Append instants and batch sizes of a span's tokens."""
    first, last = span.first - history.base, span.last - history.base + 1
    if span.produced == 1:
        times.extend(history.tokens[first:last])
        batches.extend(history.sizes[first:last])
        return
    for place in range(first, last):
        times.extend([history.tokens[place]] * span.produced)
        batches.extend([history.sizes[place]] * span.produced)


def _accumulate(
    request: Request,
    history: StepHistory,
    pieces: list[Span],
    totals: list[int],
    step: int,
    token: int,
    end: int,
) -> tuple[int, int, int]:
    """Add the division of the time up to the last token of `pieces` to `totals`.

    `step`, `token`, `end` name the last token accounted for so far (step -1: none yet, the first
    token starts the count); the new ones are returned.
    """
    for span in pieces:
        first = span.first
        if step < 0:
            step, token = first, history.token(first)
            first += 1
        elif first > step + 1:  # it missed steps in between: this token's interval is its own
            _irregular(
                request,
                history,
                first,
                totals,
                token,
                end if step < history.base else history.end(step),
            )
            step = first
            first += 1
        if span.last > step and first <= span.last:
            before, after = history.sums(step), history.sums(span.last)
            for part in range(len(PARTS)):
                totals[part] += after[part] - before[part]
        step = span.last
        token, end = history.token(step), history.end(step)
    return step, token, end


def _irregular(
    request: Request, history: StepHistory, index: int, totals: list[int], token: int, end: int
) -> None:
    """Divide the interval from `token` (the request's last one) to the token of step `index`,
    between which the request was in no step that yielded one: waiting, or computing lost tokens
    again."""
    step = history.step(index)
    parts = divide(step, history.token(index), token, end)
    again = 0
    for item in request.redo:
        redo = history.step(item.step) if isinstance(item.step, int) else item.step
        begin, finish = max(redo.t, token), min(redo.t + max(redo.end, redo.token, 0), step.t)
        again += max(0, finish - begin)
    again = min(again, parts[_WAIT])
    for part, value in enumerate(parts):
        totals[part] += value
    totals[_WAIT] -= again
    totals[_RECOMPUTE] += again

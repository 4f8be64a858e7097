"""The twelve stages of one request as intervals: rows of the waterfall and segments of its bar.

`engine_hooks.protocol.stages` says where each stage begins and ends; here each is taken from the
request's milestones and the steps that it took part in. A stage without a begin or an end is not
given one: its row says whether it runs, is missing, or cannot be measured on this engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.events import Coverage, Step, Timing
from engine_hooks.protocol.stages import Stage
from tracer.state.engine.step_history import StepHistory, device_offsets, token_instant
from tracer.state.request import decode, latency
from tracer.state.request.request import Pass, Request
from tracer.state.view import ChunkView, Segment, StageView, Status

_ALL: Final = tuple(Stage)
_WAIT, _UPDATE = decode.DECODE_PARTS.index("wait"), decode.DECODE_PARTS.index("update")
SETTLED_AFTER: Final = 64
"""Steps after which device times for a step are no longer expected, so that rows made from it can
be reused."""


class Span(NamedTuple):
    """One stage as an interval (ns); None where an instant is not known. `waits`: stretches in it
    that were waiting. `note`: what to know about the interval, for example that the step was not
    told in parts."""

    begin: int | None
    end: int | None
    waits: tuple[tuple[int, int | None], ...] = ()
    wait: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    estimated: bool = False
    note: str = ""


NOTHING: Final = Span(None, None)


def request_spans(request: Request, until: int) -> list[Span]:
    """The twelve stages of a request as intervals, in order. `until` (ns) ends what goes on, for
    the waits in it."""
    return [
        *_before_forward(request),
        *_forward(request),
        _stream(request),
        decode_span(request, until),
        _teardown(request),
    ]


def stage_lengths(request: Request) -> list[int]:
    """How long each stage of a request that is over took (ns), -1 where that is not known."""
    spans = (
        *_before_forward(request),
        *_forward(request),
        _stream(request),
        Span(*_decode_ends(request)),
        _teardown(request),
    )
    return list(map(_length, spans))


def _length(span: Span) -> int:
    return -1 if span.begin is None or span.end is None else max(0, span.end - span.begin)


def _before_forward(request: Request) -> tuple[Span, Span, Span, Span, Span]:
    """Stages 1 to 5."""
    return (
        _ordered(request.received, request.receive_end),
        _ordered(request.template_begin, request.template_end),
        _ordered(request.tokenise_begin, request.tokenise_end),
        _admission(request),
        _ordered(request.lookup, request.scheduled),
    )


def _teardown(request: Request) -> Span:
    return _ordered(latency.last_token(request), latency.released(request))


def stage_rows(
    request: Request,
    spans: list[Span],
    now: int,
    coverage: Mapping[int, Coverage],
    total: int | None,
) -> list[StageView]:
    """The twelve rows. `total` (ns) is what shares refer to: E2E, or the time so far; None leaves
    them out."""
    reached = _reached(spans)
    return [
        stage_row(request, stage, span, now, coverage.get(stage), total, stage < reached)
        for stage, span in zip(_ALL, spans, strict=True)
    ]


def stage_row(
    request: Request,
    stage: Stage,
    span: Span,
    now: int,
    coverage: Coverage | None,
    total: int | None,
    passed: bool,
) -> StageView:
    """One row. `passed`: a later stage has begun, so that this one no longer runs."""
    begin, end = span.begin, span.end
    status, reason = Status.MISSING, ""
    if coverage is not None and coverage.status != Status.MEASURED:
        reason = coverage.reason
    if begin is None:
        if coverage is not None and coverage.status == Status.UNAVAILABLE:
            status = Status.UNAVAILABLE
        elif request.offline and stage == Stage.STREAM:
            reason = "offline: nothing is handed out"
        else:
            reason = ""
        return StageView(stage, status, reason=reason)
    if end is None:
        if request.over is not None or passed:
            reason = "its end was not told" if not request.lost else "the process ended"
            return StageView(stage, Status.MISSING, begin, reason=reason)
        status, end = Status.RUNNING, None
    elif span.estimated:
        status = Status.ESTIMATED
    elif (
        coverage is not None
        and coverage.status in (Status.ESTIMATED, Status.UNAVAILABLE)
        and span.note
    ):
        status = Status(coverage.status)
    else:
        status = Status.MEASURED
    length = max(0, (now if end is None else end) - begin)
    return StageView(
        stage,
        status,
        begin,
        end,
        length / NS_PER_MS,
        None if span.wait is None else min(span.wait, length) / NS_PER_MS,
        length / total if total else None,
        reason or span.note,
        tuple([(name, value / NS_PER_MS) for name, value in span.parts]),
    )


def segments(request: Request, spans: list[Span], until: int) -> list[Segment]:
    """The request's bar: stretches ordered by begin, none over another.

    Where stages overlap, the lower one is drawn first; the first byte only until the second token,
    since without streaming it goes out with the last one.
    """
    pieces: list[tuple[int, int, int | None, bool]] = []
    first_only = request.output_tokens <= 1
    stream = spans[Stage.STREAM - 1]
    streaming = stream.begin is not None and stream.end is None
    for stage, span in enumerate(spans, 1):
        begin, end = span.begin, span.end
        if begin is None or (stage == Stage.DECODE and end is None and first_only and streaming):
            continue
        if stage == Stage.STREAM and end is not None:
            end = min(end, decode.second_token(request) or end)
        if not span.waits:
            pieces.append((begin, stage, end, stage == Stage.ADMISSION))
            continue
        at = begin
        for start, stop in span.waits:
            if start > at:
                pieces.append((at, stage, start, False))
            pieces.append((start, stage, stop, True))
            at = start if stop is None else stop
        if span.waits[-1][1] is not None and (end is None or end > at):
            pieces.append((at, stage, end, False))
    if spans[Stage.DECODE - 1].begin is None:
        pieces.extend(_unanchored(request))
    pieces.sort(key=_by_begin)
    drawn: list[Segment] = []
    reached = -1
    for place, (begin, stage, end, waiting) in enumerate(pieces):
        if place + 1 < len(pieces):
            if end is None:
                continue  # something began later: its own end was lost, and is not guessed
            if waiting:
                end = min(end, pieces[place + 1][0])
        elif end is None:
            end = request.over
        begin = max(begin, reached)
        if end is None or end > begin:
            drawn.append(Segment(_ALL[stage - 1], begin, end, waiting))
            reached = until if end is None else end
    return drawn


def chunk_views(request: Request) -> list[ChunkView]:
    """The passes of a request's prefill whose times are known."""
    history = request.batch.history if request.batch is not None else None
    views = []
    for item in request.passes:
        step = _step(item, history)
        if step is not None:
            begin, end = _layers(step)
            views.append(ChunkView(step.n, item.scheduled, begin, end))
    return views


def front_final(request: Request, spans: list[Span], until: int) -> bool:
    """Whether stages 1 to 10 will not change any more after `until` unless an event touches the
    request: the first token is handed out, and no device times are expected for the passes before
    it."""
    stream = spans[Stage.STREAM - 1]
    if (
        request.batch is None
        or not request.passes
        or request.first_token is None
        or request.first_token > until
    ):
        return False
    if stream.begin is not None and (stream.end is None or stream.end > until):
        return False
    last = request.passes[-1].step
    if not isinstance(last, int):
        return True
    history = request.batch.history
    return history.last_index - last > SETTLED_AFTER or history.step(last).timing == Timing.HOST


def decode_segments(before: tuple[Segment, ...], span: Span) -> list[Segment]:
    """The part of the bar that decode adds to the segments `before` it while it goes on."""
    begin = span.begin or 0
    at = reached = max(begin, before[-1].end or begin) if before else begin
    drawn: list[Segment] = []
    for start, stop in span.waits:
        if start > at:
            drawn.append(Segment(Stage.DECODE, at, start, False))
        if stop is None or stop > max(start, reached):
            drawn.append(Segment(Stage.DECODE, max(start, reached), stop, True))
        if stop is None:
            return drawn
        at = max(at, stop)
    drawn.append(Segment(Stage.DECODE, at, None, False))
    return drawn


# --- single stages --------------------------------------------------------------------------------


def _ordered(begin: int | None, end: int | None) -> Span:
    """An interval that is never negative: an end before the begin is no end."""
    if begin is None:
        return NOTHING
    return Span(begin, None if end is None or end < begin else end)


def _admission(request: Request) -> Span:
    """All of stage 4 is waiting; the hop between processes and the engine's queue are its parts. It
    also ends when the request is given up before it was ever scheduled."""
    begin = latency.admission(request)
    end = request.lookup if request.ran else request.finished
    if begin is None or end is None or end < begin:
        return Span(begin, None)
    parts: tuple[tuple[str, int], ...] = ()
    hop = latency.interval(request.admission_begin, request.queued)
    if hop is not None and request.queued is not None and request.queued <= end:
        parts = (("hop", hop), ("queue", end - request.queued))
    return Span(begin, end, (), end - begin, parts, note="" if request.ran else "never scheduled")


def _first_pass(request: Request) -> Step | None:
    """The step that yielded the first token."""
    if request.first_token is None or not request.passes or not request.passes[-1].produced:
        return None
    return _step(request.passes[-1], request.batch.history if request.batch is not None else None)


def _forward(request: Request) -> tuple[Span, Span, Span, Span]:
    """Stages 6 to 9."""
    prefill, first = _prefill(request), _first_pass(request)
    if first is None:
        return NOTHING, prefill, NOTHING, NOTHING
    t, estimated = first.t, first.timing == Timing.ESTIMATED
    embed, layers, head, logits = device_offsets(first)
    token = request.first_token
    embedding = _between(t, embed, layers, estimated)
    lm_head = _between(t, head, logits, estimated)
    sample = NOTHING
    if logits >= 0 and token is not None and token >= t + logits:
        sample = Span(t + logits, token, estimated=estimated)
        if first.wait >= 0:
            wait = min(first.wait, token - t - logits)
            sample = sample._replace(
                wait=wait, parts=(("wait", wait), ("work", token - t - logits - wait))
            )
    return embedding, prefill, lm_head, sample


def _between(t: int, begin: int, end: int, estimated: bool) -> Span:
    if begin < 0 or end < begin:
        return NOTHING
    return Span(t + begin, t + end, estimated=estimated)


def _prefill(request: Request) -> Span:
    """First chunk's first layer to last chunk's last layer; the gaps between chunks were
    waiting."""
    history = request.batch.history if request.batch is not None else None
    begin = end = None
    waits: list[tuple[int, int | None]] = []
    estimated, note = False, ""
    for item in request.passes:
        step = _step(item, history)
        if step is None:
            continue
        start, stop = _layers(step)
        embed, layers, head, _ = device_offsets(step)
        if layers < 0 or head < 0:
            note = "whole step: its parts are not told"
        estimated = estimated or step.timing == Timing.ESTIMATED
        if begin is None:
            begin = start
        elif end is not None:
            # The embedding of a later chunk lies between its layers and the ones before: work, not
            # waiting.
            worked = start if embed < 0 else min(step.t + embed, start)
            if worked > end:
                waits.append((end, worked))
        end = max(stop, end or 0, start)
    if begin is None:
        return NOTHING
    if request.first_token is None and end is not None:  # it goes on, or was given up
        given_up = latency.last_token(request)
        start = max(end, request.preemptions[-1].begin) if request.preempted else end
        if request.preempted and (given_up is None or given_up > start):
            waits.append((start, given_up))
        end = given_up
        note = note if end is None else "given up before the first token"
    if end is not None and end < begin:
        end = None
    wait = sum(max(0, stop - start) for start, stop in waits if stop is not None)
    return Span(begin, end, tuple(waits), wait, estimated=estimated, note=note)


def _stream(request: Request) -> Span:
    """First token known to its bytes handed out. Without a front end that is known nothing is,
    unless a callback is."""
    if request.first_token is None or (request.stream_end is None and not request.fronted):
        return NOTHING
    return _ordered(request.first_token, request.stream_end)


def decode_span(request: Request, until: int) -> Span:
    """First to last token. Waiting: time in which no step ran for it, preemptions included."""
    begin, end = _decode_ends(request)
    if begin is None:
        return NOTHING
    limit = until if end is None else end
    waits: list[tuple[int, int | None]] = [
        (max(start, begin), min(stop, limit))
        for start, stop in request.holes
        if stop > begin and start < limit
    ]
    if request.preempted and request.over is None and end is None:
        start = max(request.preemptions[-1].begin, begin)
        if start < limit:
            waits.append((max(start, waits[-1][1] or start) if waits else start, None))
    parts = decode.decode_parts(request)
    if parts is None:
        return Span(begin, end, tuple(waits))
    if end is not None:
        _tail(request, parts, end)
    wait = parts[_WAIT]
    if waits and waits[-1][1] is None:
        wait += max(0, limit - waits[-1][0])
    named = tuple(
        [(name, value) for name, value in zip(decode.DECODE_PARTS, parts, strict=True) if value]
    )
    return Span(
        begin, end, tuple(waits), wait, named, request.batch is not None and _estimated(request)
    )


def _decode_ends(request: Request) -> tuple[int | None, int | None]:
    """First and last token (ns)."""
    begin = request.first_token
    end = None if begin is None else latency.last_token(request)
    return begin, None if begin is None or end is None or end < begin else end


def _tail(request: Request, parts: list[int], end: int) -> None:
    """Add the time from the last token to the instant at which the engine knew that it was the
    last: what remained of its step, then waiting (a request that is cancelled waits for that
    between steps)."""
    last = decode.last_token(request)
    if last is None or end <= last:
        return
    update = min(max(decode.last_end(request), last), end) - last
    parts[_UPDATE] += update
    parts[_WAIT] += end - last - update


def _estimated(request: Request) -> bool:
    """Whether its latest step's division is an estimate."""
    assert request.batch is not None
    step = request.batch.last
    return step is not None and step.timing == Timing.ESTIMATED


def _unanchored(request: Request) -> list[tuple[int, int, int | None, bool]]:
    """Tokens that were seen although the first one was not: drawn as far as they were seen."""
    batch = request.batch
    if batch is None or request.first_token is not None:
        return []
    first = next(iter(request.settled.times), None)
    if first is None:
        first = next((batch.history.token(span.first) for span in decode.spans(request)), None)
    last = decode.last_token(request)
    if first is None or last is None:
        return []
    return [
        (
            first,
            int(Stage.DECODE),
            None if request.open_since >= 0 and request.over is None else last,
            False,
        )
    ]


def _layers(step: Step) -> tuple[int, int]:
    """Begin and end of a pass's layers (ns); the whole step as far as it was told where its parts
    were not."""
    _, layers, head, logits = device_offsets(step)
    begin = next((offset for offset in (layers, step.launched, step.scheduled) if offset >= 0), 0)
    offset = next((offset for offset in (head, logits) if offset >= 0), None)
    end = token_instant(step) if offset is None else step.t + offset
    return step.t + begin, max(end, step.t + begin)


def _step(item: Pass, history: StepHistory | None) -> Step | None:
    if not isinstance(item.step, int):
        return item.step
    if history is None or not history.base <= item.step <= history.last_index:
        return None
    return history.step(item.step)


def _reached(spans: list[Span]) -> int:
    """Number of the last stage that has begun; the stages that overlap the next one by nature do
    not end it."""
    last = max((stage for stage, span in enumerate(spans, 1) if span.begin is not None), default=0)
    return Stage.STREAM if last == Stage.DECODE else last


def _by_begin(piece: tuple[int, int, int | None, bool]) -> tuple[int, int]:
    return piece[0], piece[1]

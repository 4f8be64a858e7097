"""A Chrome trace that `tracer export --to chrome` wrote, turned into events again.

Requests, steps, latencies, stages and counts come back as they were. What the format does not hold
does not: KV block ids, token ids, signs of life, which events were lost. A front end and an engine
that were two processes are one after it. Everything in the file is checked: it may have been made
up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import Event, Header, pack_u32
from engine_hooks.protocol.stages import Stage
from tracer.export.chrome_records import (
    GAUGES,
    OFFSETS,
    VERSION,
    FileRecord,
    RequestRecord,
    SourceRecord,
    StepRecord,
)
from tracer.export.imports.spans import MAX_BYTES, Imported, SpanError
from tracer.state.engine.step_history import token_instant

_LATEST: Final = 1 << 61
"""No instant of a file lies beyond it (73 years)."""
_BEYOND: Final = 86_400 * NS_PER_S
"""Nor further than a day behind what the file says its end is, which is the newest event, not all
that it foresees."""
_LARGEST: Final = 0x7FFF_FFFF
_LENGTH: Final = 4_096
"""Characters of a name, a reason or another word."""
_ENGINE: Final = {field.name: field.type for field in msgspec.structs.fields(events.Engine)}


class _Arguments(msgspec.Struct):
    tracer: msgspec.Raw = msgspec.Raw(b"")


class _Slice(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    args: _Arguments = msgspec.field(default_factory=_Arguments)


class _Other(msgspec.Struct):
    tracer: FileRecord | None = None


class _Document(msgspec.Struct, rename="camel"):
    trace_events: list[_Slice] = []
    other_data: _Other = msgspec.field(default_factory=_Other)


def is_chrome(data: bytes) -> bool:
    """True when the bytes look like a Chrome trace rather than OTLP."""
    if b'"traceEvents"' in data[:4_096]:
        return True
    return b'"traceEvents"' in data and b'"resourceSpans"' not in data[:4_096]


def read(data: bytes) -> Imported:
    """Return the events that the file tells.

    Raises:
        SpanError: The file is none that was exported here; one line.
    """
    if len(data) > MAX_BYTES:
        raise SpanError(f"{len(data):,} bytes are too many; {MAX_BYTES:,} are read")
    record, requests, steps = _records(data)
    began, latest = record.began, record.now + _BEYOND
    if not 0 <= began <= _LATEST or not 0 <= record.now <= _LATEST:
        raise SpanError(f"no Chrome trace of ours: it claims to start at {began}")
    found = len(requests) + len(steps)
    requests = [item for item in requests if _last(item) <= latest]
    steps = [item for item in steps if item.begin <= latest]
    sources = {source.source: source for source in record.sources}
    for name in [*(item.source for item in requests), *(item.source for item in steps)]:
        sources.setdefault(name, SourceRecord(name))
    told: list[tuple[str, Event]] = []
    try:
        for source in sources.values():
            told += [(source.source, event) for event in _about(source, began, record.now)]
        for request in requests:
            told += [(request.source, event) for event in _request(request, began)]
        told += _steps(steps, requests, began)
    except (OverflowError, TypeError, ValueError) as error:
        raise SpanError(f"no Chrome trace of ours: {error}") from None
    told.sort(key=lambda pair: _when(pair[1]))
    headers = [_header(source, began, record.wall) for source in sources.values()]
    return Imported(headers, told, len(requests), 0, found - len(requests) - len(steps))


def _records(data: bytes) -> tuple[FileRecord, list[RequestRecord], list[StepRecord]]:
    """What was written for the way back. Raises SpanError."""
    requests: list[RequestRecord] = []
    steps: list[StepRecord] = []
    try:
        document = msgspec.json.decode(data, type=_Document)
        record = document.other_data.tracer
        if record is None:
            raise SpanError(
                "this Chrome trace was not written by tracer export: nothing in it says what a "
                "request is"
            )
        if record.version > VERSION:
            raise SpanError(
                f"written by a newer tracer (version {record.version}, this one reads {VERSION}): "
                "upgrade"
            )
        for item in document.trace_events:
            raw = bytes(item.args.tracer)
            if item.ph == "X" and raw and item.cat == "request":
                requests.append(msgspec.json.decode(raw, type=RequestRecord))
            elif item.ph == "X" and raw and item.cat == "step":
                steps.append(msgspec.json.decode(raw, type=StepRecord))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SpanError(f"no Chrome trace of ours: {error}") from None
    return record, requests, steps


def _when(event: Event) -> tuple[int, bool]:
    """Order in which events are told: a step when its tokens were known, before what followed from
    them."""
    return (token_instant(event), False) if isinstance(event, events.Step) else (event.t, True)


# --- processes ------------------------------------------------------------------------------------


def _header(source: SourceRecord, began: int, wall: int) -> Header:
    anchor = ClockAnchor(began, wall) if 0 <= wall <= _LATEST else ClockAnchor(0, 0)
    pid = source.pid if 0 <= source.pid <= _LARGEST else 0
    title, role = source.title[:_LENGTH], source.role[:_LENGTH]
    return Header(events.SCHEMA_VERSION, source.source, pid, role, title, "", "", anchor)


def _about(source: SourceRecord, began: int, now: int) -> Iterator[Event]:
    facts: dict[str, Any] = {"name": ""}
    for name, value in source.engine.items():
        known = name != "t" and _ENGINE.get(name) is type(value)
        if known and (isinstance(value, str) or abs(value) < 1 << 62):
            facts[name] = value
    if source.engine:
        yield events.Engine(began, **facts)
    for row in source.coverage:
        yield events.Coverage(began, row.stage, row.status, row.hook, row.reason)
    yield events.Heartbeat(began + now)
    if source.gone:
        yield events.SourceGone(began + now, source.gone[:_LENGTH])


# --- requests -------------------------------------------------------------------------------------


def _last(record: RequestRecord) -> int:
    """The latest instant of a request, as an offset."""
    instants = [offset for item in record.preemptions for offset in (item.begin, item.resumed)]
    return max([*record.milestones.values(), *instants], default=0)


def _request(record: RequestRecord, began: int) -> Iterator[Event]:
    """What happened to a request, case by case; a case that the file does not tell gives
    nothing."""
    record.key = _in(record.key, "key", 1)
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if type(value) is int:
            setattr(record, name, _count(value))
    record.rid = record.rid[:_LENGTH]
    at = {name: _instant(began, offset) for name, offset in record.milestones.items()}
    first = at.get("received", at.get("queued", min(at.values(), default=began)))
    yield from _arrival(record, at, first)
    yield from _front_end(record, at, first)
    yield from _queue(record, at, began)
    yield from _end(record, at, began)


def _arrival(record: RequestRecord, at: dict[str, int], first: int) -> Iterator[Event]:
    key, rid, streaming = record.key, record.rid, record.streaming
    if "received" in at:
        yield events.Received(
            at["received"], key, rid, record.route, record.client_id, record.tenant, streaming,
            record.offline,
        )  # fmt: skip
    yield events.Params(
        first, key, streaming, record.tenant, record.model, record.max_tokens, record.messages,
        int(record.logprobs),
    )  # fmt: skip
    yield events.Alias(first, key, rid)


def _front_end(record: RequestRecord, at: dict[str, int], first: int) -> Iterator[Event]:
    for stage, begin, end, units in (
        (Stage.RECEIVE, "", "receive_end", record.body_bytes),
        (Stage.TEMPLATE, "template_begin", "template_end", record.prompt_chars),
        (Stage.TOKENISE, "tokenise_begin", "tokenise_end", record.prompt_tokens),
        (Stage.ADMISSION, "admission_begin", "", -1),
    ):
        if begin in at:
            yield events.Begin(at[begin], record.key, stage)
        if end in at:
            yield events.End(at[end], record.key, stage, units)
    if record.prompt_text:
        yield events.Prompt(first, record.key, record.prompt_text, record.prompt_chars, b"", -1)


def _queue(record: RequestRecord, at: dict[str, int], began: int) -> Iterator[Event]:
    key = record.key
    if "queued" in at:
        yield events.Queued(at["queued"], key, record.rid, record.prompt_tokens, record.max_tokens)
    if "lookup" in at:
        taken = at.get("scheduled", at["lookup"])
        blocks = max(0, record.blocks)
        yield events.Scheduled(taken, key, at["lookup"], record.cached_tokens, 0, blocks)
    for number, item in enumerate(record.preemptions, 1):
        begin = _instant(began, item.begin)
        yield events.Preempted(begin, key, item.kind[:_LENGTH], _count(item.computed), -1, number)
        if item.resumed >= 0:
            resumed = _instant(began, item.resumed)
            yield events.Scheduled(resumed, key, resumed, _count(item.cached), 0, 0, True)


def _end(record: RequestRecord, at: dict[str, int], began: int) -> Iterator[Event]:
    key = record.key
    if "stream_end" in at:
        yield events.End(at["stream_end"], key, Stage.STREAM, -1)
    finished = at.get("finished", max(at.values(), default=began))
    if record.output_text:
        yield events.Output(finished, key, 0, record.output_text)
    if "finished" in at:
        reason, error = record.finish_reason[:_LENGTH], record.error[:_LENGTH]
        yield events.Finished(
            finished, key, reason, record.output_tokens, error, record.prompt_tokens,
            record.cached_tokens,
        )  # fmt: skip
    sent = record.sent_chunks, record.sent_bytes, record.sent_tokens
    if max(sent) >= 0:
        yield events.Sent(finished, key, *sent, record.sent_work)
    if "released" in at:
        yield events.Released(at["released"], key, record.freed, record.kept)
    if "closed" in at:
        yield events.Closed(at["closed"], key, record.status_code, -1, record.disconnected)


# --- steps ----------------------------------------------------------------------------------------


def _steps(
    steps: list[StepRecord], requests: list[RequestRecord], began: int
) -> Iterator[tuple[str, Event]]:
    """The last step of a source tells how many blocks each of its requests held last."""
    last = {step.source: step for step in steps}
    for step in steps:
        made = _step(step, began)
        if last[step.source] is step:
            of_source = (item for item in requests if item.source == step.source)
            held = [(item.key, item.blocks) for item in of_source if item.blocks >= 0]
            made.blocks = pack_u32([number for pair in held for number in pair])
        yield step.source, made


def _step(record: StepRecord, began: int) -> events.Step:
    offsets = [
        _instant(0, offset) if offset >= 0 else -1 for offset in record.offsets[: len(OFFSETS)]
    ]
    if len(offsets) <= OFFSETS.index("scheduled"):
        raise ValueError(f"step {record.n} has no instants")
    made = events.Step(_instant(began, record.begin), _in(record.n, "step", -1, 1 << 40))
    for name, offset in zip(OFFSETS, offsets, strict=False):
        setattr(made, name, offset)
    for name, value in zip(GAUGES, record.gauges, strict=False):
        setattr(made, name, _count(value))
    made.tokens = _count(record.tokens)
    made.joined, made.left = pack_u32(record.joined), pack_u32(record.left)
    made.odd = pack_u32([value for triple in record.odd for value in triple])
    made.timing = record.timing if record.timing in (0, 1, 2, 3) else 0
    made.wait = min(max(-1, record.wait), _LATEST)
    made.graph = record.graph if record.graph in (0, 1, 2) else 0
    return made


def _instant(began: int, offset: int) -> int:
    if not -began <= offset <= _LATEST:
        raise ValueError(f"no such instant: {offset}")
    return began + offset


def _count(value: int) -> int:
    return max(-1, min(value, 1 << 61))


def _in(value: int, what: str, low: int, high: int = 0xFFFF_FFFF) -> int:
    if not low <= value <= high:
        raise ValueError(f"no such {what}: {value}")
    return value

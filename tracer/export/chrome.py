"""A trace as Chrome's JSON trace events: opens in Perfetto's viewer, trace_processor and
``chrome://tracing``, needs no further package, and can be imported again
(`tracer.export.imports.chrome`).

Each line is an event. Requests are threads of a made-up process, since the format has no other
tracks; times are µs with three decimals since the first event of the trace, so that they stay
exact. Text is UTF-8: trace_processor does not undo JSON's escapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from engine_hooks.protocol.events import NOT_MEASURED, Step
from tracer.export.chrome_records import (
    GAUGES,
    MILESTONES,
    OFFSETS,
    SAME_NAMES,
    VERSION,
    CoverageRecord,
    FileRecord,
    PreemptionRecord,
    RequestRecord,
    SourceRecord,
    StepRecord,
)
from tracer.export.fields import fields
from tracer.export.timeline import Group, Slice, Track, timeline
from tracer.export.whole import RequestRow, StepRow, Whole, passes_without_tokens
from tracer.format.text import clean
from tracer.state.request.request import Request, Span
from tracer.state.trace_state import TraceState


def chrome_lines(whole: Whole, state: TraceState) -> Iterator[bytes]:
    writer = _Writer(whole)
    yield b'{"traceEvents":[\n'
    comma = b""
    for rank, group in enumerate(timeline(whole), 1):
        for event in writer.group(group, rank):
            yield comma + _json(event)
            comma = b",\n"
    record = msgspec.to_builtins(_file_record(whole, state))
    yield b'\n],\n"displayTimeUnit":"ms",\n"otherData":' + _json({"tracer": record}) + b"}\n"


def _json(node: dict[str, Any]) -> bytes:
    return json.dumps(node, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


class _Writer:
    def __init__(self, whole: Whole) -> None:
        self._began = whole.began
        self._records = _step_records(whole)
        self._threads = 0

    def group(self, group: Group, pid: int) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": group.name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for counter in group.counters:
            for t, value in counter.points:
                place = {"ph": "C", "pid": pid, "ts": self._us(t)}
                yield {**place, "name": counter.name, "args": {"value": value}}
        for track in group.tracks:
            yield from self._track(track, pid)

    def _track(self, track: Track, pid: int) -> Iterator[dict[str, Any]]:
        for lane in track.lanes:
            self._threads += 1
            place: dict[str, Any] = {"pid": pid, "tid": self._threads}
            order = {"sort_index": self._threads}
            yield {"ph": "M", **place, "name": "thread_name", "args": {"name": track.name}}
            yield {"ph": "M", **place, "name": "thread_sort_index", "args": order}
            for item in lane:
                yield from self._slice(item, place)

    def _slice(self, item: Slice, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        arguments = dict(item.arguments)
        record: RequestRecord | StepRecord | None = None
        if isinstance(item.row, RequestRow):
            record = _request_record(item.row, self._began)
        elif isinstance(item.row, StepRow):
            record = self._records[item.row.view.source, item.row.view.n]
        if record is not None:
            arguments["tracer"] = msgspec.to_builtins(record)
        begin = self._us(item.begin)
        yield {
            "ph": "X",
            **place,
            "ts": begin,
            "dur": (item.end - item.begin) / 1000,
            "name": item.name,
            "cat": item.category,
            "args": arguments,
        }
        flow = {**place, "ts": begin, "name": "gives", "cat": "flow"}
        for number in item.flows_in:
            yield {"ph": "f", "bp": "e", **flow, "id": number}
        for number in item.flows_out:
            yield {"ph": "s", **flow, "id": number}

    def _us(self, t: int) -> float:
        return (t - self._began) / 1000


def _file_record(whole: Whole, state: TraceState) -> FileRecord:
    sources = []
    for name, source in state.sources.items():
        header, engine = source.header, source.engine
        record = SourceRecord(clean(name), gone=clean(source.gone or ""))
        if header is not None:
            record.title, record.role = clean(header.title), clean(header.role)
            record.pid = header.pid
        for key, value in ({} if engine is None else msgspec.structs.asdict(engine)).items():
            if key != "t" and value not in (NOT_MEASURED, ""):
                record.engine[key] = clean(value) if isinstance(value, str) else int(value)
        record.coverage = [
            CoverageRecord(row.stage.value, row.status.value, clean(row.hook), clean(row.reason))
            for row in source.coverage_rows()
        ]
        sources.append(record)
    wall = -1 if whole.anchor is None else whole.wall(whole.began)
    return FileRecord(VERSION, whole.began, wall, whole.now - whole.began, sources)


def _request_record(row: RequestRow, began: int) -> RequestRecord:
    record = row.record
    instants = {name: getattr(record, name) for name in MILESTONES}
    offline = not record.lost and record.released is None
    if record.closed is None and record.over is not None and offline:
        # offline, and nobody told that its blocks were given back
        instants["closed"] = record.over
    return RequestRecord(
        key=row.place + 1,
        source=clean(record.engine or record.keys[0][0]),
        rid=clean(row.view.rid or row.view.id),
        milestones={name: t - began for name, t in instants.items() if t is not None},
        output_tokens=record.final_tokens,
        preemptions=[
            PreemptionRecord(
                item.begin - began,
                clean(item.kind),
                item.computed,
                -1 if item.resumed is None else item.resumed - began,
                item.cached,
            )
            for item in record.preemptions
        ],
        prompt_text=clean(row.prompt_text or "", keep_newlines=True),
        output_text=clean(row.output_text or "", keep_newlines=True),
        **fields(record, SAME_NAMES),
    )


def _step_records(whole: Whole) -> dict[tuple[str, int], StepRecord]:
    """Each step as a delta of who took part in it, whether or not what it gave was thrown away
    later."""
    members: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    for row in whole.requests:
        for run in _runs(row.record):
            for index in range(run.first, run.last + 1):
                taken = members.setdefault((id(row.record.batch), index), {})
                taken[row.place + 1] = run.scheduled, run.produced
    made: dict[tuple[str, int], StepRecord] = {}
    for source, batch in whole.batches.items():
        before: set[int] = set()
        for index, step in enumerate(batch.history.steps, batch.history.base):
            taken = members.get((id(batch), index), {})
            record = _step_record(source, step, whole.began)
            record.joined, record.left = (
                sorted(taken.keys() - before),
                sorted(before - taken.keys()),
            )
            record.odd = [(key, *part) for key, part in sorted(taken.items()) if part != (1, 1)]
            made[source, step.n] = record
            before = set(taken)
    return made


def _runs(record: Request) -> Iterator[Span]:
    """The steps that a request took part in, as far as they are kept."""
    yield from record.spans
    if record.open_since >= 0 and record.batch is not None:
        yield Span(record.open_since, record.batch.history.last_index, 1, 1)
    yield from passes_without_tokens(record)


def _step_record(source: str, step: Step, began: int) -> StepRecord:
    return StepRecord(
        clean(source),
        step.n,
        step.t - began,
        [getattr(step, name) for name in OFFSETS],
        gauges=[getattr(step, name) for name in GAUGES],
        **fields(step, "batch tokens timing wait graph"),
    )

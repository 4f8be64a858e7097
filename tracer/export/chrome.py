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
from typing import Any, Final

import msgspec

from engine_hooks.protocol.events import NOT_MEASURED, Step
from tracer.export.chrome_records import (
    MILESTONES,
    OFFSETS,
    VERSION,
    CoverageRecord,
    FileRecord,
    PreemptionRecord,
    RequestRecord,
    SourceRecord,
    StepRecord,
)
from tracer.export.timeline import Group, Slice, Track, timeline
from tracer.export.whole import RequestRow, StepRow, Whole
from tracer.format.text import clean
from tracer.state.trace_state import TraceState

_GAUGES: Final = ("used", "cached", "free", "waiting", "running", "preempted")


def chrome_lines(whole: Whole, state: TraceState) -> Iterator[bytes]:
    """The file in pieces."""
    writer = _Writer(whole)
    yield b'{"traceEvents":[\n'
    groups = timeline(whole)
    comma = b""
    for rank, group in enumerate(groups, 1):
        for event in writer.group(group, rank):
            yield comma + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(
                "utf-8"
            )
            comma = b",\n"
    record = msgspec.to_builtins(_file_record(whole, state))
    tail = json.dumps({"tracer": record}, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    yield b'\n],\n"displayTimeUnit":"ms",\n"otherData":' + tail + b"}\n"


class _Writer:
    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._began = whole.began
        self._records = _step_records(whole)
        self._threads = 0

    def group(self, group: Group, pid: int) -> Iterator[dict[str, Any]]:
        """A group as a process."""
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": group.name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for counter in group.counters:
            for t, value in counter.points:
                yield {
                    "ph": "C",
                    "pid": pid,
                    "ts": self._us(t),
                    "name": counter.name,
                    "args": {"value": value},
                }
        for track in group.tracks:
            yield from self._track(track, pid)

    def _track(self, track: Track, pid: int) -> Iterator[dict[str, Any]]:
        for lane in track.lanes:
            self._threads += 1
            place: dict[str, Any] = {"pid": pid, "tid": self._threads}
            yield {"ph": "M", **place, "name": "thread_name", "args": {"name": track.name}}
            yield {
                "ph": "M",
                **place,
                "name": "thread_sort_index",
                "args": {"sort_index": self._threads},
            }
            for item in lane:
                yield from self._slice(item, place)

    def _slice(self, item: Slice, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        arguments = dict(item.arguments)
        made: dict[str, Any] = {
            "ph": "X",
            **place,
            "ts": self._us(item.begin),
            "dur": _us(item.end - item.begin),
            "name": item.name,
            "cat": item.category,
            "args": arguments,
        }
        record: RequestRecord | StepRecord | None = None
        if isinstance(item.row, RequestRow):
            record = _request_record(item.row, self._began)
        elif isinstance(item.row, StepRow):
            record = self._records[item.row.view.source, item.row.view.n]
        if record is not None:
            arguments["tracer"] = msgspec.to_builtins(record)
        yield made
        flow = {**place, "ts": made["ts"], "name": "gives", "cat": "flow"}
        for number in item.flows_in:
            yield {"ph": "f", "bp": "e", **flow, "id": number}
        for number in item.flows_out:
            yield {"ph": "s", **flow, "id": number}

    def _us(self, t: int) -> float:
        return _us(t - self._began)


def _us(ns: int) -> float:
    return ns / 1000


# --- for the way back -----------------------------------------------------------------------------


def _file_record(whole: Whole, state: TraceState) -> FileRecord:
    sources = []
    for name, source in state.sources.items():
        header, engine = source.header, source.engine
        facts = {} if engine is None else msgspec.structs.asdict(engine)
        told = {
            key: clean(value) if isinstance(value, str) else int(value)
            for key, value in facts.items()
            if key != "t" and value not in (NOT_MEASURED, "")
        }
        rows = [
            CoverageRecord(row.stage.value, row.status.value, clean(row.hook), clean(row.reason))
            for row in source.coverage_rows()
        ]
        sources.append(
            SourceRecord(
                clean(name),
                clean(header.title) if header else "",
                clean(header.role) if header else "",
                header.pid if header else 0,
                told,
                rows,
                clean(source.gone or ""),
            )
        )
    wall = -1 if whole.anchor is None else whole.wall(whole.began)
    return FileRecord(VERSION, whole.began, wall, whole.now - whole.began, sources)


def _request_record(row: RequestRow, began: int) -> RequestRecord:
    record = row.record
    milestones = {
        name: value - began for name in MILESTONES if (value := getattr(record, name)) is not None
    }
    if (
        record.closed is None
        and record.over is not None
        and not record.lost
        and record.released is None
    ):
        # offline, and nobody told that its blocks were given back
        milestones["closed"] = record.over - began
    return RequestRecord(
        key=row.place + 1,
        source=clean(record.engine or record.keys[0][0]),
        rid=clean(row.view.rid or row.view.id),
        milestones=milestones,
        route=clean(record.route),
        client_id=clean(record.client_id),
        tenant=clean(record.tenant),
        model=clean(record.model),
        messages=record.messages,
        logprobs=record.logprobs,
        streaming=record.streaming,
        offline=record.offline,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        max_tokens=record.max_tokens,
        output_tokens=record.final_tokens,
        finish_reason=clean(record.finish_reason),
        error=clean(record.error),
        prompt_chars=record.prompt_chars,
        body_bytes=record.body_bytes,
        status_code=record.status_code,
        disconnected=record.disconnected,
        sent_bytes=record.sent_bytes,
        sent_chunks=record.sent_chunks,
        sent_tokens=record.sent_tokens,
        sent_work=record.sent_work,
        freed=record.freed,
        kept=record.kept,
        blocks=record.blocks,
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
    )


def _step_records(whole: Whole) -> dict[tuple[str, int], StepRecord]:
    """Each step as a delta of who took part in it, whether or not what it gave was thrown away
    later."""
    parts: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    for row in whole.requests:
        record = row.record
        if record.batch is None:
            continue
        engine = id(record.batch)
        runs = [(span.first, span.last, span.scheduled, span.produced) for span in record.spans]
        if record.open_since >= 0:
            runs.append((record.open_since, record.batch.history.last_index, 1, 1))
        runs += [
            (item.step, item.step, item.scheduled, 0)
            for item in (*record.passes, *record.redo)
            if isinstance(item.step, int) and not item.produced
        ]
        for first, last, scheduled, produced in runs:
            for index in range(first, last + 1):
                parts.setdefault((engine, index), {})[row.place + 1] = (scheduled, produced)
    made: dict[tuple[str, int], StepRecord] = {}
    for source, batch in whole.batches.items():
        before: set[int] = set()
        history = batch.history
        for place, step in enumerate(history.steps):
            members = parts.get((id(batch), history.base + place), {})
            made[source, step.n] = _step_record(source, step, members, before, whole.began)
            before = set(members)
    return made


def _step_record(
    source: str, step: Step, members: dict[int, tuple[int, int]], before: set[int], began: int
) -> StepRecord:
    return StepRecord(
        clean(source),
        step.n,
        step.t - began,
        [getattr(step, name) for name in OFFSETS],
        step.batch,
        step.tokens,
        sorted(members.keys() - before),
        sorted(before - members.keys()),
        [(key, *part) for key, part in sorted(members.items()) if part != (1, 1)],
        [getattr(step, name) for name in _GAUGES],
        step.timing,
        step.wait,
        step.graph,
    )

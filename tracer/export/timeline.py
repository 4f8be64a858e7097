"""A whole trace as tracks of nested slices, flows and counters: what Perfetto's formats have in
common.

A track's slices nest strictly, as those formats demand; what would overlap without nesting (the
first bytes going out while decode goes on and teardown begins, steps prepared while another runs)
is put on a further lane of the same name. Flows lead from a step to what it gave each of its
requests: a chunk of prefill, or a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import info
from tracer.export.whole import RequestRow, StepRow, Whole
from tracer.format.text import clean
from tracer.state.view import Segment

Value = int | float | str | bool
Arguments = tuple[tuple[str, Value], ...]

_GAUGES: Final = (
    ("batch", "requests"),
    ("step tokens", "tokens"),
    ("running", "requests"),
    ("waiting", "requests"),
    ("KV blocks used", "blocks"),
    ("KV blocks cached", "blocks"),
    ("KV blocks free", "blocks"),
    ("preemptions", ""),
)


@dataclass(slots=True)
class Slice:
    """A stretch of a track (ns). `category`: request, stage, wait, chunk, token, step or phase.
    `flows_in` and `flows_out` are numbers of flows that end and begin here. `row`: what it stands
    for, where it is one."""

    begin: int
    end: int
    name: str
    category: str
    arguments: Arguments = ()
    flows_in: tuple[int, ...] = ()
    flows_out: tuple[int, ...] = ()
    row: RequestRow | StepRow | None = None


@dataclass(slots=True)
class Track:
    """Lanes of slices; in each the slices are in order and nest."""

    name: str
    lanes: list[list[Slice]] = field(default_factory=list)


@dataclass(slots=True)
class Counter:
    """(ns, value) in order."""

    name: str
    unit: str
    points: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """A process of the traced engine, or the requests. Its tracks are made as they are asked for,
    once."""

    name: str
    tracks: Iterable[Track] = ()
    counters: list[Counter] = field(default_factory=list)


def timeline(whole: Whole) -> list[Group]:
    """The requests last: what a flow begins at stands before what it ends at."""
    flows: dict[tuple[int, int], int] = {}
    groups = [
        _engine(whole, name, flows)
        for name in dict.fromkeys(row.view.source for row in whole.steps)
    ]
    return [*groups, _requests(whole, flows)]


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The slices on as few lanes as it takes for them to nest, the outer ones first."""
    found: list[list[Slice]] = []
    open_ends: list[list[int]] = []
    for item in sorted(slices, key=lambda item: (item.begin, -item.end)):
        for lane, ends in zip(found, open_ends, strict=True):
            while ends and ends[-1] <= item.begin:
                ends.pop()
            if not ends or item.end <= ends[-1]:
                lane.append(item)
                ends.append(item.end)
                break
        else:
            found.append([item])
            open_ends.append([item.end])
    return found


# --- engines --------------------------------------------------------------------------------------


def _engine(whole: Whole, source: str, flows: dict[tuple[int, int], int]) -> Group:
    view = next((engine for engine in whole.snapshot.engines if engine.source == source), None)
    facts = () if view is None else (view.name, view.model.rstrip("/").rpartition("/")[2])
    name = source if view is None else f"{view.title} ({' · '.join(filter(None, facts))})"
    counters = [Counter(name, unit) for name, unit in _GAUGES]
    slices: list[Slice] = []
    for place, row in enumerate(whole.steps):
        if row.view.source != source:
            continue
        view_of = row.view
        out = []
        for member in row.members:
            flows[place, member.place] = number = len(flows) + 1
            out.append(number)
        arguments = (
            ("n", view_of.n),
            ("batch", view_of.batch),
            ("tokens", view_of.tokens),
            ("prefill_tokens", view_of.prefill_tokens),
            ("output_tokens", sum(m.produced for m in row.members)),
        )
        slices.append(
            Slice(
                view_of.begin,
                view_of.end,
                f"step {view_of.n}",
                "step",
                arguments,
                (),
                tuple(out),
                row,
            )
        )
        at = view_of.begin
        for part, ms in view_of.parts:
            until = min(view_of.end, at + round(ms * NS_PER_MS))
            slices.append(Slice(at, until, part, "phase"))
            at = until
        gauges = (
            view_of.batch,
            view_of.tokens,
            view_of.running,
            view_of.waiting,
            view_of.used,
            view_of.cached,
            view_of.free,
            row.step.preempted if row.step.preempted >= 0 else None,
        )
        for counter, value in zip(counters, gauges, strict=True):
            if value is not None and (not counter.points or counter.points[-1][1] != value):
                counter.points.append((view_of.begin, value))
    return Group(
        clean(name),
        [Track("steps", lanes(slices))],
        [counter for counter in counters if counter.points],
    )


# --- requests -------------------------------------------------------------------------------------


def _requests(whole: Whole, flows: dict[tuple[int, int], int]) -> Group:
    steps = {(row.view.source, row.view.n): place for place, row in enumerate(whole.steps)}
    tracks = (
        Track(clean(row.view.id), lanes(_request(whole, row, steps, flows)))
        for row in whole.requests
    )
    return Group("requests", tracks, [_in_flight(whole)])


def _request(
    whole: Whole,
    row: RequestRow,
    steps: dict[tuple[str, int], int],
    flows: dict[tuple[int, int], int],
) -> Iterable[Slice]:
    view = row.view
    yield Slice(
        view.received, whole.end(view), _title(row), "request", request_arguments(row), row=row
    )
    for stage in view.stages:
        if stage.begin is None or stage.ms is None:
            continue
        end = stage.begin + round(stage.ms * NS_PER_MS)
        told: list[tuple[str, Value]] = [
            ("stage", stage.stage.value),
            ("status", stage.status.value),
        ]
        if stage.wait_ms is not None:
            told.append(("wait_ms", stage.wait_ms))
        if stage.share is not None:
            told.append(("share", stage.share))
        if stage.reason:
            told.append(("reason", clean(stage.reason)))
        told += [(f"{name}_ms", ms) for name, ms in stage.parts]
        yield Slice(stage.begin, end, info(stage.stage).label, "stage", tuple(told))
    yield from (_wait(segment, whole.now) for segment in view.segments if _inside(segment))
    source = "" if row.record.batch is None else row.record.engine
    arrived: dict[int, int] = {}
    for chunk in view.chunks:
        place = steps.get((source, chunk.step))
        flow = () if place is None else _flow(flows, place, row.place)
        arrived.update(dict.fromkeys(flow, 1))
        arguments = (("step", chunk.step), ("tokens", chunk.tokens))
        yield Slice(chunk.begin, chunk.end, f"chunk of {chunk.tokens}", "chunk", arguments, flow)
    for token in whole.tokens(row):
        place = None if token.step is None else steps.get((token.source, token.step))
        flow = () if place is None else _flow(flows, place, row.place)
        flow = tuple(number for number in flow if not arrived.get(number))
        # several tokens of one step: the flow ends at the first
        arrived.update(dict.fromkeys(flow, 1))
        told = [("number", token.number), ("batch", token.batch)]
        if token.gap_ms is not None:
            told.append(("itl_ms", token.gap_ms))
        yield Slice(token.t, token.t, f"token {token.number}", "token", tuple(told), flow)
    if row.record.batch is not None:
        for index, again in enumerate(row.record.redo, 1):
            step = (
                row.record.batch.history.step(again.step)
                if isinstance(again.step, int)
                else again.step
            )
            place = steps.get((source, step.n))
            flow = () if place is None else _flow(flows, place, row.place)
            end = step.t + max(step.end, step.token, 0)
            told = [("step", step.n), ("tokens", again.scheduled)]
            yield Slice(step.t, end, f"recompute {index}", "chunk", tuple(told), flow)


def _flow(flows: dict[tuple[int, int], int], step: int, request: int) -> tuple[int, ...]:
    number = flows.get((step, request))
    return () if number is None else (number,)


def _inside(segment: Segment) -> bool:
    """Waiting inside a stage that is not all waiting."""
    return segment.waiting and info(segment.stage).label != "admission"


def _wait(segment: Segment, now: int) -> Slice:
    end = max(segment.begin, now) if segment.end is None else segment.end
    return Slice(segment.begin, end, "waiting", "wait", (("stage", segment.stage.value),))


def _title(row: RequestRow) -> str:
    view = row.view
    prompt = "?" if view.prompt_tokens is None else f"{view.prompt_tokens:,}"
    return f"{clean(view.id)} {prompt}→{view.output_tokens:,}"


def request_arguments(row: RequestRow) -> Arguments:
    """What is known of a request beyond its stages, cleaned; what is not known is left out."""
    view = row.view
    told: list[tuple[str, Value | None]] = [
        ("id", view.id),
        ("rid", view.rid),
        ("phase", view.phase.value),
        ("route", view.route),
        ("client_id", view.client_id),
        ("tenant", view.tenant),
        ("model", view.model),
        ("finish_reason", view.finish_reason),
        ("error", view.error),
        ("prompt_tokens", view.prompt_tokens),
        ("cached_tokens", view.cached_tokens),
        ("output_tokens", view.output_tokens),
        ("max_tokens", view.max_tokens),
        ("status_code", view.status_code),
        ("streaming", view.streaming),
        ("incomplete", view.incomplete or None),
        ("disconnected", view.disconnected or None),
        ("preemptions", view.preemptions),
        ("recomputed_tokens", view.recomputed_tokens),
        ("blocks", view.blocks),
        ("queue_ms", view.queue_ms),
        ("prefill_ms", view.prefill_ms),
        ("ttft_ms", view.ttft_ms),
        ("engine_ttft_ms", view.engine_ttft_ms),
        ("tpot_ms", view.tpot_ms),
        ("e2e_ms", view.e2e_ms),
        ("unattributed_ms", view.unattributed_ms),
        ("prompt_text", row.prompt_text),
        ("output_text", row.output_text),
    ]
    return tuple(
        (
            name,
            clean(value, keep_newlines=name.endswith("_text")) if isinstance(value, str) else value,
        )
        for name, value in told
        if value is not None and value != ""
    )


def _in_flight(whole: Whole) -> Counter:
    """Requests received and not over."""
    counter = Counter("requests in flight", "requests")
    changes = [(row.view.received, 1) for row in whole.requests]
    changes += [(row.view.closed, -1) for row in whole.requests if row.view.closed is not None]
    level = 0
    for t, change in sorted(changes):
        level += change
        if counter.points and counter.points[-1][0] == t:
            counter.points.pop()
        counter.points.append((t, level))
    return counter

"""A whole trace as tracks of nested slices, flows and counters: what Perfetto's formats have in
common.

A track's slices nest strictly, as those formats demand; what would overlap without nesting (the
first bytes going out while decode goes on and teardown begins, steps prepared while another runs)
is put on a further lane of the same name. Flows lead from a step to what it gave each of its
requests: a chunk of prefill, or a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage, info
from tracer.export.fields import fields
from tracer.export.whole import RequestRow, StepRow, Whole
from tracer.format.figures import count
from tracer.format.text import clean

Value = int | float | str | bool
Arguments = tuple[tuple[str, Value], ...]

_GAUGES: Final = {
    "batch": "requests",
    "step tokens": "tokens",
    "running": "requests",
    "waiting": "requests",
    "KV blocks used": "blocks",
    "KV blocks cached": "blocks",
    "KV blocks free": "blocks",
    "preemptions": "",
}
"""Counters of an engine and their units, in the order of `_gauges`."""


@dataclass(slots=True)
class Slice:
    """A stretch of a track (ns). `category`: request, stage, wait, chunk, token, step or phase.
    `flows_in` and `flows_out` are numbers of flows that end and begin here. `row`: the request or
    step that it stands for."""

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
    lanes: list[list[Slice]]


@dataclass(slots=True)
class Counter:
    """(ns, value) in order."""

    name: str
    unit: str
    points: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """A process of the traced engine, or the requests. `tracks` can be walked once: they are made
    as they are asked for."""

    name: str
    tracks: Iterable[Track]
    counters: list[Counter]


def timeline(whole: Whole) -> list[Group]:
    """Return the engines, then the requests: a flow's start stands before its end."""
    sources = dict.fromkeys(row.view.source for row in whole.steps)
    flows = _Flows(whole)
    return [*(_engine(whole, name, flows) for name in sources), _requests(whole, flows)]


class _Flows:
    """Numbers of the flows, one for each request in each step."""

    def __init__(self, whole: Whole) -> None:
        self._places = {(row.view.source, row.view.n): at for at, row in enumerate(whole.steps)}
        self._numbers: dict[tuple[int, int], int] = {}

    def start(self, step: StepRow) -> tuple[int, ...]:
        """Return new numbers, one for each member of a step."""
        place = self._places[step.view.source, step.view.n]
        first = len(self._numbers) + 1
        for number, member in enumerate(step.members, first):
            self._numbers[place, member.place] = number
        return tuple(range(first, first + len(step.members)))

    def end(self, source: str, step: int | None, request: int) -> tuple[int, ...]:
        """Return the number of the flow that leads to a request, empty where there is none."""
        place = None if step is None else self._places.get((source, step))
        number = None if place is None else self._numbers.get((place, request))
        return () if number is None else (number,)


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Return the slices on as few lanes as it takes for them to nest, the outer ones first."""
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


def _engine(whole: Whole, source: str, flows: _Flows) -> Group:
    view = whole.engine(source)
    facts = () if view is None else (view.name, view.model.rstrip("/").rpartition("/")[2])
    name = source if view is None else f"{view.title} ({' · '.join(filter(None, facts))})"
    rows = [row for row in whole.steps if row.view.source == source]
    counters = [Counter(name, unit) for name, unit in _GAUGES.items()]
    slices: list[Slice] = []
    for row in rows:
        slices += _step(row, flows.start(row))
        for counter, value in zip(counters, _gauges(row), strict=True):
            if value is not None and (not counter.points or counter.points[-1][1] != value):
                counter.points.append((row.view.begin, value))
    told = [counter for counter in counters if counter.points]
    return Group(clean(name), [Track("steps", lanes(slices))], told)


def _step(row: StepRow, flows: tuple[int, ...]) -> Iterator[Slice]:
    view = row.view
    arguments = (
        *fields(view, "n batch tokens prefill_tokens").items(),
        ("output_tokens", row.output_tokens),
    )
    name = f"step {view.n}"
    yield Slice(view.begin, view.end, name, "step", arguments, flows_out=flows, row=row)
    at = view.begin
    for part, ms in view.parts:
        until = min(view.end, at + round(ms * NS_PER_MS))
        yield Slice(at, until, part, "phase")
        at = until


def _gauges(row: StepRow) -> tuple[int | None, ...]:
    view, preempted = row.view, row.step.preempted
    return (view.batch, view.tokens, view.running, view.waiting, view.used, view.cached, view.free,
            preempted if preempted >= 0 else None)  # fmt: skip


def _requests(whole: Whole, flows: _Flows) -> Group:
    tracks = (
        Track(clean(row.view.id), lanes(_request(whole, row, flows))) for row in whole.requests
    )
    level = Counter("requests in flight", "requests", whole.in_flight())
    return Group("requests", tracks, [level])


def _request(whole: Whole, row: RequestRow, flows: _Flows) -> Iterator[Slice]:
    view = row.view
    end = whole.end(view)
    yield Slice(view.received, end, _title(row), "request", request_arguments(row), row=row)
    for stage, begin, end in whole.stages(view):
        told = {"stage": stage.stage.value, **fields(stage, "status wait_ms share reason")}
        told |= {f"{name}_ms": ms for name, ms in stage.parts}
        yield Slice(begin, end, info(stage.stage).label, "stage", _known(told))
    for segment, end in whole.segments(view):
        # admission is all waiting
        if segment.waiting and segment.stage is not Stage.ADMISSION:
            at = ("stage", segment.stage.value)
            yield Slice(segment.begin, end, "waiting", "wait", (at,))
    yield from _passes(whole, row, flows)


def _passes(whole: Whole, row: RequestRow, flows: _Flows) -> Iterator[Slice]:
    """Chunks, tokens and recomputed passes, each with the flow of its step. Of several tokens of
    one step the flow ends at the first."""
    record = row.record
    source = "" if record.batch is None else record.engine
    arrived: set[int] = set()
    for chunk in row.view.chunks:
        flow = flows.end(source, chunk.step, row.place)
        arrived.update(flow)
        told = _known({"step": chunk.step, "tokens": chunk.tokens})
        yield Slice(chunk.begin, chunk.end, f"chunk of {chunk.tokens}", "chunk", told, flow)
    for token in whole.tokens(row):
        flow = flows.end(token.source, token.step, row.place)
        flow = () if arrived.issuperset(flow) else flow
        arrived.update(flow)
        told = _known({"number": token.number, "batch": token.batch, "itl_ms": token.gap_ms})
        yield Slice(token.t, token.t, f"token {token.number}", "token", told, flow)
    if record.batch is None:
        return
    for index, again in enumerate(record.redo, 1):
        step = record.batch.history.step(again.step) if isinstance(again.step, int) else again.step
        flow = flows.end(source, step.n, row.place)
        end = step.t + max(step.end, step.token, 0)
        told = _known({"step": step.n, "tokens": again.scheduled})
        yield Slice(step.t, end, f"recompute {index}", "chunk", told, flow)


def _title(row: RequestRow) -> str:
    view = row.view
    return f"{clean(view.id)} {count(view.prompt_tokens)}→{view.output_tokens:,}"


def request_arguments(row: RequestRow) -> Arguments:
    """Return what is known of a request beyond its stages, cleaned."""
    told = fields(
        row.view,
        "id rid phase route client_id tenant model finish_reason error prompt_tokens cached_tokens "
        "output_tokens max_tokens status_code streaming incomplete disconnected preemptions "
        "recomputed_tokens blocks queue_ms prefill_ms ttft_ms engine_ttft_ms tpot_ms e2e_ms "
        "unattributed_ms",
    )
    for name in ("incomplete", "disconnected"):
        told[name] = told[name] or None
    for name, text in row.texts():
        told[name] = clean(text, keep_newlines=True)
    return _known(told)


def _known(told: dict[str, Value | None]) -> Arguments:
    return tuple((name, value) for name, value in told.items() if value is not None and value != "")

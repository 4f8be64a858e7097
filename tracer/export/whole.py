"""A whole trace as rows: every request, every step with its members, every output token. What the
exporters write.

Rows come from a state that has kept everything (`tracer.cli.export.read_whole` folds a file so), or
from the one of a live process as far as it goes back. Their sums are the state's: an exporter that
writes all rows has written the totals. Text from requests, models and hosts is not cleaned here:
the exporters clean it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.events import Step
from engine_hooks.protocol.stages import Stage
from tracer.state.overview import step_view
from tracer.state.request import decode, latency
from tracer.state.request.request import Request, Span
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, RequestView, Segment, Snapshot, StageView, StepView

MOST: Final = 1 << 40
"""How much a state keeps that is to be exported: all of it."""
LARGEST: Final = (1 << 63) - 1
"""The largest integer that the formats hold."""


class Member(NamedTuple):
    """A request's part in a step: `place` in `Whole.requests`, tokens that it got."""

    place: int
    produced: int


class Token(NamedTuple):
    """One output token. `number` counts from 1; `t` when it was known (ns); `gap_ms` since the one
    before, None for the first; `batch` members of its step; `step` its number and `source` whose,
    None and empty where it is not kept."""

    number: int
    t: int
    gap_ms: float | None
    batch: int
    step: int | None
    source: str


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request: what the state shows of it, and the record behind that."""

    place: int
    view: RequestView
    record: Request
    prompt_text: str | None = None
    output_text: str | None = None
    """Text, None unless it was asked for and is known."""

    def texts(self) -> list[tuple[str, str]]:
        """Return what is known of both, as ``prompt_text`` and ``output_text``."""
        both = (("prompt_text", self.prompt_text), ("output_text", self.output_text))
        return [(name, text) for name, text in both if text is not None]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the engine `view.source`. `t_token`: when its tokens were known (ns)."""

    view: StepView
    step: Step
    t_token: int
    members: list[Member]

    @property
    def output_tokens(self) -> int:
        return sum(member.produced for member in self.members)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the rows. `prompt_tokens` and `output_tokens`: of the requests; `tokens`: output
    tokens whose instant is known; `stage_ms`: of each stage over the requests in which it has a
    length."""

    requests: int
    finished: int
    prompt_tokens: int
    output_tokens: int
    tokens: int
    steps: int
    stage_ms: dict[Stage, float]


class Whole:
    """See the module. `name` is what the trace is called; `request` keeps one request (by any of
    its ids) and the steps that it took part in; without `with_text` no row has text.

    Raises:
        LookupError: There is no such request.
    """

    def __init__(
        self, state: TraceState, name: str, *, with_text: bool = False, request: str | None = None
    ) -> None:
        self.name = name
        self.with_text = with_text
        self.snapshot: Snapshot = state.snapshot(window_s=math.inf)
        self.began, self.now = self.snapshot.began, self.snapshot.now
        """First instant of the trace, and last, where whatever still runs has got to (ns)."""
        chosen = None if request is None else state.requests.find(request)
        if request is not None and chosen is None:
            raise LookupError(request)
        self.requests: list[RequestRow] = []
        for record, view in zip(list(state.requests.order), self.snapshot.requests, strict=True):
            if chosen is None or record is chosen:
                prompt = record.prompt_text if with_text else None
                output = "".join(record.output) if with_text and record.output else None
                self.requests.append(RequestRow(len(self.requests), view, record, prompt, output))
        sources = state.sources.values()
        self.batches = {source.name: source.batch for source in sources if source.batch.count}
        self._sources = {id(batch): name for name, batch in self.batches.items()}
        self.headers = {s.name: s.header for s in sources if s.header is not None}
        self.anchor = next((header.anchor for header in self.headers.values()), None)
        self.steps: list[StepRow] = self._steps(state, chosen is not None)

    @property
    def has_text(self) -> bool:
        return any(row.texts() for row in self.requests)

    def wall(self, t: int) -> int:
        """Return the wall time of the instant `t` in ns since the epoch; counted from the epoch
        where no process told it. No clock of a file's making leaves the range that files can
        hold."""
        return min(max(0, t if self.anchor is None else self.anchor.to_wall(t)), LARGEST)

    def engine(self, source: str) -> EngineView | None:
        return next((engine for engine in self.snapshot.engines if engine.source == source), None)

    def end(self, view: RequestView) -> int:
        """Return where a request ends, or has got to (ns)."""
        if view.closed is None:
            return max(view.received, self.now)
        if view.e2e_ms is not None:
            return view.received + round(view.e2e_ms * NS_PER_MS)
        return max(view.received, view.closed)

    def length_ms(self, view: RequestView) -> float:
        """Return E2E, or the time so far."""
        if view.e2e_ms is not None:
            return view.e2e_ms
        return (self.end(view) - view.received) / NS_PER_MS

    def stages(self, view: RequestView) -> Iterator[tuple[StageView, int, int]]:
        """Iterate over the stages that have a length, with where they begin and end (ns)."""
        for stage in view.stages:
            if stage.begin is not None and stage.ms is not None:
                yield stage, stage.begin, stage.begin + round(stage.ms * NS_PER_MS)

    def segments(self, view: RequestView) -> Iterator[tuple[Segment, int]]:
        """Iterate over the pieces of a request's bar, with where they end or have got to (ns)."""
        for segment in view.segments:
            yield segment, max(segment.begin, self.now if segment.end is None else segment.end)

    def in_flight(self) -> list[tuple[int, int]]:
        """Return how many requests were received and not over: (ns, level) at each change."""
        changes = [(row.view.received, 1) for row in self.requests]
        changes += [(row.view.closed, -1) for row in self.requests if row.view.closed is not None]
        levels: dict[int, int] = {}
        level = 0
        for t, change in sorted(changes):
            level += change
            levels[t] = level
        return list(levels.items())

    def totals(self) -> Totals:
        views = [row.view for row in self.requests]
        return Totals(
            requests=len(views),
            finished=sum(view.closed is not None for view in views),
            prompt_tokens=sum(view.prompt_tokens or 0 for view in views),
            output_tokens=sum(view.output_tokens for view in views),
            tokens=sum(len(decode.token_times(row.record)[0]) for row in self.requests),
            steps=len(self.steps),
            stage_ms={
                stage: math.fsum(view.stages[stage - 1].ms or 0.0 for view in views)
                for stage in Stage
            },
        )

    def tokens(self, row: RequestRow) -> Iterator[Token]:
        """Iterate over the output tokens of a request whose instants are known, in order."""
        record, batch = row.record, row.record.batch
        times, batches = decode.token_times(record)
        gaps = latency.itl(times)
        source = self._sources.get(id(batch), "")
        told: list[int] = []
        if batch is not None:
            for span in decode.spans(record):
                for index in range(span.first, span.last + 1):
                    told += [batch.history.step(index).n] * span.produced
        numbers: list[int | None] = [None] * (len(times) - len(told)) + told
        for place, (t, size, number) in enumerate(zip(times, batches, numbers, strict=True)):
            gap = gaps[place - 1] / NS_PER_MS if place else None
            yield Token(place + 1, t, gap, size, number, source if number is not None else "")

    def _steps(self, state: TraceState, only_taken_part: bool) -> list[StepRow]:
        """All steps in order of time, with who took part in them."""
        members: dict[tuple[int, int], list[Member]] = {}
        for row in self.requests:
            batch = id(row.record.batch)
            for span in (*decode.spans(row.record), *passes_without_tokens(row.record)):
                for index in range(span.first, span.last + 1):
                    member = Member(row.place, span.produced)
                    members.setdefault((batch, index), []).append(member)
        rows: list[StepRow] = []
        for source in state.sources.values():
            history = source.batch.history
            for place, step in enumerate(history.steps):
                took_part = members.get((id(source.batch), history.base + place), [])
                if took_part or not only_taken_part:
                    view = step_view(
                        source.name, step, history.sizes[place], history.prefills[place]
                    )
                    rows.append(StepRow(view, step, history.tokens[place], took_part))
        rows.sort(key=lambda row: row.step.t)
        return rows


def passes_without_tokens(record: Request) -> Iterator[Span]:
    """Iterate over the passes of a request that gave no token (chunks of prefill, tokens computed
    again) and whose step is still kept."""
    for item in (*record.passes, *record.redo):
        if isinstance(item.step, int) and not item.produced:
            yield Span(item.step, item.step, item.scheduled, 0)

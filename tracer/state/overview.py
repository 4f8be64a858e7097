"""The parts of a snapshot that are not single requests: engines, context, timers, losses, steps,
the block map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Step
from tracer.state.engine.admission import Room, bound_by, explain, in_line
from tracer.state.engine.step_history import PARTS, divide, token_instant
from tracer.state.metrics.numbers import Ask
from tracer.state.metrics.numbers_query import numbers
from tracer.state.metrics.rates import per_second
from tracer.state.request.request import Request
from tracer.state.view import Context, EngineView, Losses, RequestView, Snapshot, StepView, Wait

if TYPE_CHECKING:
    from tracer.state.engine.source import Source
    from tracer.state.fold import Fold


def snapshot(
    state: Fold,
    now: int,
    window_s: float,
    requests: Sequence[RequestView],
    total: int,
    ask: Ask | None = None,
) -> Snapshot:
    """The snapshot at `now` around the requests chosen for it; with the Numbers view if it is asked
    for."""
    table = state.requests
    engines, waits = _engines(state, now)
    anchor = next(
        (source.header.anchor for source in state.sources.values() if source.header is not None),
        None,
    )
    live = len(table.live)
    rows = [row for source in state.sources.values() for row in source.coverage_rows()]
    traced = next((source for source in state.sources.values() if source.blocks.traced), None)
    pool = traced.engine.num_blocks if traced is not None and traced.engine is not None else None
    return Snapshot(
        now=now,
        began=state.began,
        wall=None if anchor is None else anchor.to_wall(now),
        context=_context(state, now, window_s),
        engines=engines,
        timers=state.timers.quantiles(now, window_s),
        requests=requests,
        total=total,
        live=live,
        finished=table.finished_total,
        failed=state.totals.failed(),
        losses=_losses(state, now),
        coverage=tuple(sorted(rows, key=lambda row: (row.stage, row.source))),
        steps=StepWindow([source for source in state.sources.values() if source.batch.count]),
        kv_blocks=traced.blocks.bytes(pool) if traced is not None else b"",
        kv_since=traced.blocks.since() if traced is not None else b"",
        waits=waits,
        numbers=None if ask is None else numbers(state, now, window_s, ask, engines),
    )


def _engines(state: Fold, now: int) -> tuple[tuple[EngineView, ...], tuple[Wait, ...]]:
    """Every process, and who waits at which of them. What is on its way to a queue stands at the
    end of the only engine's line, and in one of its own where it is not known which engine it goes
    to."""
    live: dict[str, list[Request]] = {name: [] for name in state.sources}
    for request in state.requests.live.values():
        if request.engine in live:
            live[request.engine].append(request)
    engaged = [
        source for source in state.sources.values() if source.batch.count or live[source.name]
    ]
    coming = [request for request in state.requests.live.values() if not request.engine]
    views: list[EngineView] = []
    waits: list[Wait] = []
    for source in state.sources.values():
        mine = live[source.name]
        view = source.view(now, mine, state.totals.mean_tokens(source.name))
        line = source.waits(view, [*mine, *coming] if engaged == [source] else mine)
        views.append(replace(view, bound_by=bound_by(view, line[0] if line else None)))
        waits += line
    if len(engaged) != 1:
        waits += explain(in_line(coming), "", Room())
    return tuple(views), tuple(waits)


def _context(state: Fold, now: int, window_s: float) -> Context:
    window = NS_PER_S * 60 if math.isnan(window_s) else int(min(max(window_s, 0.0), 1e9) * NS_PER_S)
    span = min(window, max(0, now - state.began))
    (received,) = state.received.over(now, window)
    prompt, cached = state.scheduled.over(now, window)
    (produced,) = state.produced.over(now, window)
    return Context(
        request_rate=per_second(received, span),
        concurrency=len(state.requests.live),
        prefix_caching=_switch(state, "prefix_caching"),
        chunked_prefill=_switch(state, "chunked_prefill"),
        window_s=window_s,
        tokens_in=per_second(prompt, span),
        tokens_out=per_second(produced, span),
        hit_share=cached / prompt if prompt else None,
    )


def _switch(state: Fold, name: str) -> bool | None:
    """A setting that qualifies all figures: of the first engine that tells it."""
    for source in state.sources.values():
        value = getattr(source.engine, name, -1)
        if value >= 0:
            return bool(value)
    return None


def _losses(state: Fold, now: int) -> Losses:
    table = state.requests
    sources = state.sources.values()
    return Losses(
        events=sum(source.missing for source in sources),
        unknown=state.unknown,
        set_aside=state.set_aside(now),
        incomplete_requests=table.over_incomplete
        + table.dropped_incomplete
        + sum(1 for request in table.live.values() if request.incomplete),
        hook_faults=tuple(line for source in sources for line in source.fault_lines()),
        sources_gone=tuple(
            f"{(source.header.title if source.header else '') or source.name}: {source.gone}"
            for source in sources
            if source.gone is not None
        ),
    )


class StepWindow(Sequence[StepView]):
    """The steps that are kept, oldest first; a view is only made of those that are looked at.

    It holds on to the steps themselves, which never change, so it stays what it was when it was
    made.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._parts = [
            (source.name, history.steps[:], history.sizes[:], history.prefills[:])
            for source in sources
            for history in (source.batch.history,)
        ]
        self._merged: list[tuple[int, int, int]] | None = None
        self._size = sum(len(steps) for _, steps, _, _ in self._parts)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> StepView: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepView, ...]: ...
    def __getitem__(self, index: int | slice) -> StepView | tuple[StepView, ...]:
        if isinstance(index, slice):
            return tuple([self[at] for at in range(*index.indices(self._size))])
        if not -self._size <= index < self._size:
            raise IndexError("no such step")
        at = index % self._size
        if len(self._parts) == 1:
            part, place = 0, at
        else:
            if self._merged is None:  # several engines: by time
                self._merged = sorted(
                    (step.t, part, place)
                    for part, (_, steps, _, _) in enumerate(self._parts)
                    for place, step in enumerate(steps)
                )
            _, part, place = self._merged[at]
        source, steps, sizes, prefills = self._parts[part]
        return step_view(source, steps[place], sizes[place], prefills[place])


def step_view(source: str, step: Step, batch: int, prefill_tokens: int) -> StepView:
    """One step with its phases; `update` is what it did after its tokens were known."""
    token = token_instant(step)
    end = max(token, step.t + step.end)
    parts = dict(zip(PARTS, divide(step, token, step.t, step.t), strict=True))
    parts["update"] = end - token
    return StepView(
        source,
        step.n,
        step.t,
        end,
        batch,
        step.tokens,
        prefill_tokens,
        _known(step.used),
        _known(step.cached),
        _known(step.free),
        max(0, step.waiting),
        max(0, step.running),
        tuple((name, parts[name] / NS_PER_MS) for name in _SHOWN if parts[name]),
    )


_SHOWN = ("schedule", "prepare", "embed", "layers", "head", "sample", "update")


def _known(value: int) -> int | None:
    return None if value < 0 else value

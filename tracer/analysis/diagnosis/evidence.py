"""From a `TraceState` to the evidence that rules look at, collected once.

This is the only file of the diagnosis that reads the internals of `TraceState`; rules are functions
of the `Evidence`. One of a window (`since`) holds the requests that were alive in it and the steps
that fell into it.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import Final, cast

import numpy as np

from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, Ran, Waited, shown
from tracer.analysis.diagnosis.series import Beat, Series
from tracer.analysis.diagnosis.steps import StepTable
from tracer.state.engine.source import Source
from tracer.state.request import decode, latency
from tracer.state.request.request import Pass, Request
from tracer.state.trace_state import TraceState

SLICE: Final = 24
"""Requests that are read at a time by `gather`: a millisecond."""


def collect(state: TraceState, *, since: int | None = None, now: int | None = None) -> Evidence:
    """The evidence in `state` up to `now` (default: its latest event), from `since` on (default:
    all that is kept)."""
    reading = gather(state, since=since, now=now)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return cast(Evidence, done.value)


def gather(
    state: TraceState, *, since: int | None = None, now: int | None = None
) -> Generator[None, None, Evidence]:
    """As `collect`, a little at a time: events may be taken in between. A request is read as it is
    when its turn comes, the steps as they were in the beginning; what a request ran in later ones
    is left out."""
    at = state.now if now is None else max(now, state.began)
    begin = state.began if since is None else max(since, state.began)
    series: Series | None = getattr(state, "series", None)
    sources = dict(state.sources)
    bases: dict[str, int] = {}
    tables: dict[str, StepTable] = {}
    alive = _alive_since(state, since)
    for name, source in sources.items():
        tables[name] = table = _steps(source, begin)
        bases[name] = table.first
    yield
    asked: list[Asked] = []
    for request in alive:
        asked.append(_asked(len(asked), request, series, bases, tables, at))
        if len(asked) % SLICE == 0:
            yield
    by_engine: dict[str, list[Asked]] = {name: [] for name in sources}
    for record in asked:
        by_engine.setdefault(record.engine, []).append(record)
    for name, table in tables.items():
        mine = by_engine.get(name, [])
        for place in range(0, len(mine), 4 * SLICE):
            _fill(table, mine[place : place + 4 * SLICE])
            yield
    facts = [
        _facts(source, tables[name], by_engine[name], series, begin)
        for name, source in sources.items()
    ]
    return Evidence(
        began=begin,
        now=at,
        requests=tuple(asked),
        engines=tuple(fact for fact in facts if len(fact.steps) or fact.requests),
        fronts=tuple(fact for fact in facts if not len(fact.steps) and not fact.requests),
        lost_events=sum(source.missing for source in sources.values()),
        set_aside=state.set_aside(now),
        with_series=series is not None,
        quotes=state.quotes,
    )


def _alive_since(state: TraceState, since: int | None) -> list[Request]:
    """Requests that were alive at `since` or later, in order of receipt."""
    table = state.requests
    if since is None:
        return list(table.order)
    chosen = list(table.live.values())
    for request in reversed(table.over.values()):
        if request.over is not None and request.over < since:
            break
        chosen.append(request)
    chosen.sort(key=lambda request: request.order)
    return chosen


def _steps(source: Source, since: int) -> StepTable:
    history = source.batch.history
    tokens = np.array(history.tokens, np.int64)
    low = int(np.searchsorted(tokens, since, "left"))
    return StepTable.of(
        history.steps[low:],
        tokens[low:],
        np.array(history.sizes[low:], np.int64),
        np.array(history.prefills[low:], np.int64),
        history.base + low,
    )


def _asked(
    index: int,
    request: Request,
    series: Series | None,
    bases: dict[str, int],
    tables: dict[str, StepTable],
    now: int,
) -> Asked:
    engine = request.engine
    times, _ = decode.token_times(request)
    over = request.over
    # An engine may put a request back before it has run at all: it was not admitted yet, and its
    # place not lost.
    lookup = request.lookup
    if lookup is None:
        lookup = next((p.resumed for p in request.preemptions if p.resumed is not None), None)
    lost = [p for p in request.preemptions if lookup is not None and p.begin >= lookup]
    return Asked(
        index=index,
        id=request.id,
        engine=engine,
        tenant=request.tenant,
        route=request.route,
        streaming=None if request.streaming < 0 else bool(request.streaming),
        logprobs=request.logprobs,
        received=request.received,
        first_seen=request.first_seen,
        receive_end=request.receive_end,
        template_begin=request.template_begin,
        template_end=request.template_end,
        tokenise_begin=request.tokenise_begin,
        tokenise_end=request.tokenise_end,
        handed=latency.admission(request),
        queued=request.queued,
        lookup=lookup,
        first_token=request.first_token,
        handed_out=request.stream_end,
        last_token=latency.last_token(request),
        finished=request.finished,
        closed=request.closed,
        over=over,
        lost=request.lost,
        incomplete=request.incomplete,
        offline=request.offline,
        disconnected=request.disconnected,
        error=request.error,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        max_tokens=request.max_tokens,
        blocks=request.blocks,
        output_tokens=request.output_tokens,
        recomputed=request.recomputed_tokens if lost else 0,
        attempts=request.attempts,
        preemptions=tuple([Waited(p.begin, p.resumed, p.computed) for p in lost]),
        passes=_passes(request.passes, bases.get(engine, 0), tables.get(engine)),
        redone=_passes(request.redo, bases.get(engine, 0), tables.get(engine)),
        sent_chunks=request.sent_chunks,
        sent_tokens=request.sent_tokens,
        sent_work=request.sent_work,
        progress=_progress(request, series),
        prompt_ids=request.prompt_ids,
        prompt_text=request.prompt_text,
        tokens=np.array(times, np.int64),
        fronted=request.fronted,
    )


def _progress(request: Request, series: Series | None) -> array[int] | None:
    if series is None:
        return None
    return next((told for key in request.keys if (told := series.progress(key)) is not None), None)


def _passes(passes: list[Pass], base: int, table: StepTable | None) -> tuple[Ran, ...]:
    out = []
    for item in passes:
        place = item.step - base if isinstance(item.step, int) else -1
        if table is None or not 0 <= place < len(table):
            place = -1
        out.append(Ran(place, item.scheduled))
    return tuple(out)


def _fill(table: StepTable, requests: list[Asked]) -> None:
    """Who ran prompt tokens in each step, and how many tokens its members had in the KV cache."""
    if not len(table):
        return
    for record in requests:
        for ran in (*record.passes, *record.redone):
            if ran.place < 0:
                continue
            table.prefilling[ran.place] += 1
            if ran.tokens > table.owner_tokens[ran.place]:
                table.owner[ran.place] = record.index
                table.owner_tokens[ran.place] = ran.tokens
        if len(record.tokens) and record.prompt_tokens >= 0:
            places = np.searchsorted(table.tokens_at, record.tokens, "left")
            keep = places < len(table)
            lengths = record.prompt_tokens + np.arange(len(record.tokens), dtype=np.float64)
            np.add.at(table.context, places[keep], lengths[keep])


def _facts(
    source: Source, table: StepTable, requests: list[Asked], series: Series | None, since: int
) -> EngineFacts:
    engine = source.engine
    header = source.header

    def size(name: str) -> int:
        return int(getattr(engine, name, -1)) if engine is not None else -1

    if series is not None:
        beats = [beat for beat in series.beats.get(source.name, ()) if beat.t >= since]
        evictions = [t for t in series.evictions.get(source.name, ()) if t >= since]
    else:
        beats = [
            Beat(beat.t, beat.cpu_ns, beat.threads)
            for beat in (source.beat_before, source.beat)
            if beat is not None
        ]
        evictions = []
    return EngineFacts(
        source=source.name,
        title=shown((header.title if header else "") or source.name),
        name=engine.name if engine else "",
        model=engine.model if engine else "",
        device=engine.device if engine else "",
        status=source.status,
        reason=shown(source.reason),
        gone=source.gone is not None,
        num_blocks=size("num_blocks"),
        block_size=size("block_size"),
        block_bytes=size("block_bytes"),
        max_batch=size("max_batch"),
        max_batch_tokens=size("max_batch_tokens"),
        prefix_caching=size("prefix_caching"),
        cuda_graphs=size("cuda_graphs"),
        threads=size("threads"),
        role=header.role if header else "",
        unavailable=frozenset(
            stage for stage, event in source.coverage.items() if event.status == "unavailable"
        ),
        missing=source.missing,
        steps=table,
        requests=tuple(requests),
        beats=tuple(beats),
        evictions=np.array(evictions, np.int64),
        evicted=source.evicted,
        preempted=source.preempted,
        pid=header.pid if header else 0,
        parent=header.parent if header else 0,
    )

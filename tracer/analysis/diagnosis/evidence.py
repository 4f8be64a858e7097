"""From a `TraceState` to the evidence that rules look at, collected once.

This is the only file of the diagnosis that reads the internals of `TraceState`; rules are functions
of the `Evidence`. That of a window (`since`) holds the requests that were alive in it and the steps
that fell into it.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from dataclasses import fields
from typing import Final, cast

import numpy as np

from engine_hooks.protocol.events import Engine
from tracer.analysis.diagnosis.figures import shown
from tracer.analysis.diagnosis.records import (
    EngineFacts,
    Evidence,
    Preemption,
    PrefillPass,
    RequestFacts,
)
from tracer.analysis.diagnosis.series import Beat, Series
from tracer.analysis.diagnosis.steps import StepTable
from tracer.state.engine.source import Source
from tracer.state.request import decode, latency
from tracer.state.request.request import Pass, Request
from tracer.state.trace_state import TraceState

SLICE: Final = 24
"""Requests that are read at a time by `gather`: a millisecond."""

_OF_REQUEST: Final = [one.name for one in fields(RequestFacts) if hasattr(Request, one.name)]
"""What a request says of itself; `_request` computes some of it anew."""
_OF_ENGINE: Final = [
    one.name for one in fields(EngineFacts) if one.name in Engine.__struct_fields__
]
_UNKNOWN: Final = Engine(0, "")
"""What an engine says that did not say anything."""


def collect(state: TraceState, *, since: int | None = None, now: int | None = None) -> Evidence:
    """Return the evidence in `state` up to `now` (default: its latest event), from `since` on
    (default: all that is kept)."""
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
    when its turn comes, the steps as they were at the start; what a request ran in later ones is
    left out."""
    at = state.now if now is None else max(now, state.began)
    begin = state.began if since is None else max(since, state.began)
    series: Series | None = getattr(state, "series", None)
    sources = dict(state.sources)
    alive = _alive_since(state, since)
    tables = {name: _steps(source, begin) for name, source in sources.items()}
    yield
    requests: list[RequestFacts] = []
    by_engine: dict[str, list[RequestFacts]] = {name: [] for name in sources}
    for request in alive:
        facts = _request(len(requests), request, series, tables.get(request.engine))
        requests.append(facts)
        by_engine.setdefault(facts.engine, []).append(facts)
        if len(requests) % SLICE == 0:
            yield
    for name, table in tables.items():
        for place in range(0, len(by_engine[name]), 4 * SLICE):
            _fill(table, by_engine[name][place : place + 4 * SLICE])
            yield
    engines = [
        _engine(source, tables[name], by_engine[name], series, begin)
        for name, source in sources.items()
    ]
    return Evidence(
        began=begin,
        now=at,
        requests=tuple(requests),
        engines=tuple(engine for engine in engines if len(engine.steps) or engine.requests),
        fronts=tuple(engine for engine in engines if not len(engine.steps) and not engine.requests),
        lost_events=sum(source.missing for source in sources.values()),
        set_aside=state.set_aside(now),
        with_series=series is not None,
        quotes=state.quotes,
    )


def _alive_since(state: TraceState, since: int | None) -> list[Request]:
    """Return the requests that were alive at `since` or later, in order of receipt."""
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
    return StepTable(
        history.steps[low:],
        tokens[low:],
        np.array(history.sizes[low:], np.int64),
        np.array(history.prefills[low:], np.int64),
        history.base + low,
    )


def _request(
    index: int, request: Request, series: Series | None, table: StepTable | None
) -> RequestFacts:
    times, _ = decode.token_times(request)
    # An engine may put a request back before it has run at all: it was not admitted yet, and its
    # place not lost.
    lookup = request.lookup
    if lookup is None:
        lookup = next((p.resumed for p in request.preemptions if p.resumed is not None), None)
    lost = [p for p in request.preemptions if lookup is not None and p.begin >= lookup]
    known = {name: getattr(request, name) for name in _OF_REQUEST} | {
        "index": index,
        "streaming": None if request.streaming < 0 else bool(request.streaming),
        "handed": latency.admission(request),
        "lookup": lookup,
        "handed_out": request.stream_end,
        "last_token": latency.last_token(request),
        "recomputed": request.recomputed_tokens if lost else 0,
        "preemptions": tuple([Preemption(p.begin, p.resumed) for p in lost]),
        "passes": _passes(request.passes, table),
        "redone": _passes(request.redo, table),
        "progress": _progress(request, series),
        "tokens": np.array(times, np.int64),
    }
    return RequestFacts(**known)


def _progress(request: Request, series: Series | None) -> array[int] | None:
    if series is None:
        return None
    return next((rows for key in request.keys if (rows := series.progress(key)) is not None), None)


def _passes(passes: list[Pass], table: StepTable | None) -> tuple[PrefillPass, ...]:
    out = []
    for item in passes:
        place = -1
        if table is not None and isinstance(item.step, int):
            place = item.step - table.first
            place = place if 0 <= place < len(table) else -1
        out.append(PrefillPass(place, item.scheduled))
    return tuple(out)


def _fill(table: StepTable, requests: list[RequestFacts]) -> None:
    """Fill in who ran prompt tokens in each step, and the context of its members."""
    if not len(table):
        return
    for request in requests:
        for ran in (*request.passes, *request.redone):
            if ran.place < 0:
                continue
            table.prefilling[ran.place] += 1
            if ran.tokens > table.owner_tokens[ran.place]:
                table.owner[ran.place] = request.index
                table.owner_tokens[ran.place] = ran.tokens
        if len(request.tokens) and request.prompt_tokens >= 0:
            places = np.searchsorted(table.tokens_at, request.tokens, "left")
            keep = places < len(table)
            lengths = request.prompt_tokens + np.arange(len(request.tokens), dtype=np.float64)
            np.add.at(table.context, places[keep], lengths[keep])


def _engine(
    source: Source,
    table: StepTable,
    requests: list[RequestFacts],
    series: Series | None,
    since: int,
) -> EngineFacts:
    header = source.header
    if series is not None:
        beats = [beat for beat in series.beats.get(source.name, ()) if beat.t >= since]
        evictions = [t for t in series.evictions.get(source.name, ()) if t >= since]
    else:
        last = (source.beat_before, source.beat)
        beats = [Beat(beat.t, beat.cpu_ns) for beat in last if beat is not None]
        evictions = []
    return EngineFacts(
        source=source.name,
        title=shown((header.title if header else "") or source.name),
        role=header.role if header else "",
        pid=header.pid if header else 0,
        parent=header.parent if header else 0,
        status=source.status,
        reason=shown(source.reason),
        gone=source.gone is not None,
        steps=table,
        requests=tuple(requests),
        beats=tuple(beats),
        evictions=np.array(evictions, np.int64),
        **{name: getattr(source.engine or _UNKNOWN, name) for name in _OF_ENGINE},
    )

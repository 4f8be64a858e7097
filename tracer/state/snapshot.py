"""From requests to what a screen reads: views of single requests, and the list in the order asked
for.

A view of a request that is over is made once and reused until an event touches it. The list is kept
in order of receipt, so that a page of it costs no more with 10,000 requests than with 50; other
orders are kept until a request ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.events import Coverage, unpack_u32
from engine_hooks.protocol.stages import Stage
from tracer.state.engine.kv import BlockMap
from tracer.state.request import decode, latency, progress, waterfall
from tracer.state.request.outcome import failure_of
from tracer.state.request.request import Request
from tracer.state.request.table import RequestTable
from tracer.state.view import (
    ChunkView,
    Phase,
    RequestDetail,
    RequestView,
    Segment,
    StageView,
    Status,
)

_PHASES: Final = {phase: place for place, phase in enumerate(Phase)}
_REUSED: Final = 10
"""Rows (stages 1-10) that no longer change once the first token is out."""

CoverageOf = Callable[[Request], Mapping[int, Coverage]]


def phase_of(request: Request) -> Phase:
    """Where the request stands, from the furthest milestone that is known."""
    if request.over is not None:
        return Phase.LOST if request.lost else Phase.DONE
    if request.finished is not None:
        return Phase.TEARDOWN
    if request.preempted:
        return Phase.PREEMPTED
    if request.first_token is not None or request.output_tokens > 0:
        return Phase.DECODE
    if request.ran:
        return Phase.PREFILL
    if request.queued is not None or request.admission_begin is not None:
        return Phase.WAITING
    return Phase.FRONT_END


@dataclass(slots=True)
class _Made:
    """What was built of a request last, and of which version of it."""

    view: RequestView | None = None
    view_version: tuple[int, int] = (-1, -1)
    front: _Front | None = None
    search: str = ""
    search_version: int = -1


class Views:
    """Makes the views of one trace's requests, and uses what it made again until an event touches
    the request."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        """By serial."""

    def of(
        self, request: Request, now: int, coverage_of: CoverageOf, *, running_shares: bool = False
    ) -> RequestView:
        """The request as of `now` (ns).

        Shares are of E2E, which is only known at the end; with `running_shares` those of a live
        request are of the time so far.
        """
        made = self._of(request)
        if request.over is None:
            return _build(request, made, now, coverage_of, running_shares)
        version = (request.version, request.outputs)
        if made.view is None or made.view_version != version:
            made.view = _build(request, made, now, coverage_of, running_shares)
            made.view_version = version
        return made.view

    def search_text(self, request: Request) -> str:
        """What the filter looks in, besides the phase, in lower case."""
        made = self._of(request)
        if made.search_version != request.version:
            words = (
                request.id,
                *request.names,
                request.client_id,
                request.route,
                request.tenant,
                request.finish_reason,
                failure_of(request),
            )
            made.search, made.search_version = "\n".join(words).lower(), request.version
        return made.search

    def forget(self, request: Request) -> None:
        """Drop what was made of a request."""
        self._made.pop(request.serial, None)

    def _of(self, request: Request) -> _Made:
        made = self._made.get(request.serial)
        if made is None:
            made = self._made[request.serial] = _Made()
        return made


@dataclass(slots=True)
class _Front:
    """What no longer changes about a request that decodes and has its first token handed out,
    unless an event tells more: stages 1 to 10. Likewise of one that waits for admission."""

    version: int
    rows: tuple[StageView, ...]
    spans: tuple[waterfall.Span, ...]
    segments: tuple[Segment, ...]
    chunks: tuple[ChunkView, ...]
    unattributed: int | None
    figures: tuple[float | None, float | None, float | None, float | None]
    waits: tuple[StageView, ...] = ()
    """All twelve rows, of a request that waits for admission: only how long it has waited moves
    on."""


def _build(
    request: Request, made: _Made, now: int, coverage_of: CoverageOf, running_shares: bool
) -> RequestView:
    over = request.over
    begin = request.first_seen if request.received is None else request.received
    until = max(now, begin) if over is None else over
    front = made.front
    if front is not None and front.version == request.version and not running_shares:
        if front.waits:
            return _assemble(
                request, begin, None, front, _waited(front.waits, until), front.segments
            )
        return _assemble(
            request, begin, None, front, *_decoding(request, front, until, coverage_of)
        )
    e2e = latency.e2e(request)
    total = e2e if e2e is not None else until - begin if running_shares and over is None else None
    spans = waterfall.request_spans(request, until)
    rows = waterfall.stage_rows(request, spans, until, coverage_of(request), total)
    unattributed = None
    end = latency.closed(request) if e2e is not None else None
    if over is None and request.received is not None and end is None:
        end = until
    if end is not None:
        covered = [
            (span.begin, span.end if span.end is not None else end)
            for span, row in zip(spans, rows, strict=True)
            if span.begin is not None and row.ms is not None
        ]
        unattributed = latency.unattributed(covered, begin, end)
    segments = waterfall.segments(request, spans, until)
    front = _Front(
        request.version,
        tuple(rows[:_REUSED]),
        tuple(spans[:_REUSED]),
        tuple([segment for segment in segments if segment.stage <= _REUSED]),
        tuple(waterfall.chunk_views(request)),
        unattributed,
        (
            _ms(latency.queue(request)),
            _ms(latency.prefill(request)),
            _ms(latency.ttft(request)),
            _ms(latency.engine_ttft(request)),
        ),
    )
    if (
        total is None
        and over is None
        and request.finished is None
        and waterfall.front_final(request, spans, until)
    ):
        made.front = front
    elif over is None and e2e is None and not running_shares and phase_of(request) is Phase.WAITING:
        front.waits, front.segments = tuple(rows), tuple(segments)
        made.front = front
    return _assemble(request, begin, e2e, front, tuple(rows), tuple(segments))


def _waited(rows: tuple[StageView, ...], until: int) -> tuple[StageView, ...]:
    """The rows of a request that still waits, at `until` (ns)."""
    row = rows[Stage.ADMISSION - 1]
    if row.status is not Status.RUNNING or row.begin is None:
        return rows
    length = max(0, until - row.begin) / NS_PER_MS
    moved = StageView(
        row.stage, row.status, row.begin, None, length, row.wait_ms, None, row.reason, row.parts
    )
    return (*rows[: Stage.ADMISSION - 1], moved, *rows[Stage.ADMISSION :])


def _decoding(
    request: Request, front: _Front, until: int, coverage_of: CoverageOf
) -> tuple[tuple[StageView, ...], tuple[Segment, ...]]:
    """Rows and segments of a request whose front part is known: only decode has moved on."""
    span = waterfall.decode_span(request, until)
    coverage = coverage_of(request)
    decoding = waterfall.stage_row(
        request, Stage.DECODE, span, until, coverage.get(Stage.DECODE), None, False
    )
    teardown = waterfall.stage_row(
        request, Stage.TEARDOWN, waterfall.NOTHING, until, coverage.get(Stage.TEARDOWN), None, False
    )
    return (*front.rows, decoding, teardown), (
        *front.segments,
        *waterfall.decode_segments(front.segments, span),
    )


def _assemble(
    request: Request,
    begin: int,
    e2e: int | None,
    front: _Front,
    rows: tuple[StageView, ...],
    segments: tuple[Segment, ...],
) -> RequestView:
    over = request.over
    queue, prefill, ttft, engine_ttft = front.figures
    batch = request.batch
    members = request.last_batch
    if request.open_since >= 0 and batch is not None:
        members = batch.history.sizes[-1]
    return RequestView(
        id=request.id,
        key=request.keys[0],
        source=request.keys[0][0],
        phase=phase_of(request),
        received=begin,
        closed=over,
        stages=rows,
        segments=segments,
        prompt_tokens=_known(request.prompt_tokens),
        cached_tokens=_known(request.cached_tokens),
        output_tokens=request.output_tokens,
        max_tokens=_known(request.max_tokens),
        finish_reason=failure_of(request) or request.finish_reason,
        error=request.error,
        route=request.route,
        client_id=request.client_id,
        tenant=request.tenant,
        streaming=None if request.streaming < 0 else bool(request.streaming),
        status_code=_known(request.status_code),
        disconnected=request.disconnected,
        incomplete=request.incomplete,
        preemptions=len(request.preemptions),
        recomputed_tokens=request.recomputed_tokens,
        blocks=_known(request.blocks),
        freed_blocks=_known(request.freed),
        kept_blocks=_known(request.kept),
        queue_ms=queue,
        prefill_ms=prefill,
        ttft_ms=ttft,
        engine_ttft_ms=engine_ttft,
        tpot_ms=_ms(latency.tpot(request)),
        e2e_ms=_ms(e2e),
        unattributed_ms=_ms(front.unattributed),
        body_bytes=_known(request.body_bytes),
        sent_bytes=_known(request.sent_bytes),
        sent_chunks=_known(request.sent_chunks),
        batch=_known(members),
        chunks=front.chunks,
        rid=request.names[0] if request.names else "",
        model=request.model,
        messages=_known(request.messages),
        logprobs=request.logprobs,
        engine=request.engine,
        step_tokens=progress.step_tokens(request),
        computed_tokens=progress.computed_tokens(request),
        reused_tokens=progress.reused_tokens(request),
    )


def detail_of(request: Request, view: RequestView, blocks: BlockMap | None) -> RequestDetail:
    """Text, tokens and neighbours of one request, of which `view` is made."""
    times, batches = decode.token_times(request)
    mates: tuple[str, ...] = ()
    if request.batch is not None and request.over is None:
        members = request.batch.members.values()
        if any(member is request for member in members):
            mates = tuple(member.id for member in members if member is not request)
    prompt_chars = request.prompt_chars if request.prompt_chars >= 0 else None
    return RequestDetail(
        view=view,
        prompt_text=request.prompt_text,
        prompt_chars=prompt_chars,
        prompt_ids=tuple(unpack_u32(request.prompt_ids)),
        output_text="".join(request.output) if request.output else None,
        itl_ms=tuple([gap / NS_PER_MS for gap in latency.itl(times)]),
        itl_batch=tuple(batches[1:]),
        batch_mates=mates,
        block_ids=blocks.held(request) if blocks is not None else (),
    )


class Listing:
    """Chooses and orders the requests of a snapshot."""

    def __init__(self, table: RequestTable, views: Views) -> None:
        self._table = table
        self._views = views
        self._sorted: dict[tuple[str, bool], tuple[int, list[Request]]] = {}

    def choose(
        self,
        now: int,
        sort: str,
        reverse: bool,
        text: str,
        limit: int | None,
        offset: int,
        live_only: bool,
        engine: str | None,
    ) -> tuple[list[Request], int]:
        """The requests asked for, and how many there would be without `limit` and `offset`.

        A request without the figure that is sorted by stands at the end, whichever way.
        """
        offset = max(0, offset)
        stop = None if limit is None else offset + max(0, limit)
        key = _SORTS.get(sort)
        if key is None:
            plain = self._by_receipt(live_only)
            found: Iterable[Request] = reversed(plain) if reverse else plain
        else:
            found = self._by_figure(sort, key, now, reverse, live_only)
        if text or engine is not None:
            wanted = text.lower()
            matching = [
                request
                for request in found
                if (engine is None or any(source == engine for source, _ in request.keys))
                and (
                    not wanted
                    or wanted in self._views.search_text(request)
                    or wanted in phase_of(request)
                )
            ]
            return matching[offset:stop], len(matching)
        total = len(self._table.live) if live_only else len(self._table.order)
        if key is None:  # a slice, also from the end, without walking 10,000
            if not reverse:
                return plain[offset:stop], total
            low = 0 if stop is None else max(0, total - stop)
            return plain[low : max(0, total - offset)][::-1], total
        return list(islice(found, offset, stop)), total

    def _by_receipt(self, live_only: bool) -> list[Request]:
        if not live_only:
            return self._table.order
        return sorted(self._table.live.values(), key=_by_order)

    def _by_figure(
        self,
        sort: str,
        key: Callable[[Request, int], float | None],
        now: int,
        reverse: bool,
        live_only: bool,
    ) -> Iterable[Request]:
        sign = -1.0 if reverse else 1.0

        def rank(request: Request) -> tuple[bool, float, int]:
            value = key(request, now)
            return (value is None, sign * (value or 0.0), request.serial)

        live = sorted(self._table.live.values(), key=rank)
        if live_only:
            return iter(live)
        version, over = self._sorted.get((sort, reverse), (-1, []))
        if version != self._table.changes:
            over = sorted(self._table.over.values(), key=rank)
            self._sorted[sort, reverse] = (self._table.changes, over)
        return heapq.merge(live, over, key=rank)


def _by_order(request: Request) -> tuple[int, int]:
    return request.order


def _elapsed(request: Request, now: int) -> float | None:
    if request.over is not None:
        return latency.e2e(request)
    return None if request.received is None else float(now - request.received)


_SORTS: Final[dict[str, Callable[[Request, int], float | None]]] = {
    "ttft": lambda request, now: latency.ttft(request),
    "e2e": _elapsed,
    "itl": lambda request, now: latency.tpot(request),
    "queue": lambda request, now: latency.queue(request),
    "prompt": lambda request, now: _known(request.prompt_tokens),
    "output": lambda request, now: request.output_tokens,
    "phase": lambda request, now: _PHASES[phase_of(request)],
    "blocks": lambda request, now: max(0, request.blocks) if request.over is None else None,
    "step": lambda request, now: progress.step_tokens(request),
}
"""Orders besides that of receipt; an unknown one is taken as that."""


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _ms(ns: float | None) -> float | None:
    return None if ns is None or math.isnan(ns) else ns / NS_PER_MS

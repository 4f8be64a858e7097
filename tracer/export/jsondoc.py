"""The state as one JSON document (``--json``), described in docs/json.md.

All times are in ms. `null` stands for *not known*, never for zero. Text of requests, models and
hosts is cleaned (`tracer.format.text.clean`), so that the document can be printed on a terminal and
always encodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.export.numbers_json import numbers_document, timer_document
from tracer.format.text import clean
from tracer.state.engine.pool import cached_ages, pool_of, prefix_of
from tracer.state.view import (
    Context,
    CoverageRow,
    EngineView,
    Losses,
    RequestDetail,
    RequestView,
    Snapshot,
    StageView,
    Status,
    Wait,
)

if TYPE_CHECKING:
    from tracer.analysis.beside.beside import Beside

SCHEMA: Final = 1
"""Raised when the meaning of a key changes or one goes away; new keys do not raise it."""

_RANKS: Final = {Status.MEASURED: 0, Status.ESTIMATED: 1, Status.UNAVAILABLE: 2}


def document(
    snapshot: Snapshot, *, extra: Mapping[str, object] | None = None, beside: Beside | None = None
) -> dict[str, Any]:
    """The document of a snapshot. `extra` adds keys at the top; none of the document's own is
    replaced. `beside` tells the expected values; without it there are none."""
    engine = main_engine(snapshot)
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "now_ms": (snapshot.now - snapshot.began) / NS_PER_MS,
        "wall": None if snapshot.wall is None else snapshot.wall / 1e9,
        "engine": None if engine is None else _engine(engine, beside),
        "processes": [_process(view) for view in snapshot.engines],
        "context": _context(snapshot.context),
        "gauges": None if engine is None else _gauges(engine, snapshot, beside),
        "timers": {name: timer_document(timer) for name, timer in snapshot.timers.items()},
        "numbers": None if snapshot.numbers is None else numbers_document(snapshot.numbers),
        "losses": _losses(snapshot.losses),
        "coverage": _coverage(snapshot.coverage),
        "counts": {
            "matching": snapshot.total,
            "live": snapshot.live,
            "finished": snapshot.finished,
            "failed": snapshot.failed,
        },
        "queue": [_wait(wait, snapshot) for wait in snapshot.waits],
        "requests": [request(view, snapshot, beside) for view in snapshot.requests],
    }
    return {**{name: value for name, value in (extra or {}).items() if name not in made}, **made}


def main_engine(snapshot: Snapshot) -> EngineView | None:
    """The process whose engine the figures are about: the first that told of an engine, else the
    first of all."""
    told = [view for view in snapshot.engines if view.name]
    return next(iter(told or snapshot.engines), None)


def engine_of(view: RequestView, snapshot: Snapshot) -> EngineView | None:
    """The engine that worked on a request, as far as can be told."""
    named = (
        engine
        for engine in snapshot.engines
        if engine.name and engine.source in (view.engine, view.source)
    )
    return next(named, None) or main_engine(snapshot)


def request(
    view: RequestView | RequestDetail, snapshot: Snapshot, beside: Beside | None = None
) -> dict[str, Any]:
    """One request of the document. Of a `RequestDetail` expected values are told more exactly."""
    detail = view
    if isinstance(view, RequestDetail):
        view = view.view
    expected = beside.stages(engine_of(view, snapshot), detail) if beside is not None else {}
    engine = engine_of(view, snapshot)
    prefix = None if engine is None else prefix_of(view, engine.block_size)
    elapsed = view.e2e_ms
    if elapsed is None and view.closed is None:
        elapsed = max(0, snapshot.now - view.received) / NS_PER_MS
    return {
        "id": clean(view.id),
        "rid": clean(view.rid),
        "source": clean(view.source),
        "phase": view.phase.value,
        "received_ms": (view.received - snapshot.began) / NS_PER_MS,
        "route": clean(view.route),
        "client_id": clean(view.client_id),
        "tenant": clean(view.tenant),
        "model": clean(view.model),
        "messages": view.messages,
        "logprobs": view.logprobs,
        "streaming": view.streaming,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "output_tokens": view.output_tokens,
        "max_tokens": view.max_tokens,
        "finish_reason": clean(view.finish_reason),
        "error": clean(view.error),
        "status_code": view.status_code,
        "disconnected": view.disconnected,
        "incomplete": view.incomplete,
        "ttft_ms": view.ttft_ms,
        "engine_ttft_ms": view.engine_ttft_ms,
        "e2e_ms": view.e2e_ms,
        "unattributed_ms": view.unattributed_ms,
        "queue_ms": view.queue_ms,
        "prefill_ms": view.prefill_ms,
        "tpot_ms": view.tpot_ms,
        "preemptions": view.preemptions,
        "recomputed_tokens": view.recomputed_tokens,
        "blocks": view.blocks,
        "prompt_blocks": None if prefix is None else prefix.prompt,
        "hit_blocks": None if prefix is None else prefix.hit,
        "longest_blocks": None if prefix is None else prefix.longest,
        "computed_tokens": view.computed_tokens,
        "step_tokens": view.step_tokens,
        "batch": view.batch,
        "body_bytes": view.body_bytes,
        "sent_bytes": view.sent_bytes,
        "stages": {
            row.stage.id: _stage(row, view.received, elapsed, expected.get(row.stage))
            for row in view.stages
        },
    }


def _stage(
    row: StageView, received: int, elapsed_ms: float | None, expected_ms: float | None
) -> dict[str, Any] | None:
    if row.begin is None or row.ms is None:
        return None
    return {
        "start_ms": (row.begin - received) / NS_PER_MS,
        "ms": row.ms,
        "expected_ms": expected_ms,
        "wait_ms": row.wait_ms,
        "share": row.ms / elapsed_ms if elapsed_ms else None,
        "status": row.status.value,
        "parts": dict(row.parts),
    }


def _engine(view: EngineView, beside: Beside | None) -> dict[str, Any]:
    return {
        "name": clean(view.name),
        "version": clean(view.version),
        "model": clean(view.model),
        "dtype": clean(view.dtype),
        "device": clean(view.device),
        "status": clean(view.status),
        "reason": clean(view.reason),
        "stalled": clean(view.stalled),
        "expected_from": "" if beside is None else clean(beside.basis(view).text),
        "num_blocks": view.num_blocks,
        "block_size": view.block_size,
        "block_bytes": view.block_bytes,
        "max_batch": view.max_batch,
        "max_batch_tokens": view.max_batch_tokens,
        "facts": {
            name: clean(value) if isinstance(value, str) else value for name, value in view.facts
        },
    }


def _process(view: EngineView) -> dict[str, Any]:
    return {
        "source": clean(view.source),
        "title": clean(view.title),
        "role": clean(view.role),
        "pid": view.pid,
        "status": clean(view.status),
        "alive": view.alive,
        "cpu_share": view.cpu_share,
        "rss": view.rss,
    }


def _gauges(view: EngineView, snapshot: Snapshot, beside: Beside | None) -> dict[str, Any]:
    pool, ages = pool_of(view), cached_ages(snapshot)
    return {
        "kv_usage": kv_usage(view),
        "used_blocks": view.used,
        "cached_blocks": view.cached,
        "free_blocks": view.free,
        "num_running": view.running,
        "num_waiting": view.waiting,
        "batch": view.batch,
        "step_tokens": view.step_tokens,
        "steps": view.steps,
        "preemptions": view.preempted,
        "evicted_blocks": view.evicted,
        "decode_tokens": max(0, view.step_tokens - view.prefill_tokens),
        "prefill_tokens": view.prefill_tokens,
        "bound_by": None if view.bound_by is None else view.bound_by.value,
        "ridge_batch": _ridge(view, beside),
        "kv_bytes_per_token": pool.token_bytes,
        "available_blocks": pool.available,
        "holding_requests": view.holders,
        "blocks_per_request": pool.mean_held,
        "most_blocks": view.most_held,
        "cached_10_s_blocks": None if ages is None else ages[0],
        "cached_1_min_blocks": None if ages is None else ages[1],
        "cached_older_blocks": None if ages is None else ages[2],
        "mean_tokens": pool.mean_tokens,
        "fit_mean": pool.fit_mean,
        "longest_tokens": pool.longest,
        "fit_longest": pool.fit_worst,
    }


def _ridge(view: EngineView, beside: Beside | None) -> float | None:
    """Where it is worked out, expected values are too."""
    if beside is None:
        return None
    from tracer.analysis.beside.ridge import ridge_of

    return ridge_of(view, beside.basis(view))


def _wait(wait: Wait, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": clean(wait.id),
        "source": clean(wait.engine),
        "place": wait.place,
        "waits_ms": max(0, snapshot.now - wait.since) / NS_PER_MS,
        "limit": wait.limit.value,
        "needs": wait.needs,
        "has": wait.has,
        "behind": clean(wait.behind),
        "preempted": wait.preempted,
        "tokens": wait.tokens,
    }


def kv_usage(view: EngineView) -> float | None:
    """Share of the KV cache that requests hold, 0-1; blocks that are only cached for reuse do not
    count."""
    if view.used is None:
        return None
    total = view.num_blocks
    if not total and view.free is not None:
        total = view.used + (view.cached or 0) + view.free
    return view.used / total if total else None


def _context(context: Context) -> dict[str, Any]:
    return {
        "window_s": context.window_s if math.isfinite(context.window_s) else None,
        "request_rate": context.request_rate,
        "concurrency": context.concurrency,
        "prefix_caching": context.prefix_caching,
        "chunked_prefill": context.chunked_prefill,
        "tokens_in": context.tokens_in,
        "tokens_out": context.tokens_out,
        "hit_share": context.hit_share,
    }


def _losses(losses: Losses) -> dict[str, Any]:
    return {
        "events": losses.events,
        "unknown": losses.unknown,
        "set_aside": losses.set_aside,
        "incomplete_requests": losses.incomplete_requests,
        "hook_faults": [clean(line) for line in losses.hook_faults],
        "sources_gone": [clean(line) for line in losses.sources_gone],
    }


def best_coverage(rows: tuple[CoverageRow, ...]) -> dict[Stage, CoverageRow]:
    """For each stage that a process said something about, the row of the process that covers it
    best."""
    best: dict[Stage, CoverageRow] = {}
    for row in rows:
        known = best.get(row.stage)
        if known is None or _RANKS.get(row.status, 3) < _RANKS.get(known.status, 3):
            best[row.stage] = row
    return best


def _coverage(rows: tuple[CoverageRow, ...]) -> dict[str, Any]:
    best = best_coverage(rows)
    return {
        stage.id: {
            "status": best[stage].status.value,
            "hook": clean(best[stage].hook),
            "reason": clean(best[stage].reason),
        }
        if stage in best
        else None
        for stage in Stage
    }

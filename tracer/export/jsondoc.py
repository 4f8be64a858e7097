"""The state as one JSON document (``--json``), described in docs/json.md.

All times are in ms. `null` stands for *not known*, never for zero. Text of requests, models and
hosts is cleaned (`tracer.format.text.clean`), so that the document can be printed on a terminal and
always encodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.export.fields import fields, plain
from tracer.export.numbers_json import numbers_document, timer_document
from tracer.format.text import clean
from tracer.state.engine.pool import cached_ages, pool_of, prefix_of
from tracer.state.view import (
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
    """Return the document of a snapshot. `extra` adds keys at the top; none of the document's own
    is replaced. `beside` tells the expected values; without it there are none."""
    engine = main_engine(snapshot)
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "now_ms": (snapshot.now - snapshot.began) / NS_PER_MS,
        "wall": None if snapshot.wall is None else snapshot.wall / 1e9,
        "engine": None if engine is None else _engine(engine, beside),
        "processes": [
            fields(view, "source title role pid status alive cpu_share rss")
            for view in snapshot.engines
        ],
        "context": fields(
            snapshot.context,
            "window_s request_rate concurrency prefix_caching chunked_prefill tokens_in tokens_out "
            "hit_share",
        ),
        "gauges": None if engine is None else _gauges(engine, snapshot, beside),
        "timers": {name: timer_document(timer) for name, timer in snapshot.timers.items()},
        "numbers": None if snapshot.numbers is None else numbers_document(snapshot.numbers),
        "losses": _losses(snapshot.losses),
        "coverage": _coverage(snapshot.coverage),
        "counts": {"matching": snapshot.total, **fields(snapshot, "live finished failed")},
        "queue": [_wait(wait, snapshot) for wait in snapshot.waits],
        "requests": [request(view, snapshot, beside) for view in snapshot.requests],
    }
    return {**{name: value for name, value in (extra or {}).items() if name not in made}, **made}


def main_engine(snapshot: Snapshot) -> EngineView | None:
    """Return the process whose engine the figures are about: the first that told of an engine, else
    the first of all."""
    told = [view for view in snapshot.engines if view.name]
    return next(iter(told or snapshot.engines), None)


def engine_of(view: RequestView, snapshot: Snapshot) -> EngineView | None:
    """Return the engine that worked on a request, as far as can be told."""
    sources = (view.engine, view.source)
    named = (engine for engine in snapshot.engines if engine.name and engine.source in sources)
    return next(named, None) or main_engine(snapshot)


def request(
    view: RequestView | RequestDetail, snapshot: Snapshot, beside: Beside | None = None
) -> dict[str, Any]:
    """Return one request of the document. Of a `RequestDetail` expected values are told more
    exactly."""
    detail = view
    if isinstance(view, RequestDetail):
        view = view.view
    engine = engine_of(view, snapshot)
    expected = beside.stages(engine, detail) if beside is not None else {}
    prefix = None if engine is None else prefix_of(view, engine.block_size)
    elapsed = view.e2e_ms
    if elapsed is None and view.closed is None:
        elapsed = max(0, snapshot.now - view.received) / NS_PER_MS
    return {
        **fields(view, "id rid source phase"),
        "received_ms": (view.received - snapshot.began) / NS_PER_MS,
        **fields(
            view,
            "route client_id tenant model messages logprobs streaming prompt_tokens cached_tokens "
            "output_tokens max_tokens finish_reason error status_code disconnected incomplete "
            "ttft_ms engine_ttft_ms e2e_ms unattributed_ms queue_ms prefill_ms tpot_ms "
            "preemptions recomputed_tokens blocks",
        ),
        **fields(prefix, prompt_blocks="prompt", hit_blocks="hit", longest_blocks="longest"),
        **fields(view, "computed_tokens step_tokens batch body_bytes sent_bytes"),
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
        **fields(view, "name version model dtype device status reason stalled"),
        "expected_from": "" if beside is None else clean(beside.basis(view).text),
        **fields(view, "num_blocks block_size block_bytes max_batch max_batch_tokens"),
        "facts": {name: plain(value) for name, value in view.facts},
    }


def _gauges(view: EngineView, snapshot: Snapshot, beside: Beside | None) -> dict[str, Any]:
    pool, ages = pool_of(view), cached_ages(snapshot)
    return {
        "kv_usage": kv_usage(view),
        **fields(
            view, used_blocks="used", cached_blocks="cached", free_blocks="free",
            num_running="running", num_waiting="waiting", batch="batch", step_tokens="step_tokens",
            steps="steps", preemptions="preempted", evicted_blocks="evicted",
        ),
        "decode_tokens": max(0, view.step_tokens - view.prefill_tokens),
        **fields(view, "prefill_tokens bound_by"),
        "ridge_batch": _ridge(view, beside),
        **fields(pool, kv_bytes_per_token="token_bytes", available_blocks="available"),
        "holding_requests": view.holders,
        "blocks_per_request": pool.mean_held,
        "most_blocks": view.most_held,
        "cached_10_s_blocks": None if ages is None else ages[0],
        "cached_1_min_blocks": None if ages is None else ages[1],
        "cached_older_blocks": None if ages is None else ages[2],
        **fields(pool, "mean_tokens fit_mean", longest_tokens="longest", fit_longest="fit_worst"),
    }  # fmt: skip


def _ridge(view: EngineView, beside: Beside | None) -> float | None:
    if beside is None:
        return None
    from tracer.analysis.beside.beside import ridge_of

    return ridge_of(view, beside.basis(view))


def _wait(wait: Wait, snapshot: Snapshot) -> dict[str, Any]:
    return {
        **fields(wait, "id", source="engine", place="place"),
        "waits_ms": max(0, snapshot.now - wait.since) / NS_PER_MS,
        **fields(wait, "limit needs has behind preempted tokens"),
    }


def kv_usage(view: EngineView) -> float | None:
    """Return the share of the KV cache that requests hold, 0-1; blocks that are only cached for
    reuse do not count."""
    if view.used is None:
        return None
    total = view.num_blocks
    if not total and view.free is not None:
        total = view.used + (view.cached or 0) + view.free
    return view.used / total if total else None


def _losses(losses: Losses) -> dict[str, Any]:
    return {
        **fields(losses, "events unknown set_aside incomplete_requests"),
        "hook_faults": list(map(clean, losses.hook_faults)),
        "sources_gone": list(map(clean, losses.sources_gone)),
    }


def best_coverage(rows: tuple[CoverageRow, ...]) -> dict[Stage, CoverageRow]:
    """Return for each stage that a process said something about the row of the process that covers
    it best."""
    best: dict[Stage, CoverageRow] = {}
    for row in rows:
        known = best.get(row.stage)
        if known is None or _RANKS.get(row.status, 3) < _RANKS.get(known.status, 3):
            best[row.stage] = row
    return best


def _coverage(rows: tuple[CoverageRow, ...]) -> dict[str, Any]:
    best = best_coverage(rows)
    return {
        stage.id: fields(best[stage], "status hook reason") if stage in best else None
        for stage in Stage
    }

"""The Numbers view as part of the JSON document: the key ``numbers``, described in docs/json.md."""

from __future__ import annotations

import math
from typing import Any

from tracer.format.text import clean
from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import (
    Attainment,
    Curve,
    Figures,
    Gauges,
    History,
    Lengths,
    Numbers,
    Window,
)


def numbers_document(numbers: Numbers) -> dict[str, Any]:
    """All figures, with curves and history over the window that was asked for."""
    return {
        "filter": clean(numbers.ask.text),
        "groups": numbers.groups,
        "overflow": numbers.overflow,
        "ledger_from_s": numbers.ledger_from_s,
        "windows": [_window(window) for window in numbers.windows],
        "gauges": gauges_document(numbers.gauges),
        "curves_window_s": _seconds(numbers.window_s),
        "itl_by_batch": _curve(numbers.by_batch),
        "itl_by_position": _curve(numbers.by_position),
        "ttft_by_prompt": [
            {
                "low": point.low,
                "high": point.high,
                "count": point.count,
                "p50_ms": point.p50,
                "p95_ms": point.p95,
                "queue_p50_ms": point.queue,
                "prefill_p50_ms": point.prefill,
            }
            for point in numbers.by_prompt
        ],
        "history": _history(numbers.history),
    }


def timer_document(timer: Quantiles) -> dict[str, Any]:
    """One latency."""
    return {"count": timer.count, "p50_ms": timer.p50, "p95_ms": timer.p95, "p99_ms": timer.p99}


def _window(window: Window) -> dict[str, Any]:
    return {
        "window_s": _seconds(window.window_s),
        "span_s": window.span_s,
        "steps": window.steps,
        "budget_use": window.budget_use,
        "all": figures_document(window.all),
        "groups": {
            dimension: [
                {"name": clean(group.name), "figures": figures_document(group.figures)}
                for group in groups
            ]
            for dimension, groups in window.groups.items()
        },
    }


def figures_document(figures: Figures) -> dict[str, Any]:
    """Figures of some requests over a window."""
    return {
        "timers": {name: timer_document(timer) for name, timer in figures.timers.items()},
        "requests": figures.requests,
        "request_rate": figures.request_rate,
        "tokens_in": figures.tokens_in,
        "tokens_out": figures.tokens_out,
        "hit_share": figures.hit_share,
        "preemptions": figures.preemptions,
        "ended": figures.ended,
        "reasons": {clean(reason): count for reason, count in figures.reasons},
        "prompt": _lengths(figures.prompt),
        "output": _lengths(figures.output),
        "hit_mean": figures.hit_mean,
        "hit_requests": figures.hit_requests,
        "slo": None if figures.slo is None else _attainment(figures.slo),
    }


def _lengths(lengths: Lengths) -> dict[str, Any]:
    return {
        "count": lengths.count,
        "mean": lengths.mean,
        "p50": lengths.p50,
        "p95": lengths.p95,
        "p99": lengths.p99,
        "max": lengths.most,
    }


def _attainment(slo: Attainment) -> dict[str, Any]:
    return {
        "met": slo.met,
        "judged": slo.judged,
        "unknown": slo.unknown,
        "share": slo.share,
        "goodput": slo.goodput,
        "targets": {
            name: {"target_ms": target, "share": share} for name, target, share in slo.each
        },
    }


def gauges_document(gauges: Gauges) -> dict[str, Any]:
    """The engines now."""
    return {
        "blocks": gauges.blocks,
        "live_blocks": gauges.live,
        "cached_blocks": gauges.cached,
        "free_blocks": gauges.free,
        "kv_live": gauges.share(gauges.live),
        "kv_cached": gauges.share(gauges.cached),
        "kv_free": gauges.share(gauges.free),
        "waiting": gauges.waiting,
        "running": gauges.running,
        "batch": gauges.batch,
        "max_batch": gauges.max_batch,
        "step_tokens": gauges.step_tokens,
        "max_batch_tokens": gauges.max_batch_tokens,
        "preemptions": gauges.preemptions,
        "evicted_blocks": gauges.evicted,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    points = [
        {
            "low": point.low,
            "high": point.high,
            "count": point.count,
            "p50_ms": point.p50,
            "p95_ms": point.p95,
        }
        for point in curve.points
    ]
    return {"rise": curve.rise, "points": points}


def _history(history: History) -> dict[str, Any]:
    return {
        "engine": clean(history.engine),
        "title": clean(history.title),
        "grain_s": history.grain_s,
        "columns": [
            {
                "begin_s": column.begin_s, "steps": column.steps, "step_ms": column.step,
                "step_max_ms": column.step_max, "wait_ms": column.wait, "stalled": column.stalled,
                "batch": column.batch, "used_blocks": column.used, "cached_blocks": column.cached,
                "free_blocks": column.free, "waiting": column.waiting,
            }
            for column in history.stretches
        ],
    }  # fmt: skip


def _seconds(window_s: float) -> float | None:
    return window_s if math.isfinite(window_s) else None

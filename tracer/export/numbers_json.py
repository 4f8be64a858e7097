"""The Numbers view as part of the JSON document: the key ``numbers``, described in docs/json.md."""

from __future__ import annotations

from typing import Any

from tracer.export.fields import fields
from tracer.format.text import clean
from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import Attainment, Curve, Figures, History, Numbers, Window


def numbers_document(numbers: Numbers) -> dict[str, Any]:
    """Return all figures, with curves and history over the window that was asked for."""
    gauges = numbers.gauges
    return {
        "filter": clean(numbers.ask.text),
        **fields(numbers, "groups overflow ledger_from_s"),
        "windows": [_window(window) for window in numbers.windows],
        "gauges": {
            **fields(gauges, "blocks", live_blocks="live", cached_blocks="cached",
                     free_blocks="free"),
            "kv_live": gauges.share(gauges.live),
            "kv_cached": gauges.share(gauges.cached),
            "kv_free": gauges.share(gauges.free),
            **fields(gauges, "waiting running batch max_batch step_tokens max_batch_tokens "
                     "preemptions", evicted_blocks="evicted"),
        },
        **fields(numbers, curves_window_s="window_s"),
        "itl_by_batch": _curve(numbers.by_batch),
        "itl_by_position": _curve(numbers.by_position),
        "ttft_by_prompt": [
            fields(point, "low high count", p50_ms="p50", p95_ms="p95", queue_p50_ms="queue",
                   prefill_p50_ms="prefill")
            for point in numbers.by_prompt
        ],
        "history": _history(numbers.history),
    }  # fmt: skip


def timer_document(timer: Quantiles) -> dict[str, Any]:
    return fields(timer, "count", p50_ms="p50", p95_ms="p95", p99_ms="p99")


def _window(window: Window) -> dict[str, Any]:
    return {
        **fields(window, "window_s span_s steps budget_use"),
        "all": _figures(window.all),
        "groups": {
            dimension: [
                {"name": clean(group.name), "figures": _figures(group.figures)} for group in groups
            ]
            for dimension, groups in window.groups.items()
        },
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "timers": {name: timer_document(timer) for name, timer in figures.timers.items()},
        **fields(figures, "requests request_rate tokens_in tokens_out hit_share preemptions ended"),
        "reasons": {clean(reason): count for reason, count in figures.reasons},
        "prompt": fields(figures.prompt, "count mean p50 p95 p99", max="most"),
        "output": fields(figures.output, "count mean p50 p95 p99", max="most"),
        **fields(figures, "hit_mean hit_requests"),
        "slo": None if figures.slo is None else _attainment(figures.slo),
    }


def _attainment(slo: Attainment) -> dict[str, Any]:
    targets = {name: {"target_ms": target, "share": share} for name, target, share in slo.each}
    return {**fields(slo, "met judged unknown share goodput"), "targets": targets}


def _curve(curve: Curve) -> dict[str, Any]:
    points = [fields(p, "low high count", p50_ms="p50", p95_ms="p95") for p in curve.points]
    return {"rise": curve.rise, "points": points}


def _history(history: History) -> dict[str, Any]:
    return {
        **fields(history, "engine title grain_s"),
        "columns": [
            fields(
                column, "begin_s steps", step_ms="step", step_max_ms="step_max", wait_ms="wait",
                stalled="stalled", batch="batch", used_blocks="used", cached_blocks="cached",
                free_blocks="free", waiting="waiting",
            )
            for column in history.stretches
        ],
    }  # fmt: skip

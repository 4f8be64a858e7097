"""A comparison as one JSON document (``tracer compare --json``), described in docs/compare.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import STATISTICS, Change, Comparison, Matched, Pair, Part
from tracer.analysis.compare.rows import Row
from tracer.format.text import clean

SCHEMA: Final = 1
"""Raised when the meaning of a key changes or one goes away; new keys do not raise it."""


def document(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison. Times in ms; null is *not known*."""
    return {
        "schema": SCHEMA,
        "percentile": comparison.percentile,
        "match": comparison.match,
        "columns": [
            {**_column(context), "left_out": dict(left_out)}
            for context, left_out in zip(comparison.columns, comparison.left_out, strict=True)
        ],
        "matched": {"early": _matched(comparison.early), "late": _matched(comparison.late)},
        "timers": {row.key: _row(comparison, row) for row in comparison.rows if row.stage is None},
        "stages": {
            row.key: _row(comparison, row) for row in comparison.rows if row.stage is not None
        },
        "pairs": [_pair(pair) for pair in comparison.pairs],
        "rounds": comparison.rounds,
        "stretches": list(comparison.blocks),
    }


def _column(context: Context) -> dict[str, Any]:
    engine = context.engine
    return {
        "name": clean(context.name),
        "kind": context.kind,
        "engine": None if engine is None else clean(engine.name),
        "version": None if engine is None else clean(engine.version),
        "model": None if engine is None else clean(engine.model),
        "device": None if engine is None else clean(engine.device),
        "request_rate": context.request_rate,
        "concurrency": context.concurrency,
        "peak_concurrency": context.peak,
        "company": context.company,
        "prefix_caching": context.prefix_caching,
        "chunked_prefill": context.chunked_prefill,
        "hit_share": context.hit_share,
        "queue_share": context.queue_share,
        "requests": context.requests,
        "window_s": context.window_s,
        "lost_events": context.lost_events,
        "set_aside": context.set_aside,
    }


def _matched(matched: Matched) -> dict[str, Any]:
    return {
        "counts": list(matched.counts),
        "eligible": list(matched.eligible),
        "cells": matched.cells,
        "factor": matched.factor or None,
        "prompt_tokens": list(matched.prompt),
        "output_tokens": list(matched.output),
    }


def _row(comparison: Comparison, row: Row) -> dict[str, Any]:
    figures = comparison.figures[row.key]
    return {
        "samples": list(figures["mean"].counts),
        **{f"{name}_ms": list(figures[name].values) for name in STATISTICS},
        "measured": [clean(note) for note in comparison.notes.get(row.key, ())],
        "changes": [
            {name: _change(pair.change(row.key, name)) for name in STATISTICS}
            for pair in comparison.pairs
        ],
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "difference_ms": change.difference,
        "low_ms": change.low,
        "high_ms": change.high,
        "noise_ms": change.noise,
        "relative": change.relative,
        "differs": change.differs,
        "why": clean(change.why),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "before": pair.before,
        "after": pair.after,
        "verdict": clean(pair.verdict),
        "differs": pair.differs,
        "explained_by": pair.explained_by,
        "e2e_parts": _parts(pair.e2e_parts),
        "ttft_parts": _parts(pair.ttft_parts),
        "rates": [
            {
                "stage": rate.stage,
                "token": rate.tokens,
                "before_ms": rate.before,
                "after_ms": rate.after,
            }
            for rate in pair.rates
        ],
        "warnings": [clean(warning) for warning in pair.warnings],
    }


def _parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        {
            "row": part.row.key,
            "before_ms": part.before,
            "after_ms": part.after,
            "change_ms": part.change,
        }
        for part in parts
    ]

"""A comparison as one JSON document (``tracer compare --json``), described in docs/compare.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import STATISTICS, Comparison, Matched, Pair, Part
from tracer.analysis.compare.rows import Row
from tracer.export.fields import fields
from tracer.format.text import clean

SCHEMA: Final = 1
"""Raised when the meaning of a key changes or one goes away; new keys do not raise it."""


def document(comparison: Comparison) -> dict[str, Any]:
    """Return the whole comparison. Times in ms; null is *not known*."""
    rows = comparison.rows
    return {
        "schema": SCHEMA,
        **fields(comparison, "percentile match"),
        "columns": [
            {**_column(context), "left_out": dict(left_out)}
            for context, left_out in zip(comparison.columns, comparison.left_out, strict=True)
        ],
        "matched": {"early": _matched(comparison.early), "late": _matched(comparison.late)},
        "timers": {row.key: _row(comparison, row) for row in rows if row.stage is None},
        "stages": {row.key: _row(comparison, row) for row in rows if row.stage is not None},
        "pairs": [_pair(pair) for pair in comparison.pairs],
        "rounds": comparison.rounds,
        "stretches": list(comparison.blocks),
    }


def _column(context: Context) -> dict[str, Any]:
    return {
        **fields(context, "name kind"),
        **fields(context.engine, engine="name", version="version", model="model", device="device"),
        **fields(context, "request_rate concurrency", peak_concurrency="peak"),
        **fields(
            context,
            "company prefix_caching chunked_prefill hit_share queue_share requests window_s "
            "lost_events set_aside",
        ),
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
            {
                name: fields(
                    pair.change(row.key, name), difference_ms="difference", low_ms="low",
                    high_ms="high", noise_ms="noise", relative="relative", differs="differs",
                    why="why",
                )
                for name in STATISTICS
            }
            for pair in comparison.pairs
        ],
    }  # fmt: skip


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        **fields(pair, "before after verdict differs explained_by"),
        "e2e_parts": _parts(pair.e2e_parts),
        "ttft_parts": _parts(pair.ttft_parts),
        "rates": [
            fields(rate, "stage", token="tokens", before_ms="before", after_ms="after")
            for rate in pair.rates
        ],
        "warnings": [clean(warning) for warning in pair.warnings],
    }


def _parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        {
            "row": part.row.key,
            **fields(part, before_ms="before", after_ms="after", change_ms="change"),
        }
        for part in parts
    ]

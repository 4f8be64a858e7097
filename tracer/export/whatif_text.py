"""A prediction of what would change if, as a printed table and as a JSON document."""

from __future__ import annotations

import math
from typing import Any

from tracer.analysis.whatif.whatif import Factor, Prediction, describe, label
from tracer.export.fields import fields
from tracer.export.page import Page
from tracer.format import figures


def whatif_text(told: Prediction, *, width: int = 100, unicode: bool = True) -> str:
    """Return the sentence, a row for each figure, and what the replay cannot know."""
    page = Page(width, unicode)
    page.wrapped(told.sentence())
    page.line()
    page.row(
        ("", -12), ("measured", 11), ("predicted", 11), ("change", 9), ("   90 % of replays", -30)
    )
    for metric in told.metrics:
        if not math.isfinite(metric.predicted):
            continue
        measured, predicted, low, high = map(
            figures.significant, (metric.measured, metric.predicted, metric.low, metric.high)
        )
        spread = f"   {low} … {high} {metric.unit}"
        page.row(
            (label(metric.name), -12), (measured, 11), (predicted, 11),
            (figures.change(metric.change), 9), (spread, -30),
        )  # fmt: skip
    if told.replay_error is not None:
        error = figures.percentage(told.replay_error)
        page.line()
        page.wrapped(f"the replay of what was recorded is {error} off at the median")
    for note in told.notes:
        page.wrapped(note, "- ")
    return page.text()


def whatif_document(told: Prediction) -> dict[str, Any]:
    """Return everything the prediction says; null where there is no such number."""
    return {
        "changes": {
            name: {"times": value.value} if isinstance(value, Factor) else value
            for name, value in told.changes.items()
        },
        "described": describe(told.changes),
        "replay_error": told.replay_error,
        "metrics": {
            metric.name: fields(
                metric, "unit measured", replayed="before", replayed_changed="after",
                predicted="predicted", low="low", high="high", change="change",
            )
            for metric in told.metrics
        },
        "preemptions": {"before": told.before.preemptions, "after": told.after.preemptions},
        "sentence": told.sentence(),
        "notes": list(told.notes),
    }  # fmt: skip

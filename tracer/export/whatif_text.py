"""A prediction of what would change if, as a printed table and as a JSON document."""

from __future__ import annotations

import math
from typing import Any

from tracer.analysis.whatif.whatif import Factor, Prediction, describe, label
from tracer.format.text import fit


def whatif_text(told: Prediction, *, width: int = 100, unicode: bool = True) -> str:
    """The sentence, a row for each figure, and what the replay cannot know."""
    import textwrap

    lines = [*textwrap.wrap(told.sentence(), max(20, width)), "", fit(
        f"{'':<12}{'measured':>11}{'predicted':>11}{'change':>9}   90 % of replays", width
    ).rstrip()]  # fmt: skip
    for metric in told.metrics:
        measured = "" if metric.measured is None else _figure(metric.measured)
        spread = f"{_figure(metric.low)} … {_figure(metric.high)} {metric.unit}"
        if not math.isfinite(metric.predicted):
            continue
        row = (
            f"{label(metric.name):<12}{measured:>11}{_figure(metric.predicted):>11}"
            f"{metric.change:>+9.0%}   {spread}"
        )
        lines.append(fit(row, width).rstrip())
    if told.replay_error is not None:
        said = f"the replay of what was recorded is {told.replay_error:.0%} off at the median"
        lines += ["", *textwrap.wrap(said, max(20, width))]
    for note in told.notes:
        lines += textwrap.wrap(f"- {note}", max(20, width), subsequent_indent="  ")
    text = "\n".join(lines)
    if unicode:
        return text
    # one cell each: the rows keep their width
    for sign, plain in (("→", ">"), ("…", "~"), ("×", "x")):
        text = text.replace(sign, plain)
    return text.encode("ascii", "replace").decode("ascii")


def whatif_document(told: Prediction) -> dict[str, Any]:
    """Everything the prediction says; null where there is no such number."""
    return {
        "changes": {
            name: {"times": value.value} if isinstance(value, Factor) else value
            for name, value in told.changes.items()
        },
        "described": describe(told.changes),
        "replay_error": told.replay_error,
        "metrics": {
            metric.name: {
                "unit": metric.unit,
                "measured": metric.measured,
                "replayed": _number(metric.before),
                "replayed_changed": _number(metric.after),
                "predicted": _number(metric.predicted),
                "low": _number(metric.low),
                "high": _number(metric.high),
                "change": _number(metric.change),
            }
            for metric in told.metrics
        },
        "preemptions": {"before": told.before.preemptions, "after": told.after.preemptions},
        "sentence": told.sentence(),
        "notes": list(told.notes),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""A calibration as a printed table and as a JSON document."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from tracer.analysis.beside.observed import Observed
from tracer.analysis.fit.fit import Estimate, Fit
from tracer.format.text import clean, fit


def fit_text(
    found: Fit, seen: Observed, *, kept: str = "", width: int = 100, unicode: bool = True
) -> str:
    """What the steps say, how sure that is, and how well it holds for steps that were not fitted.
    `kept`: the file that the screens read it from, if it is one."""
    engine, room = seen.engine, max(20, width)
    model = engine.model.rstrip("/").rsplit("/", 1)[-1]
    title = (
        f"{engine.name} {engine.version}".strip()
        + f", {model} {engine.dtype} on {found.device.title}"
    )
    steps = f"{found.steps:,} steps of {len(seen.arrivals):,} requests"
    lines = [
        *textwrap.wrap(clean(f"{title}: {steps}"), room),
        "",
        *textwrap.wrap(found.sentence(), room),
        "",
    ]
    lines.append(fit(f"{'':<34}{'value':>9}   90 % of resamples", width).rstrip())
    for label, estimate, unit in _rows(found):
        scale = 100.0 if unit == "%" else 1.0
        value, low, high = (
            _figure(each * scale) for each in (estimate.value, estimate.low, estimate.high)
        )
        lines.append(fit(f"{label:<34}{value:>9}   {low} … {high} {unit}", width).rstrip())
    lines += ["", fit(f"{'median error':<34}{'steps':>9}{'prompts':>10}", width).rstrip()]
    lines.append(fit(f"{'on steps it has not seen':<34}{_share(found.step_error):>9}"
                     f"{_share(found.prefill_error):>10}", width).rstrip())  # fmt: skip
    lines.append(
        fit(f"{'on steps that were fitted':<34}{_share(found.seen_error):>9}", width).rstrip()
    )
    noise = math.expm1(found.noise)
    lines += [
        "",
        *textwrap.wrap(
            f"Equal steps of this trace differ by about {noise:.0%} (one standard deviation): no "
            "prediction of a single step can be better than that.",
            room,
        ),
    ]
    if seen.left_out:
        lines += textwrap.wrap(
            f"{seen.left_out:,} requests that were not over are left out of the figures.", room
        )
    if kept:
        lines += textwrap.wrap(
            clean(f"Kept in {kept}: expected values beside measured ones of this engine use it."),
            room,
        )
    text = "\n".join(lines)
    if unicode:
        return text
    for sign, plain in (("…", "~"), ("×", "x")):  # one cell each: the rows keep their width
        text = text.replace(sign, plain)
    return text.encode("ascii", "replace").decode("ascii")


def fit_document(found: Fit, seen: Observed) -> dict[str, Any]:
    """Everything the fit says. Times in ms, shares 0-1 (of a CPU above 1 where its units for a
    dtype beat the yardstick); null where there is no such number."""
    engine, step = seen.engine, found.step
    return {
        "engine": {
            "name": clean(engine.name),
            "version": clean(engine.version),
            "model": clean(engine.model),
            "dtype": clean(engine.dtype),
            "device": clean(engine.device),
        },
        "device": {
            "name": found.device.name,
            "title": clean(found.device.title),
            "flops": found.device.peak(found.model.compute_dtype),
            "bandwidth": found.device.bandwidth,
            "source": found.device.source,
        },
        "steps": found.steps,
        "requests": len(seen.arrivals),
        "left_out": seen.left_out,
        "mfu": _range(found.mfu),
        "mbu": _range(found.mbu),
        "host_ms": _range(found.host_ms),
        "decode_share": _range(found.decode_share),
        "step_error": found.step_error,
        "prefill_error": found.prefill_error,
        "seen_error": found.seen_error,
        "noise": found.noise,
        "step": {
            "weights_ms": step.weights_ms,
            "token_ms": step.token_ms,
            "context_ms": step.context_ms,
            "pair_ms": step.pair_ms,
            "head_ms": step.head_ms,
            "sequence_ms": step.sequence_ms,
            "host_ms": step.host_ms,
            "host_sequence_ms": step.host_sequence_ms,
            "after_ms": step.after_ms,
            "gap_ms": step.gap_ms,
            "roofline": step.roofline.value,
            "dense": step.dense,
        },
        "sentence": found.sentence(),
    }


def _rows(found: Fit) -> list[tuple[str, Estimate, str]]:
    return [
        ("decode: share of the bandwidth", found.decode_share, "%"),
        ("MBU: reads of the weights alone", found.mbu, "%"),
        ("MFU: tokens through the layers", found.mfu, "%"),
        ("host overhead of a step", found.host_ms, "ms"),
    ]


def _range(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"

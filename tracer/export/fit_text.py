"""A calibration as a printed table and as a JSON document."""

from __future__ import annotations

import math
from typing import Any

from tracer.analysis.beside.observed import Observed
from tracer.analysis.fit.fit import Estimate, Fit
from tracer.export.fields import fields
from tracer.export.page import Page
from tracer.format import figures


def fit_text(
    found: Fit, seen: Observed, *, kept: str = "", width: int = 100, unicode: bool = True
) -> str:
    """Return what the steps say, how sure that is, and how well it holds for steps that were not
    fitted. `kept`: the file that the screens read it from, if there is one."""
    page, engine = Page(width, unicode), seen.engine
    name = f"{engine.name} {engine.version}".strip()
    model = engine.model.rstrip("/").rsplit("/", 1)[-1]
    page.wrapped(
        f"{name}, {model} {engine.dtype} on {found.device.title}: {found.steps:,} steps of "
        f"{len(seen.arrivals):,} requests"
    )
    page.line()
    page.wrapped(found.sentence())
    page.line()
    page.row(("", -34), ("value", 9), ("   90 % of resamples", -26))
    for label, estimate, unit in _rows(found):
        scale = 100.0 if unit == "%" else 1.0
        value, low, high = (
            figures.significant(each * scale)
            for each in (estimate.value, estimate.low, estimate.high)
        )
        page.row((label, -34), (value, 9), (f"   {low} … {high} {unit}", -26))
    page.line()
    page.row(("median error", -34), ("steps", 9), ("prompts", 10))
    errors = figures.percentage(found.step_error), figures.percentage(found.prefill_error)
    page.row(("on steps not used for it", -34), (errors[0], 9), (errors[1], 10))
    page.row(("on steps that were fitted", -34), (figures.percentage(found.seen_error), 9))
    page.line()
    page.wrapped(
        f"Equal steps of this trace differ by about {figures.percentage(math.expm1(found.noise))} "
        "(one standard deviation): no prediction of a single step can be better than that."
    )
    if seen.left_out:
        page.wrapped(f"{seen.left_out:,} unfinished requests are left out of the figures.")
    if kept:
        page.wrapped(f"Kept in {kept}: the expected values of this engine use it.")
    return page.text()


def fit_document(found: Fit, seen: Observed) -> dict[str, Any]:
    """Return everything the fit says. Times in ms, shares 0-1 (of a CPU above 1 where its units for
    a dtype beat the yardstick); null where there is no such number."""
    device = found.device
    return {
        "engine": fields(seen.engine, "name version model dtype device"),
        "device": {
            **fields(device, "name title"),
            "flops": device.peak(found.model.compute_dtype),
            **fields(device, "bandwidth source"),
        },
        "steps": found.steps,
        "requests": len(seen.arrivals),
        "left_out": seen.left_out,
        **{
            name: fields(getattr(found, name), "value low high")
            for name in ("mfu", "mbu", "host_ms", "decode_share")
        },
        **fields(found, "step_error prefill_error seen_error noise"),
        "step": fields(
            found.step,
            "weights_ms token_ms context_ms pair_ms head_ms sequence_ms host_ms host_sequence_ms "
            "after_ms gap_ms roofline dense",
        ),
        "sentence": found.sentence(),
    }


def _rows(found: Fit) -> list[tuple[str, Estimate, str]]:
    return [
        ("decode: share of the bandwidth", found.decode_share, "%"),
        ("MBU: reads of the weights alone", found.mbu, "%"),
        ("MFU: tokens through the layers", found.mfu, "%"),
        ("host overhead of a step", found.host_ms, "ms"),
    ]

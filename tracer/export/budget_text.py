"""The latency budget as a printed table and as a JSON document."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Final

from engine_hooks.protocol.stages import info
from tracer.analysis.budget.budget import Budget, sentence
from tracer.export.fields import fields, plain
from tracer.export.page import Page
from tracer.format import figures

_ms = functools.partial(figures.milliseconds, fine=True)

_BAR: Final = " ▏▎▍▌▋▊▉█"
_FEWEST_BAR: Final = 8
_COLUMNS: Final = 62
"""Cells of a row beside its bar."""
_LABEL: Final = 22
"""Cells of the labels below the table."""


def budget_text(made: Budget, *, width: int = 100, unicode: bool = True) -> str:
    """Return the table, what follows from it, and what it leaves out."""
    page, workload, model = Page(width, unicode), made.workload, made.model
    count = f" × {made.tp}" if made.tp > 1 else ""
    page.wrapped(
        f"{model.name} ({model.weight_dtype}) on {made.device.title}{count}: "
        f"{workload.prompt:,} tokens in ({workload.cached:,} cached), {workload.output:,} out, "
        f"batch {workload.batch:,}"
    )
    page.wrapped("modelled, not measured")
    page.line()
    _table(page, made)
    page.line()
    first, last, itl = map(_ms, (made.itl_first_ms, made.itl_last_ms, made.itl_ms))
    page.wrapped(f"TTFT {_ms(made.ttft_ms)} ms, ITL {itl} ms ({first} … {last}); {sentence(made)}")
    page.line()
    for label, value in _figures(made):
        if width >= 2 * _LABEL:
            page.wrapped(value, f"{label:<{_LABEL}}")
        else:
            page.line(label)
            page.wrapped(value, "  ")
    page.line()
    page.wrapped("assumptions:")
    for line in made.assumptions:
        page.wrapped(line, "- ")
    return page.text()


def _table(page: Page, made: Budget) -> None:
    def row(number: str, stage: str, ms: str, share: str, bound: str, bar: str = "") -> None:
        page.row((number, 3), (f" {stage}", -12), (ms, 11), (share, 8), (f"  {bound}", -26),
                 (bar, -max(1, room)))  # fmt: skip

    room = max(0, page.width - _COLUMNS)
    longest = max(row.ms for row in made.stages)
    row("", "stage", "ms", "share", "bound by")
    for stage in made.stages:
        length = stage.ms / longest if longest else 0.0
        share = "" if stage.share < 0.0005 else figures.percentage(stage.share)
        bar = _bar(length, room, page.unicode) if room >= _FEWEST_BAR else ""
        row(str(int(stage.stage)), info(stage.stage).label, _ms(stage.ms), share,
            stage.bound_by, bar)  # fmt: skip
    row("", "total", _ms(made.total_ms), "", "")


def _figures(made: Budget) -> Iterator[tuple[str, str]]:
    fits, along, workload = made.capacity, made.along, made.workload
    count, size = figures.count, figures.size
    here = made.ridge_batch_here
    where = (
        "never: the KV cache takes longer to read than a token to compute"
        if here is None
        else count(here)
    )
    peak = count(made.ridge_batch_peak)
    ridge = f"{count(made.ridge_batch)} sequences ({peak} at peak rates)"
    yield "ridge", f"{ridge}; with the contexts given {where}"
    blocks = -(-workload.prompt // fits.block_size)
    held = f"{size(along.kv)} for the prompt ({blocks:,} blocks of {fits.block_size})"
    reads = f"a step reads {size(made.step_kv_bytes)} for the batch"
    yield "KV cache", f"{size(fits.kv_bytes_per_token)} a token, {held}; {reads}"
    pool = "the weights leave no room on this device: add devices or quantise"
    if fits.fits:
        worst = f"{fits.users_worst_case:,} users of {fits.longest:,} tokens at worst"
        pool = f"{size(fits.pool_bytes)}: {worst}"
        if math.isfinite(fits.users_observed):
            pool += f", {count(fits.users_observed)} of {count(fits.mean_tokens)}"
    yield "KV pool", pool
    kept = f"text {size(along.text)} → ids {size(along.ids)} → residual {size(along.residual)}"
    out = f"KV {size(along.kv)} (stays) → {size(along.out)} a token out"
    yield "bytes along the way", f"{kept} → {out}"
    first = f"one for {workload.prompt - workload.cached:,} tokens of the prompt"
    head = f"LM head {figures.percentage(made.head_share)} of the FLOPs"
    yield "reads of the weights", f"{first}, then one for {workload.batch:,} a step; {head}"


def _bar(share: float, room: int, unicode: bool) -> str:
    if not unicode:
        return "#" * round(share * room)
    eighths = round(share * room * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + _BAR[eighths % 8].strip()


def budget_document(made: Budget) -> dict[str, Any]:
    """Return everything the budget says. Times in ms, sizes in bytes; null where there is no such
    number."""
    workload, fits, along, model = made.workload, made.capacity, made.along, made.model
    spec = workload.speculation
    return {
        "modelled": True,
        "model": fields(
            model,
            "name params active_params layers hidden vocab weight_bytes weight_dtype compute_dtype "
            "kv_dtype kv_bytes_per_token",
            tied_head="tied", experts="experts", experts_per_token="experts_per_token",
        ),
        "device": {
            **fields(made.device, "name title"),
            "count": made.tp,
            "flops": made.device.peak(model.compute_dtype),
            **fields(made.device, "bandwidth memory source"),
        },
        "efficiency": {
            **fields(made.efficiency, "mfu mbu host_ms host_us roofline"),
            **fields(made, count="counting", ignore_kv="ignore_kv"),
        },
        "workload": {
            **fields(workload, "prompt cached output batch context chunk"),
            "speculation": None if spec is None else fields(
                spec, "draft accept cost tokens_per_step"
            ),
        },
        "stages": {
            row.stage.id: {
                "number": int(row.stage),
                **fields(row, "ms share bound_by detail flops bytes arithmetic_ms bandwidth_ms"),
            }
            for row in made.stages
        },
        **fields(
            made, "ttft_ms itl_ms itl_first_ms itl_last_ms total_ms", decode_steps="steps",
            prefill_chunks="chunks", ridge_batch="ridge_batch", ridge_batch_peak="ridge_batch_peak",
            ridge_batch_here="ridge_batch_here", kv_even_batch="kv_even_batch",
        ),
        "kv_bytes": plain(along.kv),
        **fields(made, "step_kv_bytes logits_bytes", lm_head_share="head_share"),
        "bytes_along": fields(along, "text ids residual kv", out_per_token="out"),
        "kv_blocks": -(-workload.prompt // fits.block_size),
        **fields(fits, block_size="block_size", kv_pool_bytes="pool_bytes"),
        **fields(fits, "users_worst_case longest users_observed mean_tokens fits"),
        "sentence": sentence(made),
        "assumptions": list(made.assumptions),
    }  # fmt: skip

"""The latency budget as a printed table and as a JSON document."""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

from engine_hooks.protocol.stages import info
from tracer.analysis.budget.budget import Budget, sentence
from tracer.analysis.budget.options import budget_of
from tracer.format.text import clean, fit

_BAR: Final = " ▏▎▍▌▋▊▉█"
_FEWEST_BAR: Final = 8
_COLUMNS: Final = 62
"""Cells of a row beside its bar."""
_LABEL: Final = 21
"""Cells of the labels below the table."""


def budget_main(
    options: argparse.Namespace, *, width: int = 100, unicode: bool = True
) -> tuple[str, dict[str, Any]]:
    """``tracer budget``: the text for people and the document for programs. `options` as
    `analysis.options.add_arguments` defines them. Raises AnalysisError with one line for the
    user."""
    made = budget_of(options)
    return budget_text(made, width=width, unicode=unicode), budget_document(made)


# --- text -----------------------------------------------------------------------------------------


def budget_text(made: Budget, *, width: int = 100, unicode: bool = True) -> str:
    """The table, what follows from it, and what it leaves out; rows fit `width` cells."""
    workload, model = made.workload, made.model
    title = clean(f"{model.name} ({model.weight_dtype}) on {made.device.title}")
    if made.tp > 1:
        title += f" × {made.tp}"
    asked = f"{workload.prompt:,} tokens in ({workload.cached:,} cached), {workload.output:,} out"
    plain = _as_is if unicode else _ascii
    lines = [*_wrapped(plain(f"{title}: {asked}, batch {workload.batch:,}"), width)]
    lines += [*_wrapped("modelled, not measured", width), ""]
    lines.append(fit(f"    {'stage':<11}{'ms':>11} {'share':>6}  {'bound by':<22}", width).rstrip())
    longest = max(row.ms for row in made.stages)
    room = max(0, width - _COLUMNS)
    for row in made.stages:
        bar = (
            _bar(row.ms / longest if longest else 0.0, room, unicode) if room >= _FEWEST_BAR else ""
        )
        label = info(row.stage).label
        text = (
            f"{int(row.stage):>3} {label:<11}{_ms(row.ms):>11} {_share(row.share):>6}  "
            f"{row.bound_by}"
        )
        lines.append((fit(text, min(width, _COLUMNS - 2)) + bar).rstrip())
    lines.append(fit(f"    {'total':<11}{_ms(made.total_ms):>11}", width).rstrip())
    pace = f"{_ms(made.itl_first_ms)} … {_ms(made.itl_last_ms)}"
    said = f"TTFT {_ms(made.ttft_ms)} ms, ITL {_ms(made.itl_ms)} ms ({pace}); {sentence(made)}"
    lines += ["", *_wrapped(plain(said), width), ""]
    indent = _LABEL if width >= 2 * _LABEL else 2
    for label, value in _figures(made):
        lines += _wrapped(plain(f"{label:<{indent}} {value}"), width, indent=indent + 1)
    lines += ["", *_wrapped("what this takes for granted:", width)]
    for line in made.assumptions:
        lines += _wrapped(plain(f"- {line}"), width, indent=2)
    return "\n".join(lines)


def _figures(made: Budget) -> list[tuple[str, str]]:
    fits, along = made.capacity, made.along
    here = made.ridge_batch_here
    ridge = (
        f"{made.ridge_batch:,.0f} sequences ({made.ridge_batch_peak:,.0f} at peak rates); with the "
        "contexts given "
    )
    ridge += (
        "never: the KV cache takes longer to read than a token to compute"
        if here is None
        else f"{here:,.0f}"
    )
    pool = (
        f"{fits.pool_bytes / 2**30:,.1f} GiB: {fits.users_worst_case:,} users of {fits.longest:,} "
        "tokens at worst"
    )
    if math.isfinite(fits.users_observed):
        pool += f", {fits.users_observed:,.0f} of {fits.mean_tokens:,.0f}"
    held = -(-made.workload.prompt // fits.block_size)
    return [
        ("ridge", ridge),
        (
            "KV cache",
            f"{fits.kv_bytes_per_token:,.0f} bytes a token, {_bytes(along.kv)} for the prompt "
            f"({held:,} "
            f"blocks of {fits.block_size}); the batch reads {_bytes(made.step_kv_bytes)} a step",
        ),
        (
            "KV pool",
            pool
            if fits.fits
            else "the weights leave no room on this device: add devices or quantise",
        ),
        (
            "bytes along the way",
            f"text {_bytes(along.text)} → ids {_bytes(along.ids)} → residual "
            f"{_bytes(along.residual)} → KV {_bytes(along.kv)} (stays) → {along.out:.0f} bytes a "
            "token out",
        ),
        (
            "reads of the weights",
            f"one for {made.workload.prompt - made.workload.cached:,} tokens of the prompt, then "
            f"one for {made.workload.batch:,} a step; LM head {made.head_share:.1%} of the FLOPs",
        ),
    ]


def _bar(share: float, room: int, unicode: bool) -> str:
    if not unicode:
        return "#" * round(share * room)
    eighths = round(share * room * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + _BAR[eighths % 8].strip()


def _ms(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.3f}"


def _share(value: float) -> str:
    return "" if value < 0.0005 else f"{value:.1%}"


def _bytes(value: float) -> str:
    if value >= 2**30 / 10:
        return f"{value / 2**30:,.3g} GiB"
    return f"{value / 1e6:,.3g} MB" if value >= 1e5 else f"{value / 1e3:,.3g} kB"


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    import textwrap

    return textwrap.wrap(
        text, max(indent + 1, width), subsequent_indent=" " * indent, break_long_words=True
    ) or [""]


_PLAIN: Final = {"→": "->", "×": "x", "·": "*", "²": "^2", "…": "..", "√": "sqrt", "−": "-"}


def _as_is(text: str) -> str:
    return text


def _ascii(text: str) -> str:
    for sign, plain in _PLAIN.items():
        text = text.replace(sign, plain)
    return text.encode("ascii", "replace").decode("ascii")


# --- JSON -----------------------------------------------------------------------------------------


def budget_document(made: Budget) -> dict[str, Any]:
    """Everything the budget says. Times in ms, sizes in bytes; null where there is no such
    number."""
    workload, fits, along, model, tuned = (
        made.workload,
        made.capacity,
        made.along,
        made.model,
        made.efficiency,
    )
    spec = workload.speculation
    document = {
        "modelled": True,
        "model": {
            "name": clean(model.name),
            "params": model.params,
            "active_params": model.active_params,
            "layers": model.layers,
            "hidden": model.hidden,
            "vocab": model.vocab,
            "weight_bytes": model.weight_bytes,
            "weight_dtype": model.weight_dtype,
            "compute_dtype": model.compute_dtype,
            "kv_dtype": model.kv_dtype,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "tied_head": model.tied,
            "experts": model.experts,
            "experts_per_token": model.experts_per_token,
        },
        "device": {
            "name": made.device.name,
            "title": made.device.title,
            "count": made.tp,
            "flops": made.device.peak(model.compute_dtype),
            "bandwidth": made.device.bandwidth,
            "memory": made.device.memory,
            "source": made.device.source,
        },
        "efficiency": {
            "mfu": tuned.mfu,
            "mbu": tuned.mbu,
            "host_ms": tuned.host_ms,
            "host_us": tuned.host_us,
            "roofline": tuned.roofline.value,
            "count": made.counting.value,
            "ignore_kv": made.ignore_kv,
        },
        "workload": {
            "prompt": workload.prompt,
            "cached": workload.cached,
            "output": workload.output,
            "batch": workload.batch,
            "context": workload.context,
            "chunk": workload.chunk,
            "speculation": None
            if spec is None
            else {
                "draft": spec.draft,
                "accept": spec.accept,
                "cost": spec.cost,
                "tokens_per_step": spec.tokens_per_step,
            },
        },
        "stages": {
            row.stage.id: {
                "number": int(row.stage),
                "ms": row.ms,
                "share": row.share,
                "bound_by": row.bound_by,
                "detail": row.detail,
                "flops": row.flops,
                "bytes": row.bytes,
                "arithmetic_ms": row.arithmetic_ms,
                "bandwidth_ms": row.bandwidth_ms,
            }
            for row in made.stages
        },
        "ttft_ms": made.ttft_ms,
        "itl_ms": made.itl_ms,
        "itl_first_ms": made.itl_first_ms,
        "itl_last_ms": made.itl_last_ms,
        "total_ms": made.total_ms,
        "decode_steps": made.steps,
        "prefill_chunks": made.chunks,
        "ridge_batch": made.ridge_batch,
        "ridge_batch_peak": made.ridge_batch_peak,
        "ridge_batch_here": made.ridge_batch_here,
        "kv_even_batch": made.kv_even_batch,
        "kv_bytes": along.kv,
        "step_kv_bytes": made.step_kv_bytes,
        "logits_bytes": made.logits_bytes,
        "lm_head_share": made.head_share,
        "bytes_along": {
            "text": along.text,
            "ids": along.ids,
            "residual": along.residual,
            "kv": along.kv,
            "out_per_token": along.out,
        },
        "kv_blocks": -(-workload.prompt // fits.block_size),
        "block_size": fits.block_size,
        "kv_pool_bytes": fits.pool_bytes,
        "users_worst_case": fits.users_worst_case,
        "longest": fits.longest,
        "users_observed": fits.users_observed,
        "mean_tokens": fits.mean_tokens,
        "fits": fits.fits,
        "sentence": sentence(made),
        "assumptions": list(made.assumptions),
    }
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in document.items()}  # fmt: skip

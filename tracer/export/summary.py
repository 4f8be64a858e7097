"""The words and figures around a picture of a trace: what qualifies it, and its totals."""

from __future__ import annotations

import datetime
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stamps import set_aside_line
from tracer.export.jsondoc import main_engine
from tracer.export.whole import Totals, Whole
from tracer.format import figures
from tracer.format.text import clean
from tracer.state.metrics.histogram import Quantiles

TIMERS: Final = {
    "queue": "queue", "prefill": "prefill", "ttft": "TTFT", "itl": "ITL", "tpot": "TPOT",
    "e2e": "E2E",
}  # fmt: skip
"""Latencies by their names in a snapshot, as they are labelled."""


def context(whole: Whole) -> list[str]:
    """Return what qualifies the figures: engine, model, device, load, caching, window; cleaned."""
    snapshot = whole.snapshot
    engine, about, losses = main_engine(snapshot), snapshot.context, snapshot.losses
    parts: list[str] = []
    if engine is not None:
        is_path = engine.model.startswith("/")
        model = engine.model.rstrip("/").rpartition("/")[2] if is_path else engine.model
        parts += [f"{engine.name or engine.title} {engine.version}", f"{model} {engine.dtype}"]
        parts.append(engine.device)
    parts.append(f"{figures.rate(about.request_rate)} req/s")
    parts.append(f"{max((level for _, level in whole.in_flight()), default=0):,} at once at most")
    parts.append(switch("prefix cache", about.prefix_caching))
    parts.append(switch("chunked prefill", about.chunked_prefill))
    parts.append(f"{max(0, whole.now - whole.began) / NS_PER_S:,.1f} s")
    if whole.anchor is not None and whole.anchor.wall > 0:
        # UTC, so that the same trace gives the same page everywhere
        began = datetime.datetime.fromtimestamp(whole.wall(whole.began) // NS_PER_S, datetime.UTC)
        parts.append(f"from {began:%Y-%m-%d %H:%M:%S} UTC")
    if losses.events or losses.incomplete_requests:
        parts.append(
            f"{losses.events:,} events lost, {losses.incomplete_requests:,} requests incomplete"
        )
    if losses.set_aside:
        parts.append(set_aside_line(losses.set_aside))
    return [text for part in parts if (text := clean(part).strip())]


def switch(name: str, on: bool | None) -> str:
    """Return a setting in words, nothing where it is not known."""
    return "" if on is None else f"{name} {'on' if on else 'off'}"


def totals_line(totals: Totals) -> str:
    noun = "request" if totals.requests == 1 else "requests"
    return (
        f"{totals.requests:,} {noun}, {totals.finished:,} finished · {totals.prompt_tokens:,} "
        f"prompt tokens → {totals.output_tokens:,} output tokens · {totals.steps:,} steps"
    )


def quantiles(timer: Quantiles | None) -> tuple[str, str, str]:
    if timer is None:
        return (figures.UNKNOWN,) * 3
    p50, p95, p99 = map(figures.milliseconds, (timer.p50, timer.p95, timer.p99))
    return p50, p95, p99

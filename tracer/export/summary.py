"""The words and figures around a picture of a trace: what qualifies it, and its totals. For the
page and the SVG."""

from __future__ import annotations

import datetime
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stamps import set_aside_line
from tracer.export.jsondoc import main_engine
from tracer.export.whole import Totals, Whole
from tracer.format.text import clean
from tracer.state.metrics.histogram import Quantiles

TIMERS: Final = (
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("ttft", "TTFT"),
    ("itl", "ITL"),
    ("tpot", "TPOT"),
    ("e2e", "E2E"),
)


def context(whole: Whole) -> list[str]:
    """What qualifies the figures: engine, model, device, load, caching, window; cleaned."""
    snapshot = whole.snapshot
    engine, about = main_engine(snapshot), snapshot.context
    parts: list[str] = []
    if engine is not None:
        model = (
            engine.model.rstrip("/").rpartition("/")[2]
            if engine.model.startswith("/")
            else engine.model
        )
        parts += [
            f"{engine.name or engine.title} {engine.version}",
            f"{model} {engine.dtype}",
            engine.device,
        ]
    seconds = max(0, whole.now - whole.began) / NS_PER_S
    parts.append(f"{about.request_rate:.2f} req/s")
    parts.append(f"{peak(whole):,} at once at most")
    for name, on in (
        ("prefix cache", about.prefix_caching),
        ("chunked prefill", about.chunked_prefill),
    ):
        if on is not None:
            parts.append(f"{name} {'on' if on else 'off'}")
    parts.append(f"{seconds:,.1f} s")
    if whole.anchor is not None and whole.anchor.wall > 0:
        # UTC, so that the same trace gives the same page everywhere
        began = datetime.datetime.fromtimestamp(whole.wall(whole.began) // NS_PER_S, datetime.UTC)
        parts.append(f"from {began:%Y-%m-%d %H:%M:%S} UTC")
    losses = snapshot.losses
    if losses.events or losses.incomplete_requests:
        parts.append(
            f"{losses.events:,} events lost, {losses.incomplete_requests:,} requests incomplete"
        )
    if losses.set_aside:
        parts.append(set_aside_line(losses.set_aside))
    return [text for part in parts if (text := clean(part).strip())]


def peak(whole: Whole) -> int:
    """How many requests were there at once at most."""
    changes = [(row.view.received, 1) for row in whole.requests]
    changes += [(row.view.closed, -1) for row in whole.requests if row.view.closed is not None]
    level = most = 0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


def totals_line(totals: Totals) -> str:
    """The sums in one line."""
    noun = "request" if totals.requests == 1 else "requests"
    return (
        f"{totals.requests:,} {noun}, {totals.finished:,} finished · {totals.prompt_tokens:,} "
        "prompt tokens → "
        f"{totals.output_tokens:,} output tokens · {totals.steps:,} steps"
    )


def figure(ms: float | None) -> str:
    """Milliseconds with three significant figures, or all before the point; a dash for what is not
    known."""
    if ms is None:
        return "–"
    if ms >= 99.95:
        return f"{ms:,.0f}"
    return f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}"


def quantiles(timer: Quantiles | None) -> tuple[str, str, str]:
    """p50, p95, p99 as figures."""
    if timer is None:
        return ("–", "–", "–")
    return figure(timer.p50), figure(timer.p95), figure(timer.p99)

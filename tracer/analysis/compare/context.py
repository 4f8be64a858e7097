"""What qualifies the figures of one trace: engine, load and settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stamps import set_aside_line
from tracer.format import figures
from tracer.state.view import EngineView, RequestView, Snapshot

LOADED_QUEUE: Final = 0.25
"""*Loaded*: waiting for admission is this share of all time to the first token, or more, and the
engine is *shared*: one that lets its only request wait (a poll, a first start) is not loaded."""
LOADED_PREEMPTED: Final = 0.1
"""*Loaded* as well: this share of the requests was preempted at least once."""
SHARED: Final = 1.5
"""*Shared*: a request was one of so many open ones, on the average over its life. Below it the
engine was *idle*."""
WARM: Final = 0.1
"""*Warm*: this share of the prompts' tokens was found in the prefix cache."""
APART: Final = 1.5
"""Request rates and concurrencies that differ by this factor are reported."""
HITS_APART: Final = 0.1
"""So are shares of tokens found in the prefix cache that differ by this much."""
_SETTINGS: Final = (
    ("name", "engine"), ("version", "engine version"), ("model", "model"), ("dtype", "weights"),
    ("device", "device"), ("max_batch", "largest batch"),
    ("max_batch_tokens", "token budget of a step"), ("num_blocks", "KV blocks"),
    ("block_size", "block size"),
)  # fmt: skip
_SWITCHES: Final = (("prefix_caching", "prefix caching"), ("chunked_prefill", "chunked prefill"))
_FACTS: Final = (
    ("threads", "threads"), ("tensor_parallel", "tensor parallel"), ("cuda_graphs", "CUDA graphs"),
    ("compiled", "compilation"), ("attention", "attention"),
    ("async_batching", "asynchronous batching"),
)  # fmt: skip
"""Fields of an engine's view, and of its facts, and what they are called."""


@dataclass(frozen=True, slots=True)
class Context:
    """One trace, as its figures are labelled. Rates are a second; `None` is not known.

    `requests` received in the window; `concurrency` requests open on the average over it, `peak` at
    most; `company` open ones that a request was one of, on the average over its life. `queue_share`
    of TTFT, `hit_share` of prompt tokens, 0-1. `set_aside`: events whose time contradicts the
    others.
    """

    name: str
    window_s: float
    requests: int
    request_rate: float
    concurrency: float
    peak: int
    company: float
    queue_share: float | None
    hit_share: float | None
    preempted_share: float
    engine: EngineView | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    lost_events: int = 0
    set_aside: int = 0

    @property
    def engine_name(self) -> str:
        if self.engine is None:
            return "engine unknown"
        parts = (
            f"{self.engine.name or self.engine.title} {self.engine.version}",
            self.model,
            self.engine.device,
        )
        return " ".join(" ".join(part.split()) for part in parts if part.strip())

    @property
    def model(self) -> str:
        """Name of the model without its folder or owner, and the type of its weights."""
        if self.engine is None:
            return ""
        return f"{self.engine.model.rstrip('/').rsplit('/', 1)[-1]} {self.engine.dtype}".strip()

    @property
    def kind(self) -> str:
        """``cold and idle``, ``warm and shared``, ``loaded`` …: see the constants of the module."""
        if not self.requests:
            return "no requests"
        waited = self.queue_share is not None and self.queue_share >= LOADED_QUEUE
        waited = waited and self.company >= SHARED
        if waited or self.preempted_share >= LOADED_PREEMPTED:
            return "loaded"
        warm = self.hit_share is not None and self.hit_share >= WARM
        return f"{'warm' if warm else 'cold'} and {'shared' if self.company >= SHARED else 'idle'}"


def of_snapshot(
    name: str, snapshot: Snapshot, views: Sequence[RequestView], begin: int | None, until: int
) -> Context:
    """Return the context of a snapshot, of the `views` in it that were received from `begin` to
    `until` (ns)."""
    told = [view for view in snapshot.engines if view.name]
    inner = [view for view in told if view.role in ("engine", "core")]
    return replace(
        of_views(name, views, begin=begin, until=until),
        engine=next(iter(inner or told or list(snapshot.engines)), None),
        prefix_caching=snapshot.context.prefix_caching,
        chunked_prefill=snapshot.context.chunked_prefill,
        lost_events=snapshot.losses.events,
        set_aside=snapshot.losses.set_aside,
    )


def of_views(
    name: str, views: Sequence[RequestView], *, begin: int | None = None, until: int | None = None
) -> Context:
    """Return the context that views alone tell: load, but not the engine. The window goes from
    `begin` to `until` (ns); not given, from the first request to the last end."""
    ends = (view.received if view.closed is None else view.closed for view in views)
    until = max(ends, default=0) if until is None else until
    since = min((view.received for view in views), default=until) if begin is None else begin
    window = max(0, until - since)
    spans = [
        (max(since, view.received), min(until, until if view.closed is None else view.closed))
        for view in views
    ]
    mean, peak, company = _load([(a, b) for a, b in spans if b > a], window)
    waited, first = _sums((view.queue_ms, view.ttft_ms) for view in views)
    cached, prompt = _sums((view.cached_tokens, view.prompt_tokens) for view in views)
    preempted = sum(view.preemptions > 0 for view in views)
    return Context(
        name,
        window / NS_PER_S,
        len(views),
        request_rate=len(views) / (window / NS_PER_S) if window else 0.0,
        concurrency=mean,
        peak=peak,
        company=company,
        queue_share=waited / first if first else None,
        hit_share=cached / prompt if prompt else None,
        preempted_share=preempted / len(views) if views else 0.0,
    )


def _sums(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float, float]:
    """Return the sums of both numbers over the pairs of which both are known."""
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return sum(a for a, _ in known), sum(b for _, b in known)


def _load(spans: Sequence[tuple[int, int]], window: int) -> tuple[float, int, float]:
    """Return the open requests: mean over the window, the most, how many a request was one of."""
    if not spans or window <= 0:
        return 0.0, len(spans), 0.0
    times = np.array([t for span in spans for t in span], np.float64)
    changes = np.array([change for _ in spans for change in (1, -1)])
    order = np.lexsort((changes, times))
    times, opened = times[order], np.cumsum(changes[order])
    lengths = np.diff(times) / NS_PER_MS
    held = opened[:-1]
    area = float((held * lengths).sum())
    company = float((held * held * lengths).sum()) / area if area else 0.0
    return area * NS_PER_MS / window, int(opened.max()), company


def warnings(bases: tuple[Context, Context], letters: tuple[str, str]) -> list[str]:
    """Return what makes a comparison of two contexts unfair, a sentence each, the gravest first.
    `letters`: what their columns are called."""
    one, other = bases
    in_a, in_b = letters
    found: list[str] = []
    if one.engine is not None and other.engine is not None:
        facts = dict(one.engine.facts), dict(other.engine.facts)
        engines = one.engine, other.engine
        settings = [(label, [getattr(each, name) for each in engines]) for name, label in _SETTINGS]
        settings += [(label, [each.get(name) for each in facts]) for name, label in _FACTS]
        found += [
            f"{label} differs: {_text(before)} in {in_a}, {_text(after)} in {in_b}"
            for label, (before, after) in settings
            if before not in (None, "") and after not in (None, "") and before != after
        ]
    for name, label in _SWITCHES:
        before, after = getattr(one, name), getattr(other, name)
        if before is not None and after is not None and before != after:
            on, off = (in_a, in_b) if before else (in_b, in_a)
            found.append(f"{label} is on in {on}, off in {off}")
        elif name == "prefix_caching" and (before is None) != (after is None):
            found.append(f"{label} is not known for {in_a if before is None else in_b}")
    if one.kind != other.kind and one.requests and other.requests:
        found.append(f"contexts differ: {in_a} is {one.kind}, {in_b} is {other.kind}")
    before, after = one.hit_share, other.hit_share
    if before is not None and after is not None and abs(before - after) >= HITS_APART:
        found.append(
            f"prefix cache hits differ: {figures.percentage(before)} of prompt tokens in {in_a}, "
            f"{figures.percentage(after)} in {in_b}; prefill differs by reuse too"
        )
    for label, before, after, unit in (
        ("request rates", one.request_rate, other.request_rate, " req/s"),
        ("concurrencies", one.concurrency, other.concurrency, ""),
    ):
        if before > 0 and after > 0 and not 1 / APART < after / before < APART:
            found.append(
                f"{label} differ: {before:.2g}{unit} in {in_a}, {after:.2g}{unit} in {in_b}"
            )
    for context, letter in zip(bases, letters, strict=True):
        if context.lost_events:
            found.append(
                f"{letter} lost {context.lost_events:,} events: its figures may be too low"
            )
        if context.set_aside:
            found.append(f"{letter}: {set_aside_line(context.set_aside)}")
    return found


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)

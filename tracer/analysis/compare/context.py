"""What qualifies the figures of one trace: engine, load and settings, and what kind of context that
is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stamps import set_aside_line
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, RequestView

LOADED_QUEUE: Final = 0.25
"""*Loaded*: waiting for admission is this share of all time to the first token, or more, and the
engine is *shared*: one that lets its only request wait (a poll, a first start) is not loaded."""
LOADED_PREEMPTED: Final = 0.1
"""*Loaded* as well: this share of the requests lost their place at least once."""
SHARED: Final = 1.5
"""*Shared*: a request was one of so many open ones, on the average over its life. Below it the
engine was *idle*."""
WARM: Final = 0.1
"""*Warm*: this share of the prompts' tokens was found in the prefix cache."""
APART: Final = 1.5
"""Request rates and concurrencies that differ by this factor are told."""
HITS_APART: Final = 0.1
"""So are shares of tokens found in the prefix cache that differ by this much."""
_SETTINGS: Final = (
    ("name", "engine"),
    ("version", "engine version"),
    ("model", "model"),
    ("dtype", "weights"),
    ("device", "device"),
    ("max_batch", "largest batch"),
    ("max_batch_tokens", "token budget of a step"),
    ("num_blocks", "KV blocks"),
    ("block_size", "block size"),
)
_SWITCHES: Final = (("prefix_caching", "prefix caching"), ("chunked_prefill", "chunked prefill"))
_FACTS: Final = (
    ("threads", "threads"),
    ("tensor_parallel", "tensor parallel"),
    ("cuda_graphs", "CUDA graphs"),
    ("compiled", "compilation"),
    ("attention", "attention"),
    ("async_batching", "asynchronous batching"),
)


@dataclass(frozen=True, slots=True)
class Context:
    """One trace, as its figures are labelled. Rates are a second; `None` is not known.

    `concurrency` requests open on the average over the window, `peak` at most; `company` open ones
    that a request was one of, on the average over its life. `queue_share` of TTFT, `hit_share` of
    prompt tokens, 0-1.
    """

    name: str
    engine: EngineView | None
    prefix_caching: bool | None
    chunked_prefill: bool | None
    window_s: float
    requests: int
    """Received in the window."""
    request_rate: float
    concurrency: float
    peak: int
    company: float
    queue_share: float | None
    hit_share: float | None
    preempted_share: float
    lost_events: int = 0
    set_aside: int = 0
    """Events whose time contradicts the others."""

    @property
    def engine_name(self) -> str:
        """Engine and version, model, device: what ran."""
        if self.engine is None:
            return "engine not told"
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
        """``cold and idle``, ``warm and shared``, ``loaded`` …: see the constants of this module
        for the rule."""
        if not self.requests:
            return "no requests"
        waited = self.queue_share is not None and self.queue_share >= LOADED_QUEUE
        waited = waited and self.company >= SHARED
        if waited or self.preempted_share >= LOADED_PREEMPTED:
            return "loaded"
        warm = self.hit_share is not None and self.hit_share >= WARM
        return f"{'warm' if warm else 'cold'} and {'shared' if self.company >= SHARED else 'idle'}"


def of_state(
    name: str, state: TraceState, *, begin: int | None = None, end: int | None = None
) -> Context:
    """The context of a state, of what was received from `begin` to before `end` (ns) where
    given."""
    snapshot = state.snapshot(window_s=math.inf)
    told = [view for view in snapshot.engines if view.name]
    inner = [view for view in told if view.role in ("engine", "core")]
    engine = next(iter(inner or told or list(snapshot.engines)), None)
    views = [
        view
        for view in snapshot.requests
        if (begin is None or view.received >= begin) and (end is None or view.received < end)
    ]
    until = state.now if end is None else min(end, state.now)
    context = snapshot.context
    losses = snapshot.losses
    return _made(
        name,
        views,
        engine,
        context.prefix_caching,
        context.chunked_prefill,
        begin,
        until,
        losses.events,
        losses.set_aside,
    )


def of_views(name: str, views: Sequence[RequestView]) -> Context:
    """The context that views alone tell: load, but not the engine."""
    until = max(
        (view.received if view.closed is None else view.closed for view in views), default=0
    )
    return _made(name, views, None, None, None, None, until, 0)


def _made(
    name: str, views: Sequence[RequestView], engine: EngineView | None, prefix_caching: bool | None,
    chunked_prefill: bool | None, begin: int | None, until: int, lost: int, set_aside: int = 0,
) -> Context:  # fmt: skip
    since = min((view.received for view in views), default=until) if begin is None else begin
    window = max(0, until - since)
    spans = [
        (max(since, view.received), min(until, until if view.closed is None else view.closed))
        for view in views
    ]
    mean, peak, company = _load([(a, b) for a, b in spans if b > a], window)
    waits = [(view.queue_ms, view.ttft_ms) for view in views]
    waited = sum(queue for queue, ttft in waits if queue is not None and ttft is not None)
    first = sum(ttft for queue, ttft in waits if queue is not None and ttft is not None)
    tokens = [(view.prompt_tokens, view.cached_tokens) for view in views]
    prompt = sum(size for size, cached in tokens if size is not None and cached is not None)
    cached = sum(found for size, found in tokens if size is not None and found is not None)
    return Context(
        name=name,
        engine=engine,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked_prefill,
        window_s=window / NS_PER_S,
        requests=len(views),
        request_rate=len(views) / (window / NS_PER_S) if window else 0.0,
        concurrency=mean,
        peak=peak,
        company=company,
        queue_share=waited / first if first else None,
        hit_share=cached / prompt if prompt else None,
        preempted_share=sum(1 for view in views if view.preemptions) / len(views) if views else 0.0,
        lost_events=lost,
        set_aside=set_aside,
    )


def _load(spans: Sequence[tuple[int, int]], window: int) -> tuple[float, int, float]:
    """Open requests: mean over the window, the most, and how many a request was one of."""
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


def warnings(base: Context, other: Context) -> list[str]:
    """What makes a comparison of two contexts unfair, a sentence each, the gravest first."""
    found: list[str] = []
    a, b = base.engine, other.engine
    if a is not None and b is not None:
        facts_a, facts_b = dict(a.facts), dict(b.facts)
        pairs = [(label, getattr(a, name), getattr(b, name)) for name, label in _SETTINGS]
        pairs += [(label, facts_a.get(name), facts_b.get(name)) for name, label in _FACTS]
        for label, before, after in pairs:
            if before not in (None, "") and after not in (None, "") and before != after:
                found.append(
                    f"other {label}: {_said(before)} in {base.name}, {_said(after)} in {other.name}"
                )
    for name, label in _SWITCHES:
        before, after = getattr(base, name), getattr(other, name)
        if before is not None and after is not None and before != after:
            found.append(
                f"{label} {_switch(before)} in {base.name}, {_switch(after)} in {other.name}"
            )
        elif name == "prefix_caching" and (before is None) != (after is None):
            found.append(f"{label} is not told of {base.name if before is None else other.name}")
    if base.kind != other.kind and base.requests and other.requests:
        found.append(f"other context: {base.name} is {base.kind}, {other.name} is {other.kind}")
    if base.hit_share is not None and other.hit_share is not None \
            and abs(base.hit_share - other.hit_share) >= HITS_APART:  # fmt: skip
        found.append(
            f"the prefix cache held {base.hit_share:.0%} of the prompts' tokens in {base.name}, "
            f"{other.hit_share:.0%} in {other.name}: prefill differs by reuse too"
        )
    for label, before, after, unit in (
        ("request rate", base.request_rate, other.request_rate, " req/s"),
        ("concurrency", base.concurrency, other.concurrency, ""),
    ):
        if before > 0 and after > 0 and not 1 / APART < after / before < APART:
            found.append(
                f"other {label}: {before:.2g}{unit} in {base.name}, {after:.2g}{unit} in "
                f"{other.name}"
            )
    found += [
        f"{context.lost_events:,} events of {context.name} were lost: its figures may be short"
        for context in (base, other)
        if context.lost_events
    ]
    found += [f"{context.name}: {set_aside_line(context.set_aside)}"
              for context in (base, other) if context.set_aside]  # fmt: skip
    return found


def _said(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _switch(on: bool) -> str:
    return "on" if on else "off"

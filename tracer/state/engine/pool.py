"""The KV pool of an engine in figures: what a token and a request take, and how many more fit.

How many fit has two answers: the worst case, in which each grows to the longest context that the
model takes, and what the lengths that were seen so far allow. Engines admit by the second and
preempt when they were wrong. Both count what is free and what is only cached, since engines drop
the latter to make room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_S
from tracer.state.engine.admission import blocks_for
from tracer.state.engine.kv import CACHED
from tracer.state.view import EngineView, RequestView, Snapshot

AGES: Final = (10 * NS_PER_S, 60 * NS_PER_S)
"""Upper bounds (ns) of how long a block has been cached, but for the oldest class."""


@dataclass(frozen=True, slots=True)
class Pool:
    """`blocks` of `block_size` tokens, each `block_bytes`; None for what the engine did not tell.
    `available`: free or only cached. `token_bytes`: what a request grows by with each token; it
    takes memory block by block. `mean_held`: blocks of a request that holds any, shared ones
    counted for each. `longest`: tokens of the longest context, `longest_blocks` what it takes;
    `mean_tokens` and `mean_blocks` the same of the requests that are over. `fit_worst` and
    `fit_mean`: how many more of those fit into what is available."""

    blocks: int | None
    block_size: int | None
    block_bytes: int | None
    available: int | None
    token_bytes: float | None
    mean_held: float | None
    longest: int | None
    longest_blocks: int | None
    mean_tokens: float | None
    mean_blocks: int | None
    fit_worst: int | None
    fit_mean: int | None


def pool_of(engine: EngineView) -> Pool:
    """The figures of an engine's pool now."""
    size = engine.block_size or None
    available = None if engine.free is None else engine.free + (engine.cached or 0)
    told = dict(engine.facts).get("max_context")
    longest = told if isinstance(told, int) and told > 0 else None
    longest_blocks = blocks_for(longest, size) if longest and size else None
    mean_blocks = (
        max(1, blocks_for(round(engine.mean_tokens), size)) if engine.mean_tokens and size else None
    )
    return Pool(
        blocks=engine.num_blocks or None,
        block_size=size,
        block_bytes=engine.block_bytes or None,
        available=available,
        token_bytes=engine.block_bytes / size if engine.block_bytes and size else None,
        mean_held=engine.held / engine.holders if engine.holders else None,
        longest=longest,
        longest_blocks=longest_blocks,
        mean_tokens=engine.mean_tokens,
        mean_blocks=mean_blocks,
        fit_worst=None
        if available is None or longest_blocks is None
        else available // longest_blocks,
        fit_mean=None if available is None or mean_blocks is None else available // mean_blocks,
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks of a request's prompt: `hit` were found in the prefix cache, `computed` were not;
    `grown` hold what was generated. `tokens` of the prompt were found. `longest`: blocks at its
    output limit, None when not known."""

    hit: int
    computed: int
    grown: int
    tokens: int
    longest: int | None

    @property
    def prompt(self) -> int:
        """Blocks of the prompt."""
        return self.hit + self.computed


def prefix_of(view: RequestView, block_size: int | None) -> Prefix | None:
    """Which blocks of a request's prompt the prefix cache gave; None while that is not known."""
    if not block_size or view.prompt_tokens is None or view.reused_tokens is None:
        return None
    prompt = blocks_for(view.prompt_tokens, block_size)
    hit = min(prompt, view.reused_tokens // block_size)
    whole = blocks_for(view.prompt_tokens + max(0, view.output_tokens - 1), block_size)
    longest = (
        None
        if view.max_tokens is None
        else blocks_for(view.prompt_tokens + view.max_tokens, block_size)
    )
    return Prefix(hit, prompt - hit, max(0, whole - prompt), view.reused_tokens, longest)


def cached_ages(snapshot: Snapshot) -> tuple[int, ...] | None:
    """How many blocks have been cached for at most each of `AGES`, and for longer; None when blocks
    are not traced."""
    if not snapshot.kv_blocks:
        return None
    classes = age_classes(snapshot.kv_blocks, snapshot.kv_since, snapshot.now)
    counts = np.bincount(classes[classes >= 0], minlength=len(AGES) + 1)
    return tuple(int(count) for count in counts)


def age_classes(blocks: bytes, since: bytes, now: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """For each block of a map the class of its age, 0 the youngest; -1 for one that is not only
    cached."""
    states = np.frombuffer(blocks, np.uint8)
    classes = np.full(len(states), -1, np.int8)
    cached = np.flatnonzero(states == CACHED)
    if len(cached):
        began = np.frombuffer(since, "<i8") if since else np.zeros(0, np.int64)
        ages = now - began[cached]
        classes[cached] = np.searchsorted(np.array(AGES), ages, "left")
    return classes

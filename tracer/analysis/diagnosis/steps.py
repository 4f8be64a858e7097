"""The steps of one engine as columns, so that rules look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol.events import Step, Timing

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_LARGEST: Final = 1 << 61
"""No honest step has a larger number; two of these can be added."""


@dataclass(eq=False)
class StepTable:
    """Columns over the steps of one engine, oldest first. Times in ns; -1 where a value was not
    measured.

    `tokens_at` the instant at which a step's tokens were known; `sizes` members; `prefill` prompt
    tokens that it ran (recomputed ones included); `first` the index of the first step in the
    engine's history. The evidence, which knows the requests, fills in `prefilling` (members that
    ran prompt tokens), `owner` (index of the request with most of them, -1 for none), its
    `owner_tokens`, and `context` (tokens in the KV cache of all members).
    """

    steps: Sequence[Step]
    tokens_at: Ints
    sizes: Ints
    prefill: Ints
    first: int = 0

    def __post_init__(self) -> None:
        self._columns: dict[str, Ints] = {}
        self.prefilling: Ints = np.zeros(len(self), np.int64)
        self.owner: Ints = np.full(len(self), -1, np.int64)
        self.owner_tokens: Ints = np.zeros(len(self), np.int64)
        self.context: Floats = np.zeros(len(self))

    def __len__(self) -> int:
        return len(self.tokens_at)

    def column(self, name: str) -> Ints:
        """Return a field of the step events. What a hostile step has beyond `_LARGEST` is cut."""
        known = self._columns.get(name)
        if known is None:
            try:
                known = np.fromiter(map(attrgetter(name), self.steps), np.int64, len(self))
            except OverflowError:
                values = [min(max(getattr(step, name), -_LARGEST), _LARGEST) for step in self.steps]
                known = np.array(values, np.int64)
            known = self._columns[name] = np.clip(known, -_LARGEST, _LARGEST)
        return known

    @cached_property
    def begin(self) -> Ints:
        """When scheduling began."""
        return self.column("t")

    @cached_property
    def end(self) -> Ints:
        """When the step was over: its end, or the instant of its tokens if that is later."""
        out: Ints = np.maximum(self.begin + np.maximum(self.column("end"), 0), self.tokens_at)
        return out

    @cached_property
    def duration(self) -> Ints:
        """Start to end. With asynchronous batching steps overlap: see `interval`."""
        out: Ints = np.maximum(self.end - self.begin, 0)
        return out

    @cached_property
    def interval(self) -> Ints:
        """From the token of the step before to this one's: an ITL. 0 for the first step."""
        return np.diff(self.tokens_at, prepend=self.tokens_at[:1])

    @cached_property
    def gap(self) -> Ints:
        """Time before the step in which no step was in progress; 0 for the first."""
        out: Ints = np.maximum(self.begin - self._reached_before, 0)
        return out

    @cached_property
    def span(self) -> Ints:
        """From the end of all earlier steps (or its start) to its end."""
        reached = np.maximum.accumulate(self.end)
        out: Ints = np.maximum(reached - np.maximum(self.begin, self._reached_before), 0)
        return out

    @cached_property
    def _reached_before(self) -> Ints:
        """When all earlier steps were over; its own start for the first."""
        reached: Ints = np.maximum.accumulate(self.end)
        return np.concatenate([self.begin[:1], reached[:-1]])

    @cached_property
    def continuing(self) -> Ints:
        """Members that were in the step before too."""
        joined = np.fromiter((len(step.joined) // 4 for step in self.steps), np.int64, len(self))
        out: Ints = np.maximum(self.sizes - joined, 0)
        return out

    @cached_property
    def decoding(self) -> Ints:
        """Members that did not run prompt tokens."""
        out: Ints = np.maximum(self.sizes - self.prefilling, 0)
        return out

    @cached_property
    def plain(self) -> Flags:
        """Steps that only decode, with the members of the step before: a clean ITL."""
        flags: Flags = (self.prefill == 0) & (self.continuing == self.sizes) & (self.sizes > 0)
        flags[:1] = False
        return flags

    @cached_property
    def typical(self) -> float:
        """Median ITL of `plain` steps in ns; 0.0 when there are fewer than five."""
        chosen = self.interval[self.plain]
        return float(np.median(chosen)) if len(chosen) >= 5 else 0.0

    @cached_property
    def prefill_cost(self) -> float:
        """Median ns for one prompt token, over steps that ran at least 16; 0.0 without any."""
        chosen = self.prefill >= 16
        costs = self.duration[chosen] / self.prefill[chosen]
        return float(np.median(costs)) if len(costs) else 0.0

    @cached_property
    def sampling(self) -> Ints:
        """Logits known to token ids known, less the waiting for the device in it; -1 where that
        cannot be told.

        With CUDA events: the sampler on the device. Where the host only timed launches this would
        hold the whole pass.
        """
        logits, sampled = self.column("logits"), self.column("sampled")
        timing, wait = self.column("timing"), np.maximum(self.column("wait"), 0)
        on_host = np.maximum(self.tokens_at - self.begin - logits - wait, 0)
        host = np.where(logits >= 0, on_host, -1)
        device = np.where((logits >= 0) & (sampled >= logits), sampled - logits, -1)
        no_host = np.where(timing == Timing.LAUNCH, -1, device)
        out: Ints = np.where(timing == Timing.HOST, host, no_host)
        return out

    @cached_property
    def computing(self) -> Ints:
        """Embedding to logits of the host's clock; -1 where it was not timed synchronously."""
        logits, embed = self.column("logits"), self.column("embed")
        begin = np.where(embed >= 0, embed, self.column("layers"))
        known = (begin >= 0) & (logits >= begin) & (self.column("timing") == Timing.HOST)
        out: Ints = np.where(known, logits - begin, -1)
        return out

    @cached_property
    def schedule(self) -> Ints:
        """Choosing the batch; 0 where not told."""
        out: Ints = np.maximum(self.column("scheduled"), 0)
        return out

    @cached_property
    def prepare(self) -> Ints:
        """Batch chosen to forward pass entered; 0 where not told."""
        scheduled, launched = self.column("scheduled"), self.column("launched")
        out: Ints = np.where((scheduled >= 0) & (launched >= scheduled), launched - scheduled, 0)
        return out

    @cached_property
    def update(self) -> Ints:
        """Tokens known to the end of the step before: that delays this one. 0 where not told."""
        told = np.where(self.column("end") >= 0, np.maximum(self.end - self.tokens_at, 0), 0)
        out: Ints = np.concatenate([np.zeros(1, np.int64), told[:-1]])[: len(self)]
        return out

    def between(self, begin: int, end: int) -> slice:
        """Return the steps whose tokens were known in `begin` … `end` (ns, inclusive)."""
        low = int(np.searchsorted(self.tokens_at, begin, "left"))
        high = int(np.searchsorted(self.tokens_at, end, "right"))
        return slice(low, max(low, high))

    def window(self, first: int, last: int) -> tuple[int, int]:
        """Return when the step at place `first` began and the one at `last` was over (ns)."""
        return int(self.begin[first]), int(self.end[last])

"""The steps of one engine as columns, so that rules look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol.events import Step, Timing

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_FIELDS: Final = (
    "t",
    "n",
    "scheduled",
    "launched",
    "embed",
    "layers",
    "head",
    "logits",
    "sampled",
    "token",
    "end",
    "tokens",
    "used",
    "cached",
    "free",
    "waiting",
    "running",
    "preempted",
    "timing",
    "wait",
    "graph",
)


_LARGEST: Final = 1 << 61
"""No honest step has a larger number; two of these can be added."""


def _column(steps: Sequence[Step], name: str) -> Ints:
    """A field of all steps. What a hostile step has beyond `_LARGEST` is cut to it."""
    try:
        column = np.fromiter(map(attrgetter(name), steps), np.int64, len(steps))
    except OverflowError:
        column = np.array(
            [min(max(getattr(step, name), -_LARGEST), _LARGEST) for step in steps], np.int64
        )
    return np.clip(column, -_LARGEST, _LARGEST)


@dataclass(eq=False)
class StepTable:
    """Columns over the steps of one engine, oldest first. Times in ns; -1 where a value was not
    measured.

    `tokens_at` the instant at which a step's tokens were known; `sizes` members; `prefill` prompt
    tokens that it ran (recomputed ones included); `joined` members that were not in the step
    before. `prefilling` members that ran prompt tokens, `owner` the one with most of them (index of
    a request, -1 for none) and `context` tokens in the KV cache of all members are filled in by the
    evidence, which knows the requests.
    """

    columns: dict[str, Ints]
    tokens_at: Ints
    sizes: Ints
    prefill: Ints
    joined: Ints
    first: int = 0
    """Index in the engine's history of the first step here."""
    prefilling: Ints = field(init=False)
    owner: Ints = field(init=False)
    owner_tokens: Ints = field(init=False)
    context: Floats = field(init=False)

    def __post_init__(self) -> None:
        size = len(self)
        self.prefilling = np.zeros(size, np.int64)
        self.owner = np.full(size, -1, np.int64)
        self.owner_tokens = np.zeros(size, np.int64)
        self.context = np.zeros(size)

    @classmethod
    def of(
        cls, steps: Sequence[Step], tokens: Ints, sizes: Ints, prefill: Ints, first: int
    ) -> StepTable:
        """From a step history's lists, all of the same length; `first` is the index of the first
        step."""
        count = len(steps)
        columns = {name: _column(steps, name) for name in _FIELDS}
        joined = np.fromiter((len(step.joined) // 4 for step in steps), np.int64, count)
        return cls(columns, tokens, sizes, prefill, joined, first)

    def __len__(self) -> int:
        return len(self.tokens_at)

    # --- instants and lengths ---------------------------------------------------------------------

    @cached_property
    def begin(self) -> Ints:
        """When scheduling began."""
        return self.columns["t"]

    @cached_property
    def end(self) -> Ints:
        """When the step was over: its end, or the instant of its tokens if that is later."""
        out: Ints = np.maximum(self.begin + np.maximum(self.columns["end"], 0), self.tokens_at)
        return out

    @cached_property
    def duration(self) -> Ints:
        """Begin to end. With asynchronous batching steps overlap: see `interval`."""
        out: Ints = np.maximum(self.end - self.begin, 0)
        return out

    @cached_property
    def interval(self) -> Ints:
        """From the token of the step before to this one's: the ITL of all who were in both. 0 for
        the first step."""
        out: Ints = np.zeros(len(self), np.int64)
        out[1:] = np.diff(self.tokens_at)
        return out

    @cached_property
    def gap(self) -> Ints:
        """Time before the step in which no step was in progress; 0 for the first."""
        out: Ints = np.zeros(len(self), np.int64)
        if len(self) > 1:
            out[1:] = np.maximum(self.begin[1:] - np.maximum.accumulate(self.end)[:-1], 0)
        return out

    @cached_property
    def span(self) -> Ints:
        """Time that this step adds to those before it: from the end of all earlier ones (or its
        begin) to its end."""
        reached = np.maximum.accumulate(self.end)
        before = np.concatenate([self.begin[:1], reached[:-1]]) if len(self) else self.begin
        out: Ints = np.maximum(reached - np.maximum(self.begin, before), 0)
        return out

    # --- members ----------------------------------------------------------------------------------

    @cached_property
    def continuing(self) -> Ints:
        """Members that were in the step before too."""
        out: Ints = np.maximum(self.sizes - self.joined, 0)
        return out

    @cached_property
    def decoding(self) -> Ints:
        """Members that did not run prompt tokens."""
        out: Ints = np.maximum(self.sizes - self.prefilling, 0)
        return out

    @cached_property
    def plain(self) -> Flags:
        """Steps that only decode, right after a step with the same requests: their interval is a
        clean ITL."""
        flags: Flags = (self.prefill == 0) & (self.continuing == self.sizes) & (self.sizes > 0)
        if len(flags):
            flags[0] = False
        return flags

    @cached_property
    def typical(self) -> float:
        """Median ITL of `plain` steps in ns; 0.0 when there are fewer than five."""
        chosen = self.interval[self.plain]
        return float(np.median(chosen)) if len(chosen) >= 5 else 0.0

    @cached_property
    def prefill_cost(self) -> float:
        """Median ns for one prompt token, over steps that ran at least 16; 0.0 when there are
        none."""
        chosen = self.prefill >= 16
        return (
            float(np.median(self.duration[chosen] / self.prefill[chosen])) if chosen.any() else 0.0
        )

    # --- phases -----------------------------------------------------------------------------------

    def column(self, name: str) -> Ints:
        """One field of the step events as it was told."""
        return self.columns[name]

    @cached_property
    def sampling(self) -> Ints:
        """Logits known to token ids known, less the waiting for the device in it; -1 where that
        cannot be told.

        With CUDA events it is the sampler on the device. Where the host only timed launches it
        holds the whole pass.
        """
        logits, token, sampled = (
            self.columns["logits"],
            self.tokens_at - self.begin,
            self.columns["sampled"],
        )
        timing, wait = self.columns["timing"], self.columns["wait"]
        host = np.where(logits >= 0, np.maximum(token - logits - np.maximum(wait, 0), 0), -1)
        device = np.where((logits >= 0) & (sampled >= logits), sampled - logits, -1)
        out: Ints = np.where(
            timing == Timing.HOST, host, np.where(timing == Timing.LAUNCH, -1, device)
        )
        return out

    @cached_property
    def computing(self) -> Ints:
        """Embedding to logits of the host's clock; -1 where it was not timed synchronously."""
        logits = self.columns["logits"]
        begin = np.where(self.columns["embed"] >= 0, self.columns["embed"], self.columns["layers"])
        known = (
            (logits >= 0)
            & (begin >= 0)
            & (logits >= begin)
            & (self.columns["timing"] == Timing.HOST)
        )
        out: Ints = np.where(known, logits - begin, -1)
        return out

    @cached_property
    def schedule(self) -> Ints:
        """The batch is chosen; -1 where not told."""
        return self.columns["scheduled"]

    @cached_property
    def prepare(self) -> Ints:
        """Batch chosen to forward pass entered; -1 where not told."""
        scheduled, launched = self.columns["scheduled"], self.columns["launched"]
        out: Ints = np.where((scheduled >= 0) & (launched >= scheduled), launched - scheduled, -1)
        return out

    @cached_property
    def update(self) -> Ints:
        """Tokens known to the end of the step; -1 where not told."""
        out: Ints = np.where(self.columns["end"] >= 0, np.maximum(self.end - self.tokens_at, 0), -1)
        return out

    # --- picking ----------------------------------------------------------------------------------

    def between(self, begin: int, end: int) -> slice:
        """The steps whose tokens were known in `begin` … `end` (ns, inclusive)."""
        low = int(np.searchsorted(self.tokens_at, begin, "left"))
        high = int(np.searchsorted(self.tokens_at, end, "right"))
        return slice(low, max(low, high))

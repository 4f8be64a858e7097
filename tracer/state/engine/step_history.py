"""The most recent steps of one engine, and how the time from one token to the next divides among
their phases.

Steps are addressed by a running index (0 for the first one seen) rather than by the engine's
number, which may jump. The interval from the token of step *i*−1 to the token of step *i* is the
same for every request that is a member of both, so its division is computed once a step and kept as
running sums: the decode breakdown of a request over a run of steps is one subtraction, whatever the
length of the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.events import Step, StepDevice, Timing

Ints = npt.NDArray[np.int64]

PARTS: Final = ("wait", "update", "schedule", "prepare", "embed", "layers", "head", "sample")
"""Phases between two tokens: the host idle between steps; the rest of the previous step after its
token; the batch chosen; inputs built; embedding; layers; LM head; sampling until the token is known
on the host."""
_WAIT, _UPDATE, _SCHEDULE, _PREPARE, _EMBED, _LAYERS, _HEAD, _SAMPLE = range(len(PARTS))

_MANY: Final = 256
"""Steps from which on it is quicker to take them all at once."""

Parts = tuple[int, int, int, int, int, int, int, int]
_NONE: Final[Parts] = (0, 0, 0, 0, 0, 0, 0, 0)


def device_offsets(step: Step) -> tuple[int, int, int, int]:
    """Offsets of embedding, first layer, head and logits in ns from `step.t`, -1 where not known.

    Where the host only timed launches of asynchronous work, its stamps say nothing about these: all
    are -1.
    """
    if step.timing == Timing.LAUNCH:
        return -1, -1, -1, -1
    return step.embed, step.layers, step.head, step.logits


def token_instant(step: Step) -> int:
    """When the tokens of a step were known on the host (ns): `token`, or the nearest later instant
    that was taken."""
    offset = step.token
    if offset < 0 and step.timing != Timing.LAUNCH:
        offset = step.sampled
    if offset < 0:
        offset = step.end
    if offset < 0:
        offset = max(
            step.logits, step.head, step.layers, step.embed, step.launched, step.scheduled, 0
        )
    return step.t + offset


def divide(step: Step, token: int, previous_token: int, previous_end: int) -> Parts:
    """The interval `previous_token` … `token` (ns) divided among `PARTS`; the parts always add up
    to it exactly.

    Whatever of `step` lies before `previous_token` (the next step is prepared while this one runs)
    is clipped. A phase whose end was not taken is counted with the one after it; if the layers are
    among several, all is *layers*.
    """
    parts = [0] * len(PARTS)
    begin = min(max(step.t, previous_token), token)
    update = min(max(previous_end, previous_token), begin) - previous_token
    parts[_UPDATE] = update
    parts[_WAIT] = begin - previous_token - update
    embed, layers, head, logits = device_offsets(step)
    at, start = begin, step.t
    hidden = False  # whether the layers are inside the stretch since `at`
    for offset, part in (
        (step.scheduled, _SCHEDULE),
        (step.launched, _PREPARE),
        (embed, _PREPARE),
        (layers, _EMBED),
        (head, _LAYERS),
        (logits, _HEAD),
    ):
        if offset < 0:
            hidden = hidden or part == _LAYERS
            continue
        instant = start + offset
        if instant > at:
            if instant > token:
                instant = token
            parts[_LAYERS if hidden else part] += instant - at
            at = instant
        hidden = False
    parts[_LAYERS if hidden else _SAMPLE] += token - at
    return tuple(parts)  # type: ignore[return-value]


def divide_many(
    steps: Sequence[Step], tokens: Ints, previous_tokens: Ints, previous_ends: Ints
) -> Ints:
    """`divide` for each of `steps`, as rows: what a state from a keyframe needs of all its steps at
    once."""
    parts = np.zeros((len(steps), len(PARTS)), np.int64)
    start = np.array([step.t for step in steps], np.int64)
    begin = np.minimum(np.maximum(start, previous_tokens), tokens)
    update = np.minimum(np.maximum(previous_ends, previous_tokens), begin) - previous_tokens
    parts[:, _UPDATE], parts[:, _WAIT] = update, begin - previous_tokens - update
    offsets = np.array(
        [(step.scheduled, step.launched, *device_offsets(step)) for step in steps], np.int64
    )
    at, hidden = begin, np.zeros(len(steps), np.bool_)
    rows = np.arange(len(steps))
    for column, part in enumerate((_SCHEDULE, _PREPARE, _PREPARE, _EMBED, _LAYERS, _HEAD)):
        known = offsets[:, column] >= 0
        instant = np.where(known, np.minimum(start + offsets[:, column], tokens), at)
        instant = np.maximum(instant, at)
        parts[rows, np.where(hidden, _LAYERS, part)] += instant - at
        at = instant
        hidden = ~known & (hidden | (part == _LAYERS))
    parts[rows, np.where(hidden, _LAYERS, _SAMPLE)] += tokens - at
    return parts


class StepHistory:
    """A window over the steps of one engine: `steps[index - base]`, with `tokens` (instant at which
    its tokens were known, never decreasing) and `sizes` (members) beside it."""

    def __init__(self) -> None:
        self.base = 0
        self.steps: list[Step] = []
        self.tokens: array[int] = array("q")
        self.sizes: array[int] = array("I")
        self.prefills: array[int] = array("I")
        """Tokens of prompts (and of what preemptions lost) that a step ran."""
        self.index_of: dict[int, int] = {}
        """Index of a step number, for those still kept."""
        self._sums: list[Parts] = []
        """Running sums of `divide` for the steps from place `_summed` on: extended when read, to
        both sides, cut back when a step is amended."""
        self._summed: int | None = None
        self._sum_before: Parts = _NONE
        """What they begin with."""
        self._before: tuple[int, int] | None = None
        """Token instant and end of the step before `base`."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last_index(self) -> int:
        """Index of the newest step, -1 before the first."""
        return self.base + len(self.steps) - 1

    def append(self, step: Step) -> int:
        """Add a step; returns its index."""
        token = token_instant(step)
        if self.tokens and token < self.tokens[-1]:
            token = self.tokens[-1]  # a clock that jumped back: no interval is negative
        self.steps.append(step)
        self.tokens.append(token)
        self.sizes.append(min(max(step.batch, 0), 0xFFFFFFFF))
        self.prefills.append(0)
        index = self.base + len(self.steps) - 1
        self.index_of[step.n] = index
        return index

    def step(self, index: int) -> Step:
        """The step at an index that is still kept."""
        return self.steps[index - self.base]

    def token(self, index: int) -> int:
        """Token instant of the step at an index that is still kept (ns)."""
        return self.tokens[index - self.base]

    def end(self, index: int) -> int:
        """When the step at an index was over (ns): its end, or its token instant."""
        step = self.steps[index - self.base]
        return max(step.t + step.end, self.tokens[index - self.base])

    def sums(self, index: int) -> Parts:
        """Running sums of the division up to the step at `index` (from `base` - 1 on). Differences
        count: what was asked for first is 0, and of steps that nobody asks about nothing is
        read."""
        place = max(index - self.base, -1)
        sums, begin = self._sums, self._summed
        if begin is None:
            self._summed, self._sum_before = place + 1, _NONE
            return _NONE
        at = place - begin
        if at < 0:
            return self._sum_before if at == -1 else self._sum_back(place, begin)
        if at >= len(sums):
            self._sum_on(begin + len(sums), place)
        return sums[at]

    def _sum_on(self, first: int, place: int) -> None:
        """Extend the running sums by the steps at the places `first` to `place`."""
        sums = self._sums
        last = sums[-1] if sums else self._sum_before
        if place - first >= _MANY:
            parts = self._divided(first, place)
            parts[0] += np.array(last, np.int64)
            sums.extend(map(tuple, np.cumsum(parts, axis=0).tolist()))
            return
        for at in range(first, place + 1):
            before = (self.tokens[at - 1], self.end(self.base + at - 1)) if at else self._before
            if before is not None:
                a = divide(self.steps[at], self.tokens[at], *before)
                last = (
                    last[0] + a[0], last[1] + a[1], last[2] + a[2], last[3] + a[3],
                    last[4] + a[4], last[5] + a[5], last[6] + a[6], last[7] + a[7],
                )  # fmt: skip
            sums.append(last)

    def _sum_back(self, place: int, begin_place: int) -> Parts:
        """Extend the running sums so that they begin behind `place`, no longer at `begin_place`;
        what they begin with."""
        parts = np.cumsum(self._divided(place + 1, begin_place - 1), axis=0)
        begin = np.array(self._sum_before, np.int64) - parts[-1]
        self._sums[:0] = map(tuple, (parts + begin).tolist())
        self._summed, self._sum_before = place + 1, tuple(begin.tolist())
        return self._sum_before

    def _divided(self, first: int, last: int) -> Ints:
        """`divide` for the steps at these places and between, all at once."""
        steps = self.steps[first : last + 1]
        tokens = np.frombuffer(self.tokens, np.int64)[first : last + 1].copy()
        ends = np.maximum(np.array([step.t + step.end for step in steps], np.int64), tokens)
        previous_tokens, previous_ends = np.empty_like(tokens), np.empty_like(ends)
        previous_tokens[1:], previous_ends[1:] = tokens[:-1], ends[:-1]
        before = (
            (self.tokens[first - 1], self.end(self.base + first - 1)) if first else self._before
        )
        previous_tokens[0], previous_ends[0] = (tokens[0], tokens[0]) if before is None else before
        parts = divide_many(steps, tokens, previous_tokens, previous_ends)
        if before is None:
            parts[0] = 0
        return parts

    def amend(self, device: StepDevice) -> int | None:
        """Put device times into the step they belong to; returns its index, or None when it is not
        kept."""
        index = self.index_of.get(device.n)
        if index is None:
            return None
        old = self.step(index)
        # the event may be held by others: never changed in place
        new = msgspec.structs.replace(old)
        for name in ("embed", "layers", "head", "logits", "sampled"):
            offset = getattr(device, name)
            if offset >= 0:
                setattr(new, name, offset)
            elif old.timing == Timing.LAUNCH:
                setattr(new, name, -1)  # a launch time must not pass for a device time
        new.timing = Timing.ESTIMATED if device.estimated else Timing.DEVICE
        self.steps[index - self.base] = new
        del self._sums[max(index - self.base - (self._summed or 0), 0) :]
        return index

    def trim(self, base: int) -> None:
        """Drop the steps before index `base`; `sums(base - 1)` stays readable."""
        drop = base - self.base
        if drop <= 0:
            return
        begin = drop if self._summed is None else self._summed
        if begin < drop:
            self._sum_before = self.sums(base - 1)
        self._before = (self.token(base - 1), self.end(base - 1))
        self.index_of = {n: index for n, index in self.index_of.items() if index >= base}
        del self.steps[:drop], self.tokens[:drop], self.sizes[:drop], self.prefills[:drop]
        if self._summed is not None:
            del self._sums[: max(drop - begin, 0)]
            self._summed = max(begin - drop, 0)
        self.base = base

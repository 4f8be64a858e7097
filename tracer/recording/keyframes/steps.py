"""What keyframes have told of one source's steps."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np

from engine_hooks.protocol.events import Step
from tracer.state.engine.step_history import StepHistory


class ToldSteps:
    """What is known of one source's steps: where their events are, as they came, as keyframes told
    them."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        """(block, place among the steps of this source in it) of the steps taken in since the last
        keyframe."""
        self.seen = 0
        """Steps of this source in the block at hand."""
        self.kept: list[tuple[int, int]] = []
        """As `places`, for steps of earlier keyframes that a whole one would have to name."""
        self.told: dict[int, Step] = {}
        """By index, the amended steps as they were told last."""
        self.original: dict[int, Step] = {}
        """By index, the steps as they came."""
        self.first = 0
        """Index of the first step in these columns: they reach back to the oldest that a finished
        request refers to."""
        self.tokens: array[int] = array("q")
        self.sizes: array[int] = array("I")
        self.prefills: array[int] = array("I")

    @property
    def next(self) -> int:
        """Index of the first step that no keyframe has told."""
        return self.first + len(self.tokens)

    def catch_up(self, history: StepHistory) -> bool:
        """Take over the columns of the steps that are new in the history; whether all of them are
        there. If not, some came and went since, and what was known before is dropped."""
        whole = history.base <= self.next or not self.tokens
        if not whole or not self.tokens:
            self.first = max(self.next, history.base)
            del self.tokens[:], self.sizes[:], self.prefills[:]
        new = self.next - history.base
        self.tokens.extend(history.tokens[new:])
        self.sizes.extend(history.sizes[new:])
        self.prefills.extend(history.prefills[new:])
        return whole

    def forget(self, first: int) -> None:
        """Drop the columns before index `first`."""
        drop = min(max(first - self.first, 0), len(self.tokens))
        del self.tokens[:drop], self.sizes[:drop], self.prefills[:drop]
        self.first += drop

    def runs(self, times: array[int], sizes: array[int]) -> list[int] | None:
        """These token instants and batch sizes as runs of steps (first index, length, …); None when
        they are none."""
        runs: list[int] = []
        at = 0
        while at < len(times):
            begin = bisect_left(self.tokens, times[at])
            length = _common(self.tokens, self.sizes, begin, times, sizes, at)
            if not length or len(runs) > 16 + len(times) // 4:
                return None
            runs += (self.first + begin, length)
            at += length
        return runs


def _common(
    tokens: array[int],
    sizes: array[int],
    begin: int,
    times: array[int],
    batches: array[int],
    at: int,
) -> int:
    """How many values from `begin` on in the first two columns are those from `at` on in the
    others."""
    length = min(len(tokens) - begin, len(times) - at)
    if length <= 0:
        return 0
    same = np.asarray(tokens[begin : begin + length]) == np.asarray(times[at : at + length])
    same &= np.asarray(sizes[begin : begin + length]) == np.asarray(batches[at : at + length])
    return length if same.all() else int(same.argmin())

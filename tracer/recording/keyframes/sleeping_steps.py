"""Steps of a restored history: each is read from its block of events when someone looks at it,
which is rarely."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import SupportsIndex, overload

import msgspec

from engine_hooks.protocol.events import Step, unpack_u32
from tracer.recording.keyframes.records import AMENDED

StepsOf = Callable[[int], dict[str, list[Step]]]
"""The steps in a block of events, by source, in order. Raises StepsLostError when the block cannot
be read."""


class StepsLostError(Exception):
    """The block with this number, whose steps a keyframe refers to, is not there or damaged."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def read_step(steps_of: StepsOf, source: str, block: int, place: int, t: int) -> Step:
    """A step from its block of events. One that is not where it should be (the file is damaged, or
    was made up) is one of which only its instant `t` (ns) is known."""
    try:
        return steps_of(block)[source][place]
    except (LookupError, StepsLostError):
        return Step(t, 0, token=0, end=0)


class StepFinder:
    """Finds the steps of `source` by index, the last one being `last`. `refs`: (block, packed u32
    places among the source's steps in it), in order; `amended`: by index, what device times that
    came later made of `AMENDED`."""

    def __init__(
        self,
        source: str,
        last: int,
        refs: Sequence[tuple[int, bytes]],
        amended: Mapping[int, Sequence[int]],
        steps_of: StepsOf,
    ) -> None:
        self._source = source
        self._amended = amended
        self._steps_of = steps_of
        self._parts: list[tuple[int, bytes]] = list(refs)
        self._firsts: list[int] = []
        first = last + 1
        for _, places in reversed(self._parts):
            first -= len(places) // 4
            self._firsts.append(first)
        self._firsts.reverse()
        self.first = first
        """Index of the first step that is known."""

    def blocks(self, index: int) -> list[int]:
        """Numbers of the blocks in which the steps from `index` on are."""
        return [block for block, _ in self._parts[max(0, bisect_right(self._firsts, index) - 1) :]]

    def step(self, index: int, t: int = 0) -> Step:
        """The step at an index, whose instant is about `t` (ns); see `read_step`."""
        at = bisect_right(self._firsts, index) - 1
        block, places = self._parts[at]
        step = read_step(
            self._steps_of, self._source, block, unpack_u32(places)[index - self._firsts[at]], t
        )
        values = self._amended.get(index)
        return (
            step
            if values is None
            else msgspec.structs.replace(step, **dict(zip(AMENDED, values, strict=True)))
        )


class SleepingSteps(list[Step]):
    """The steps of a history from index `base` on, `size` of them still to be read; further ones
    are appended. `tokens`: their instants (ns)."""

    def __init__(self, finder: StepFinder, base: int, size: int, tokens: Sequence[int]) -> None:
        super().__init__([None] * size)  # type: ignore[list-item]
        self._finder, self._base, self._tokens, self._first = finder, base, tokens, base

    @overload
    def __getitem__(self, at: SupportsIndex) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> list[Step]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Step | list[Step]:
        if isinstance(at, slice):
            begin, _, step = at.indices(len(self))
            part = SleepingSteps(self._finder, self._base + begin, 0, self._tokens)
            part._first = self._first
            part.extend(list.__getitem__(self, at))
            return part if step == 1 else [self[place] for place in range(*at.indices(len(self)))]
        found: Step | None = list.__getitem__(self, at)
        if found is None:
            place = at.__index__()
            index = self._base + (place if place >= 0 else place + len(self))
            found = self._finder.step(index, self._tokens[index - self._first])
            list.__setitem__(self, at, found)
        return found

    def __iter__(self) -> Iterator[Step]:
        return map(self.__getitem__, range(len(self)))

    def __reversed__(self) -> Iterator[Step]:
        return map(self.__getitem__, reversed(range(len(self))))

    def __delitem__(self, at: SupportsIndex | slice) -> None:
        """Drop steps, from the begin alone: what stays keeps its index."""
        before = len(self)
        super().__delitem__(at)
        self._base += before - len(self)

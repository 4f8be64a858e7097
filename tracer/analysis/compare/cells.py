"""Like with like: requests of several traces sorted into cells of the same length.

Two traces seldom hold the same requests. Within a cell prompts are about as long in every trace,
and so are outputs where they matter; only cells that every trace has count, each with one weight
for all traces. What the lengths of the traffic explain then explains nothing of the difference that
is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracer.analysis.compare.samples import Floats, Ints, Samples

FACTORS: Final = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""How far apart the lengths in one cell may be, the finest first; 1 is *equal*."""
ENOUGH: Final = 0.7
"""The finest cells that match this share of the requests of a trace are taken,"""
FEWEST: Final = 8
"""if they match this many of each."""
MATCHES: Final = ("length", "work", "none")
"""``length``: prompt and output; ``work``: the tokens of the prompt that were computed as well;
``none``: as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests of each trace that are compared with each other. `members[k]`: their places in the
    samples of trace k, sorted by cell; `bounds[k]`: where each of the `cells` cells begins among
    them. No cells: all weigh the same."""

    members: tuple[Ints, ...]
    bounds: tuple[Ints, ...]
    cells: int
    factor: float
    """How far apart the lengths in a cell may be; 0 when nothing was matched."""
    eligible: tuple[int, ...]
    """Requests of each trace that could have been matched."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Matched requests of each trace."""
        return tuple(len(members) for members in self.members)

    def places(self, trace: int) -> Ints:
        """Number of the cell of each member of a trace."""
        return np.repeat(
            np.arange(self.cells), np.diff(np.append(self.bounds[trace], len(self.members[trace])))
        )

    def weights(self, drawn: Sequence[Floats]) -> list[Floats]:
        """Weights of the members of each trace; ``drawn[k][r, i]``: how often round r drew request
        i of trace k.

        A cell weighs as much as the harmonic mean of its requests in the traces, the same in all of
        them; one that a trace has none of in this round weighs nothing. Shapes: rounds × members.
        """
        inside = [drawn[k][:, members] for k, members in enumerate(self.members)]
        if not self.cells:
            return inside
        held = [np.add.reduceat(counts, self.bounds[k], axis=1) for k, counts in enumerate(inside)]
        with np.errstate(divide="ignore", invalid="ignore"):
            shared = 1.0 / sum(1.0 / counts for counts in held)
            each = [np.where(counts > 0, shared / counts, 0.0) for counts in held]
        return [counts * rates[:, self.places(k)]
                for k, (counts, rates) in enumerate(zip(inside, each, strict=True))]  # fmt: skip


def group(samples: Sequence[Samples], match: str, *, late: bool) -> Group:
    """Sort the requests of several traces into cells; see the module. `late`: those that ran to
    their end, by the length of their output too. Whether an answer is streamed always counts: its
    first byte is another one."""
    eligible = [_eligible(one, match, late) for one in samples]
    sizes = tuple(len(members) for members in eligible)
    if match == "none":
        return Group(tuple(eligible), tuple(np.zeros(0, np.int64) for _ in samples), 0, 0.0, sizes)
    best: Group | None = None
    for factor in FACTORS:
        found = _sorted(samples, eligible, match, late, factor, sizes)
        if not best or min(found.counts) > min(best.counts):
            best = found
        alike = any(
            size and count >= ENOUGH * size for count, size in zip(found.counts, sizes, strict=True)
        )
        if alike and min(found.counts) >= FEWEST:
            return found
    return best if best is not None else _sorted(samples, eligible, match, late, FACTORS[-1], sizes)


def _eligible(samples: Samples, match: str, late: bool) -> Ints:
    wanted = samples.whole.copy() if late else np.ones(len(samples), np.bool_)
    if match != "none":
        wanted &= samples.prompt >= 0
    if match == "work":
        wanted &= samples.uncached >= 0
    return np.flatnonzero(wanted)


def _sorted(
    samples: Sequence[Samples],
    eligible: Sequence[Ints],
    match: str,
    late: bool,
    factor: float,
    sizes: tuple[int, ...],
) -> Group:
    keys = [
        _keys(one, members, match, late, factor)
        for one, members in zip(samples, eligible, strict=True)
    ]
    if not sum(map(len, eligible)):
        nothing = np.zeros(0, np.int64)
        return Group(tuple(eligible), tuple(nothing for _ in samples), 0, factor, sizes)
    _, inverse = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    numbers = np.split(inverse, np.cumsum([len(key) for key in keys])[:-1])
    kinds = int(inverse.max()) + 1 if len(inverse) else 0
    held = np.array([np.bincount(number, minlength=kinds) for number in numbers]).reshape(
        len(samples), kinds
    )
    common = np.all(held > 0, axis=0)
    place_of = np.cumsum(common) - 1
    members, bounds = [], []
    cells = int(common.sum())
    for number, places in zip(numbers, eligible, strict=True):
        inside = common[number]
        cell = place_of[number[inside]]
        order = np.argsort(cell, kind="stable")
        members.append(places[inside][order])
        bounds.append(np.searchsorted(cell[order], np.arange(cells)))
    return Group(tuple(members), tuple(bounds), cells, factor, sizes)


def _keys(samples: Samples, members: Ints, match: str, late: bool, factor: float) -> Ints:
    columns = [samples.streaming[members], _binned(samples.prompt[members], factor)]
    if match == "work":
        columns.append(_binned(samples.uncached[members], factor))
    if late:
        columns.append(_binned(samples.output[members], factor))
    return np.stack(columns, axis=1)


def _binned(lengths: Ints, factor: float) -> Ints:
    if factor == 1.0:
        return lengths
    bins: Ints = np.floor(np.log(np.maximum(lengths, 0) + 1.0) / np.log(factor) + 1e-9).astype(
        np.int64
    )
    return bins

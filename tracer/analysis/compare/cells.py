"""Requests of several traces matched by length, in cells.

Two traces seldom hold the same requests. Within a cell prompts are about as long in every trace,
and so are outputs where they matter; only cells that every trace has count, each with one weight
for all traces. No difference that is left comes from the lengths of the traffic.
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
    """Requests of each trace that are compared with each other. `members[k]`: their indices in the
    samples of trace k, sorted by cell; `bounds[k]`: where each of the `cells` cells begins among
    them (no cells: all weigh the same). `factor`: how far apart the lengths in a cell may be, 0
    when nothing was matched. `eligible`: requests of each trace that could have been matched."""

    members: tuple[Ints, ...]
    bounds: tuple[Ints, ...]
    cells: int
    factor: float
    eligible: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.members))

    def weights(self, drawn: Sequence[Floats]) -> list[Floats]:
        """Return the weights of the members of each trace; ``drawn[k][r, i]``: how often round r
        drew request i of trace k. Shapes: rounds × members.

        A cell weighs as much as the harmonic mean of its requests in the traces, the same in all of
        them; one that a trace has none of in this round weighs nothing.
        """
        inside = [drawn[k][:, members] for k, members in enumerate(self.members)]
        if not self.cells:
            return inside
        held = [np.add.reduceat(counts, self.bounds[k], axis=1) for k, counts in enumerate(inside)]
        with np.errstate(divide="ignore", invalid="ignore"):
            shared = 1.0 / sum(1.0 / counts for counts in held)
            rates = [np.where(counts > 0, shared / counts, 0.0) for counts in held]
        sizes = [np.diff(np.append(b, n)) for b, n in zip(self.bounds, self.counts, strict=True)]
        cells = [np.repeat(np.arange(self.cells), size) for size in sizes]
        return [
            counts * rate[:, cell] for counts, rate, cell in zip(inside, rates, cells, strict=True)
        ]


def group(samples: Sequence[Samples], match: str, *, late: bool) -> Group:
    """Sort the requests of several traces into cells, see the module. `late`: those that ran to
    their end, by the length of their output too. Whether an answer is streamed always counts: its
    first byte is another one."""
    eligible = [_eligible(one, match, late) for one in samples]
    sizes = tuple(map(len, eligible))
    nothing = tuple(np.zeros(0, np.int64) for _ in samples)
    if match == "none":
        return Group(tuple(eligible), nothing, 0, 0.0, sizes)
    if not any(sizes):
        return Group(tuple(eligible), nothing, 0, FACTORS[0], sizes)
    best: Group | None = None
    for factor in FACTORS:
        keys = [
            _keys(one, members, match, late, factor)
            for one, members in zip(samples, eligible, strict=True)
        ]
        found = _sorted(eligible, keys, factor)
        pairs = zip(found.counts, sizes, strict=True)
        enough = any(size and count >= ENOUGH * size for count, size in pairs)
        if enough and min(found.counts) >= FEWEST:
            return found
        if best is None or min(found.counts) > min(best.counts):
            best = found
    assert best is not None
    return best


def _eligible(samples: Samples, match: str, late: bool) -> Ints:
    wanted = samples.whole.copy() if late else np.ones(len(samples), np.bool_)
    if match != "none":
        wanted &= samples.prompt >= 0
    if match == "work":
        wanted &= samples.uncached >= 0
    return np.flatnonzero(wanted)


def _sorted(eligible: Sequence[Ints], keys: Sequence[Ints], factor: float) -> Group:
    """Return the cells, one for each of `keys` that every trace has."""
    _, inverse = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    numbers = np.split(inverse.reshape(-1), np.cumsum([len(key) for key in keys])[:-1])
    kinds = int(inverse.max()) + 1
    held = np.array([np.bincount(number, minlength=kinds) for number in numbers])
    common = np.all(held > 0, axis=0)
    cell_of, cells = np.cumsum(common) - 1, int(common.sum())
    members, bounds = [], []
    for number, indices in zip(numbers, eligible, strict=True):
        inside = common[number]
        cell = cell_of[number[inside]]
        order = np.argsort(cell, kind="stable")
        members.append(indices[inside][order])
        bounds.append(np.searchsorted(cell[order], np.arange(cells)))
    return Group(tuple(members), tuple(bounds), cells, factor, tuple(map(len, eligible)))


def _keys(samples: Samples, members: Ints, match: str, late: bool, factor: float) -> Ints:
    columns = [samples.streaming[members], _binned(samples.prompt[members], factor)]
    if match == "work":
        columns.append(_binned(samples.uncached[members], factor))
    if late:
        columns.append(_binned(samples.output[members], factor))
    return np.stack(columns, axis=1)


def _binned(lengths: Ints, factor: float) -> Ints:
    """Return the bin of each length; at a factor of 1 each length is its own."""
    if factor == 1.0:
        return lengths
    logs = np.log(np.maximum(lengths, 0) + 1.0) / np.log(factor)
    bins: Ints = np.floor(logs + 1e-9).astype(np.int64)
    return bins

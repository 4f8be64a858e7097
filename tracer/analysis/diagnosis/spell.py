"""Since when, and until when: the stretch of a series in which something holds, and the instant at
which it changed."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.diagnosis.finding import POINTS_SHOWN
from tracer.analysis.diagnosis.steps import Flags, Floats, Ints

LOOK: Final = 10
"""Samples that are looked at from each end: a single odd one neither starts nor ends a spell."""


class Spell(NamedTuple):
    """Places (inclusive) of the first and the last sample of a stretch, and how many samples in it
    are flagged (`hits`)."""

    first: int
    last: int
    hits: int


def spell(flags: Flags, share: float = 0.6) -> Spell | None:
    """The stretch from the first to the last flagged sample around which at least `share` of the
    next (previous) `LOOK` samples are flagged too; None when there is none."""
    count = len(flags)
    if count == 0 or not flags.any():
        return None
    sums = np.concatenate([[0], np.cumsum(flags)])
    at = np.arange(count)
    high, low = np.minimum(at + LOOK, count), np.maximum(at + 1 - LOOK, 0)
    after = (sums[high] - sums[at]) >= share * (high - at)
    before = (sums[at + 1] - sums[low]) >= share * (at + 1 - low)
    starts, ends = np.flatnonzero(flags & after), np.flatnonzero(flags & before)
    if not len(starts) or not len(ends) or ends[-1] < starts[0]:
        return None
    first, last = int(starts[0]), int(ends[-1])
    return Spell(first, last, int(sums[last + 1] - sums[first]))


class Change(NamedTuple):
    """A series changed at place `at`: medians before and from there on, and how often a value from
    there on is larger than one before (0.5: no order)."""

    at: int
    before: float
    after: float
    order: float


def change(values: Floats, least: int) -> Change | None:
    """The place that splits a series best into a lower part and a higher one, at least `least`
    samples in each.

    The split is the one with the largest gap between the ranks of both sides; None for a series
    that is too short.
    """
    count = len(values)
    if count < 2 * least:
        return None
    ranks = np.empty(count)
    ranks[np.argsort(values, kind="stable")] = np.arange(1, count + 1)
    sums = np.cumsum(ranks)[:-1]
    sizes = np.arange(1, count)
    # Mann-Whitney U of the right side against the left, as the share of pairs in which the right
    # one is larger.
    left = sums - sizes * (sizes + 1) / 2
    order = 1 - left / (sizes * (count - sizes))
    spread = np.sqrt((count + 1) / (12.0 * sizes * (count - sizes)))
    strength = (order - 0.5) / spread
    strength[: least - 1] = -np.inf
    strength[count - least :] = -np.inf
    best = int(np.argmax(strength))
    at = best + 1
    return Change(
        at, float(np.median(values[:at])), float(np.median(values[at:])), float(order[best])
    )


def points(times: Ints | NDArray[np.int64], values: Floats | Ints) -> tuple[tuple[int, float], ...]:
    """A series as evidence: at most `POINTS_SHOWN` points, of each stretch the largest value, so
    that peaks stay."""
    count = len(times)
    if count <= POINTS_SHOWN:
        return tuple((int(t), round(float(v), 4)) for t, v in zip(times, values, strict=True))
    edges = np.linspace(0, count, POINTS_SHOWN + 1).astype(int)
    out = []
    for low, high in pairwise(edges):
        at = low + int(np.argmax(values[low:high]))
        out.append((int(times[at]), round(float(values[at]), 4)))
    return tuple(out)

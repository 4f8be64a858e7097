"""The figures of a finding: the stretch of a series in which something holds, the instant at which
it changed, the series as evidence, and numbers in a sentence."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.finding import POINTS_SHOWN, Exhibit
from tracer.analysis.diagnosis.steps import Flags, Floats, Ints
from tracer.format.text import clean, fit

NAME_SHOWN: Final = 48
"""Characters of an id or a tenant inside a sentence."""
LOOK: Final = 10
"""Samples that are looked at from each end: a single odd one neither starts nor ends a window."""


class Window(NamedTuple):
    """First and last place of a stretch (inclusive), and the flagged ones in it (`hit`)."""

    first: int
    last: int
    hit: Ints


def window_of(flags: Flags, least: int, share: float) -> Window | None:
    """Return the stretch from the first to the last flagged sample around which at least `share` of
    the next (previous) `LOOK` samples are flagged too; None when fewer than `least` in it are."""
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
    hit = first + np.flatnonzero(flags[first : last + 1])
    return None if len(hit) < least else Window(first, last, hit)


class Change(NamedTuple):
    """A series changed at place `at`: medians before and from there on, and how often a value from
    there on is larger than one before (0.5: no order)."""

    at: int
    before: float
    after: float
    order: float


def change(values: Floats, least: int) -> Change | None:
    """Return the place that splits a series best into a lower part and a higher one, at least
    `least` samples in each: the split with the largest gap between the ranks of both sides. None
    for a series that is too short."""
    count = len(values)
    if count < 2 * least:
        return None
    sums = np.cumsum(ranks(values) + 1)[:-1]
    sizes = np.arange(1, count)
    # Mann-Whitney U of the right side against the left, as the share of pairs in which the right
    # one is larger.
    left = sums - sizes * (sizes + 1) / 2
    order = 1 - left / (sizes * (count - sizes))
    spread = np.sqrt((count + 1) / (12.0 * sizes * (count - sizes)))
    strength = (order - 0.5) / spread
    strength[: least - 1] = -np.inf
    strength[count - least :] = -np.inf
    at = int(np.argmax(strength)) + 1
    before, after = np.median(values[:at]), np.median(values[at:])
    return Change(at, float(before), float(after), float(order[at - 1]))


def climb(values: Any, least: int, factor: float, least_ms: float) -> Change | None:
    """Return where a series (ns) rose clearly: to `factor` times as much, and by `least_ms`."""
    turn = change(np.array(values, float), least)
    if turn is None or turn.order < limit.GREW_ORDER or turn.after < factor * turn.before:
        return None
    return None if turn.after - turn.before < least_ms * NS_PER_MS else turn


def ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 0."""
    out = np.empty(len(values))
    out[np.argsort(values, kind="stable")] = np.arange(len(values))
    return out


def line(x: Floats, y: Floats) -> tuple[float, float]:
    """Return (slope, R²) of the least-squares line."""
    dx, dy = x - x.mean(), y - y.mean()
    below = float((dx * dx).sum()) * float((dy * dy).sum())
    slope = float((dx * dy).sum()) / max(float((dx * dx).sum()), 1e-9)
    return slope, float((dx * dy).sum()) ** 2 / below if below > 0 else 0.0


def series(name: str, unit: str, times: Any, values: Any, note: str = "") -> Exhibit:
    """Return a series as evidence: of too many points the largest of each stretch."""
    times, values = np.asarray(times, np.int64), np.asarray(values, float)
    places: Any = range(len(times))
    if len(times) > POINTS_SHOWN:
        edges = np.linspace(0, len(times), POINTS_SHOWN + 1).astype(int)
        places = [low + int(np.argmax(values[low:high])) for low, high in pairwise(edges)]
    points = tuple((int(times[at]), round(float(values[at]), 4)) for at in places)
    return Exhibit(name, unit, points, note)


def binned(name: str, unit: str, x: Floats, y: Floats, note: str) -> Exhibit:
    """Return y over x as evidence: medians of the twentieths of x."""
    edges = np.quantile(x, np.linspace(0, 1, 21))
    places = np.clip(np.searchsorted(edges, x, "right") - 1, 0, 19)
    points = tuple(
        (int(np.median(x[places == place])), round(float(np.median(y[places == place])), 3))
        for place in range(20)
        if (places == place).any()
    )
    return Exhibit(name, unit, points, note)


def shown(name: str) -> str:
    """Return a name that a client or an engine chose, fit to stand in a sentence."""
    safe = clean(name)
    return safe if len(safe) <= NAME_SHOWN else fit(safe, NAME_SHOWN, ellipsis="…").rstrip()


def ms(ns: float) -> float:
    """Return ns as ms."""
    return ns / NS_PER_MS


def percent(share: float, digits: int = 0) -> str:
    """Return a share as ``5 %``."""
    return f"{share:.{digits}%}".replace("%", " %")


def counted(count: int, noun: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def median(values: object) -> float:
    """Return the median of any sequence of numbers; NaN of none."""
    array = np.asarray(values, np.float64)
    return float(np.median(array)) if array.size else math.nan


def stretched(whole: float, excess: float, most: float) -> float:
    """Return how many times longer `whole` is than it would be without `excess`, at most `most`."""
    return whole / max(whole - excess, whole / most) if whole > 0 else 1.0

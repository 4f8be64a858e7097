"""Noise by resampling: how much a figure would differ between two equal runs.

Requests that run at the same time share steps and queues: they are not independent, and a bootstrap
that drew them one by one would take noise for a change. Stretches of neighbouring requests are
drawn instead (a circular moving-block bootstrap), as long as the requests that were open together.
Everything that depends on the draw (cells, weights, quantiles) is computed again in each round, and
one band holds for all figures at once (the largest deviation of any of them, studentised), so that
looking at forty figures does not find a difference in one of them by chance.

Only noise within a run is seen: a machine that was slower during one whole run is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from tracer.analysis.compare.samples import Floats, Ints

LEVEL: Final = 0.95
"""Share of pairs of equal runs in which no band at all misses zero."""
ROUNDS: Final = 1000
FEWEST_ROUNDS: Final = 300
CELLS: Final = 6_000_000
"""Rounds × requests are kept below it: memory and time."""
BLOCKS: Final = (6, 40)
"""A trace is cut into about so many stretches, more with more requests (their square root). Few and
long ones see what drifts slowly; below the least nothing could be said of how much they differ."""
LARGEST: Final = 3.3
"""Quantile of the normal distribution up to which the band is widened by Student's t."""
DEFINED: Final = 0.7
"""Share of rounds in which a figure must exist."""


def rounds_for(requests: int, wanted: int = ROUNDS) -> int:
    """Return how many rounds so many requests allow."""
    return max(min(wanted, FEWEST_ROUNDS), min(wanted, CELLS // max(1, requests)))


def block_length(requests: int, company: float) -> int:
    """Return the requests in a stretch: as many as were open together (`company`), or as `BLOCKS`
    says if that is more."""
    fewest, most = BLOCKS
    stretches = min(most, max(fewest, math.isqrt(requests)))
    return max(1, min(requests // fewest, max(round(company), round(requests / stretches))))


def memory(values: Sequence[Floats]) -> float:
    """Return how alike neighbouring requests are, 0 (not at all) to 0.9: the median over all rows
    of the correlation of ranks with those of the request before, corrected for its bias in short
    series (Kendall)."""
    found = []
    for line in values:
        known = line[~np.isnan(line)]
        if len(known) < 4:
            continue
        ranks = np.argsort(np.argsort(known, kind="stable"), kind="stable").astype(np.float64)
        ranks -= ranks.mean()
        power = float(ranks @ ranks)
        alike = float(ranks[1:] @ ranks[:-1]) / power
        found.append(alike + (1 + 4 * alike) / len(known))
    return float(min(0.9, max(0.0, np.median(found)))) if found else 0.0


def hidden(alike: float, length: int) -> float:
    """Return the factor on the spread for what stretches of `length` requests do not see when
    neighbours are alike by `alike`: the variance of a mean of an autoregressive series over that of
    independent stretches of it."""
    lags = np.arange(1, length)
    seen = 1 + 2 * float(((1 - lags / length) * alike**lags).sum())
    return math.sqrt((1 + alike) / (1 - alike) / seen)


def draws(random: np.random.Generator, requests: int, length: int, rounds: int) -> Floats:
    """Return how often each request is drawn in each round (rounds × requests): whole stretches,
    the end joined to the start."""
    if not requests:
        return np.zeros((rounds, 0), np.float32)
    stretches = -(-requests // length)
    begins = random.integers(0, requests, (rounds, stretches))
    steps = np.zeros((rounds, requests + length + 1), np.float32)
    lines = np.repeat(np.arange(rounds), stretches)
    np.add.at(steps, (lines, begins.ravel()), 1.0)
    np.add.at(steps, (lines, begins.ravel() + length), -1.0)
    covered = np.cumsum(steps, axis=1)[:, :-1]
    counts = covered[:, :requests]
    counts[:, :length] += covered[:, requests : requests + length]
    return counts


def weighted_mean(values: Floats, weights: Floats) -> Floats:
    """Return the mean of `values` under each row of `weights` (rounds × values); values that are
    NaN do not count."""
    known = ~np.isnan(values)
    inside = weights if known.all() else weights[:, known]
    total = inside.sum(axis=1, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean: Floats = (inside @ values[known].astype(inside.dtype)) / total
    return np.where(total > 0, mean, np.nan)


def bands(observed: Floats, replicates: Floats, blocks: Sequence[int], unseen: float) -> Floats:
    """Return half the width of the band of each difference, so that with probability `LEVEL` none
    of them misses the true value.

    `observed`: figures; `replicates`: rounds × figures; `blocks`: stretches of each trace;
    `unseen`: see `hidden`. NaN for a figure that too few rounds have. The spread is that of the
    rounds, widened for the few stretches that it was taken from (Student's t).
    """
    defined = np.isfinite(replicates).mean(axis=0) >= DEFINED
    usable = defined & np.isfinite(observed)
    half = np.full(len(observed), np.nan)
    if not usable.any():
        return half
    inside = replicates[:, usable]
    spread = np.nanstd(inside, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.abs(inside - np.nanmean(inside, axis=0)) / spread
    largest = np.nanmax(np.where(spread > 0, deviations, 0.0), axis=1)
    reach = float(np.quantile(largest, LEVEL))
    few = math.sqrt(max(count / max(1, count - 1) for count in blocks))
    # Beyond that the rounds' own tails say it: the expansion is for moderate quantiles.
    usual = min(reach, LARGEST)
    wider = student(usual, max(4, sum(blocks) - len(blocks))) / usual if usual > 0 else 1.0
    half[usable] = spread * unseen * few * wider * reach
    return half


def student(normal: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees that belongs to a quantile of the
    normal distribution (Abramowitz and Stegun, 26.7.5)."""
    x, n = normal, float(freedom)
    return (
        x
        + (x**3 + x) / (4 * n)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * n**3)
    )


def binned_quantiles(
    bins: Ints, counts: Floats, weights: Floats, shares: Sequence[float]
) -> tuple[Floats, Floats]:
    """Return quantiles of counted bins: `counts` is requests × bins, `weights` rounds × requests.

    Returns shares × rounds of indices among the bins, a fraction where it lies within one, and the
    total of each round.
    """
    heights = weights.astype(np.float64) @ counts
    reached = np.cumsum(heights, axis=1)
    total, lines = reached[:, -1], np.arange(len(weights))
    found = np.empty((len(shares), len(weights)))
    for index, share in enumerate(shares):
        wanted = share * total
        at = np.minimum((reached < wanted[:, None]).sum(axis=1), len(bins) - 1)
        height = heights[lines, at]
        with np.errstate(divide="ignore", invalid="ignore"):
            along = np.where(height > 0, (wanted - (reached[lines, at] - height)) / height, 0.5)
        found[index] = bins[at] + np.clip(along, 0.0, 1.0)
    found[:, ~(total > 0)] = np.nan
    return found, total

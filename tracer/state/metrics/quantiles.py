"""Quantiles of samples: nearest-rank, and interpolated under many weightings at once.

Latencies over windows come from `histogram`, which keeps no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def nearest_rank(
    values: Sequence[float] | Floats, share: float, weights: Floats | None = None
) -> float:
    """Return the smallest of `values` such that `share` (0-1) of all, each as often as its weight
    says, are no larger; NaN where nothing weighs anything."""
    ordered = np.asarray(values, np.float64)
    order = np.argsort(ordered, kind="stable")
    reached = np.cumsum(np.ones(len(order)) if weights is None else np.asarray(weights)[order])
    if not len(reached) or not reached[-1] > 0:
        return float("nan")
    index = int(np.searchsorted(reached, share * reached[-1]))
    return float(ordered[order[min(index, len(order) - 1)]])


def weighted_quantiles(values: Floats, weights: Floats, shares: Sequence[float]) -> Floats:
    """Return the quantiles of `values` under each row of `weights`: shares × rows. Values that are
    NaN do not count; NaN where nothing weighs anything.

    Each value stands in the middle of its weight; between two values it is interpolated.
    """
    known = np.flatnonzero(~np.isnan(values))
    rows = len(weights)
    if not len(known):
        return np.full((len(shares), rows), np.nan)
    order = known[np.argsort(values[known], kind="stable")]
    ranked = values[order]
    heights = weights[:, order]
    reached = np.cumsum(heights, axis=1, dtype=np.float64)
    total = reached[:, -1].copy()  # `reached` is changed in place below
    reached -= heights / 2
    reached /= np.where(total > 0, total, 1.0)[:, None]
    lines = np.arange(rows)
    # Each row has a stretch of its own on one rising line, so that all quantiles are found at once.
    line = (reached + 2.0 * lines[:, None]).ravel()
    found = np.empty((len(shares), rows))
    for row, share in enumerate(shares):
        at = np.searchsorted(line, share + 2.0 * lines) - lines * len(ranked)
        above = np.minimum(at, len(ranked) - 1)
        below = np.maximum(above - 1, 0)
        low, high = reached[lines, below], reached[lines, above]
        with np.errstate(divide="ignore", invalid="ignore"):
            along = np.clip((share - low) / (high - low), 0.0, 1.0)
        along = np.where(high > low, along, 1.0)
        found[row] = ranked[below] * (1 - along) + ranked[above] * along
    found[:, ~(total > 0)] = np.nan
    return found

"""Percentiles of latencies from log-bucket histograms: mergeable, bounded in memory, within 1 %.

Bucket *i* holds values from `FLOOR_NS`·γ^(i−1) to `FLOOR_NS`·γ^i with γ = 1.02 and stands for the
geometric middle, so that a reported value is at most √1.02 − 1 = 0.995 % off. A window of samples
would need sorting and is off by far more once it is too small for the rate. `WindowSums` keeps the
last 10 s, 1 min and 10 min in rotating slots (what is older than the window is dropped a slot at a
time, a tenth of the window or less) and everything since the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S


@dataclass(frozen=True, slots=True)
class Quantiles:
    """p50, p95, p99 in ms over `count` samples; None without samples."""

    count: int = 0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


FLOOR_NS: Final = 1
"""Below 1 ns everything falls in bucket 0, which stands for half of it."""
CEILING_NS: Final = 100_000 * NS_PER_S
"""Longer values (over 27 hours) count as this long."""
GROWTH: Final = 1.02
_LOG_GROWTH: Final = math.log(GROWTH)
BUCKETS: Final = math.ceil(math.log(CEILING_NS / FLOOR_NS) / _LOG_GROWTH) + 2

WINDOWS_S: Final = (10.0, 60.0, 600.0, math.inf)
"""The windows that can be asked for; `WindowSums.over` takes the nearest."""
SLOTS: Final = ((10, NS_PER_S), (12, 5 * NS_PER_S), (20, 30 * NS_PER_S))
"""Number and length in ns of the slots of each bounded window."""

Counts = npt.NDArray[np.int64]


def bucket_indices(values_ns: npt.NDArray[np.float64]) -> Counts:
    """Bucket number of each value (ns)."""
    scaled = np.clip(values_ns, FLOOR_NS * 0.5, CEILING_NS) / FLOOR_NS
    # A value on a boundary may land on either side through rounding: both middles are within the
    # stated error.
    index: Counts = (np.log(scaled) / _LOG_GROWTH).astype(np.int64) + 1
    index[scaled < 1.0] = 0
    return index


def bucket_counts(indices: Counts, weights: Counts) -> Counts:
    """Bucket numbers with the weight of each as a vector of `BUCKETS` counts."""
    return np.bincount(indices, weights=weights, minlength=BUCKETS).astype(np.int64)


def bucket_value_ns(bucket: int) -> float:
    """The value in ns that stands for a bucket: its geometric middle."""
    if bucket <= 0:
        return FLOOR_NS / 2
    return float(FLOOR_NS * GROWTH ** (bucket - 0.5))


def quantiles_ns(counts: Counts, shares: Sequence[float]) -> list[float | None]:
    """Nearest-rank quantiles in ns of bucket counts, one for each of `shares` (0-1); None without
    samples."""
    cumulative = np.cumsum(counts)
    total = int(cumulative[-1])
    if total == 0:
        return [None] * len(shares)
    ranks = [max(1, math.ceil(share * total)) for share in shares]
    return [bucket_value_ns(int(bucket)) for bucket in np.searchsorted(cumulative, ranks)]


class WindowSums:
    """Bucket counts of some latencies, a row each, over the last 10 s, 1 min, 10 min and since the
    start.

    A sample that is older than a window when it arrives is not counted in that window."""

    def __init__(self, rows: int) -> None:
        self.total: Counts = np.zeros((rows, BUCKETS), np.int64)
        self.rings: list[Counts] = [
            np.zeros((number, rows, BUCKETS), np.int64) for number, _ in SLOTS
        ]
        """Slot `n` of a window (time over length) lies at `n` modulo their number."""
        self.heads = [-1] * len(SLOTS)
        """Number of the newest slot of each ring, -1 before the first sample."""

    def add(self, times: Counts, rows: Counts, buckets: Counts, weights: Counts) -> None:
        """Count samples taken at trace `times` (ns). One whose row is below 0 only moves the
        windows on."""
        timed = rows >= 0
        places, weights = (rows * BUCKETS + buckets)[timed], weights[timed]
        np.add.at(self.total.reshape(-1), places, weights)
        for window, (number, length) in enumerate(SLOTS):
            slots, ring, head = times // length, self.rings[window], self.heads[window]
            newest = max(head, int(slots.max()))
            if newest > head:
                ring[
                    [
                        slot % number
                        for slot in range(max(head + 1, newest - number + 1), newest + 1)
                    ]
                ] = 0
                self.heads[window] = newest
            slots = slots[timed]
            kept = slots > newest - number
            np.add.at(
                ring.reshape(-1), ((slots % number) * self.total.size + places)[kept], weights[kept]
            )

    def over(self, now: int, window_s: float) -> Counts:
        """Bucket counts by row over the window nearest to `window_s` that ends at trace time
        `now`."""
        window = nearest_window(window_s)
        if window == len(SLOTS):
            return self.total
        number, length = SLOTS[window]
        ring, head = self.rings[window], self.heads[window]
        oldest = now // length - number + 1
        merged: Counts = ring[
            [slot % number for slot in range(max(oldest, head - number + 1), head + 1)]
        ].sum(axis=0)
        return merged

    def quantiles(self, now: int, window_s: float) -> list[Quantiles]:
        """p50, p95 and p99 in ms of each row over the window nearest to `window_s` (10, 60, 600,
        infinity) that ends at `now`."""
        found = []
        for counts in self.over(now, window_s):
            p50, p95, p99 = (
                None if ns is None else ns / NS_PER_MS
                for ns in quantiles_ns(counts, (0.5, 0.95, 0.99))
            )
            found.append(Quantiles(int(counts.sum()), p50, p95, p99))
        return found


def nearest_window(window_s: float) -> int:
    """Index in `WINDOWS_S` of the window nearest (by ratio) to `window_s` seconds; the first for
    NaN and below 0."""
    if not window_s > 0:
        return 0
    if window_s > 2 * WINDOWS_S[-2]:
        return len(WINDOWS_S) - 1
    return min(
        range(len(WINDOWS_S) - 1), key=lambda index: abs(math.log(window_s / WINDOWS_S[index]))
    )

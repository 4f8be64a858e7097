"""Percentiles of latencies from log-bucket histograms: mergeable, bounded in memory, within 1 %.

Bucket *i* holds values from `FLOOR_NS`·γ^(i−1) to `FLOOR_NS`·γ^i with γ = 1.02 and stands for the geometric middle, so
that a reported value is at most √1.02 − 1 = 0.995 % off. A window of samples would need sorting and is off by far
more once it is too small for the rate. `WindowedTimer` keeps the last 10 s, 1 min and 10 min in rotating slots (what
is older than the window is dropped a slot at a time, a tenth of the window or less) and everything since the start.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tracer.clock import NS_PER_MS, NS_PER_S
from tracer.state.view import Quantiles

FLOOR_NS: Final = 1
"""Below 1 ns everything falls in bucket 0, which stands for half of it."""
CEILING_NS: Final = 100_000 * NS_PER_S
"""Longer values (over 27 hours) count as this long."""
GROWTH: Final = 1.02
_LOG_GROWTH: Final = math.log(GROWTH)
BUCKETS: Final = math.ceil(math.log(CEILING_NS / FLOOR_NS) / _LOG_GROWTH) + 2

WINDOWS_S: Final = (10.0, 60.0, 600.0, math.inf)
"""The windows that can be asked for; `WindowedTimer.quantiles` takes the nearest."""
SLOTS: Final = ((10, NS_PER_S), (12, 5 * NS_PER_S), (20, 30 * NS_PER_S))
"""Number and length in ns of the slots of each bounded window."""

_MOST: Final = 1 << 62
"""ns that a sum may reach: what a hostile source adds up to is cut there."""

_PENDING: Final = 2_048
"""Samples collected before they are sorted into buckets in one numpy pass."""

Counts = npt.NDArray[np.int64]


def bucket_indices(values_ns: npt.NDArray[np.float64]) -> Counts:
    """Bucket number of each value (ns)."""
    scaled = np.clip(values_ns, FLOOR_NS * 0.5, CEILING_NS) / FLOOR_NS
    # A value on a boundary may land on either side through rounding: both middles are within the stated error.
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
    """Nearest-rank quantiles in ns of bucket counts, one for each of `shares` (0-1); None without samples."""
    cumulative = np.cumsum(counts)
    total = int(cumulative[-1])
    if total == 0:
        return [None] * len(shares)
    ranks = [max(1, math.ceil(share * total)) for share in shares]
    return [bucket_value_ns(int(bucket)) for bucket in np.searchsorted(cumulative, ranks)]


class WindowedTimer:
    """One latency over the last 10 s, 1 min, 10 min and since the start. Samples carry the trace time at which they
    were taken; one that is older than a window when it arrives is not counted in that window.

    `bounds` (ns, ascending, inclusive) divide the exact `lifetime` of all samples, beside the quantiles."""

    def __init__(self, bounds: Sequence[int] = ()) -> None:
        self.total: Counts = np.zeros(BUCKETS, np.int64)
        self.bounds = tuple(bounds)
        self._lifetime: Counts = np.zeros(len(self.bounds) + 2, np.int64)
        """Sum of all samples in ns, then their counts up to each of the bounds and above the last."""
        self._rings: list[Counts] = [np.zeros((number, BUCKETS), np.int64) for number, _ in SLOTS]
        self._heads = [-1] * len(SLOTS)
        """Number (time over length) of the newest slot of each ring, -1 before the first sample."""
        self._times = array("q")
        self._values = array("d")
        self._weights = array("q")

    def add(self, t: int, value_ns: float, weight: int = 1) -> None:
        """Count `weight` samples of `value_ns` at trace time `t` (ns)."""
        self._times.append(t)
        self._values.append(value_ns)
        self._weights.append(weight)
        if len(self._times) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        """Sort what is pending into the buckets. What is read is the same whenever this is called."""
        if not self._times:
            return
        times = np.frombuffer(self._times, np.int64)
        values = np.frombuffer(self._values, np.float64)
        weights = np.frombuffer(self._weights, np.int64)
        self._times, self._values, self._weights = array("q"), array("d"), array("q")
        indices = bucket_indices(values)
        self.total += bucket_counts(indices, weights)
        places = np.searchsorted(self.bounds, values) + 1
        self._lifetime[1:] += np.bincount(places, weights, len(self._lifetime))[1:].astype(np.int64)
        summed = float(np.rint(np.clip(values, 0, CEILING_NS) * weights).sum())
        self._lifetime[0] = min(int(self._lifetime[0]) + int(min(summed, _MOST)), _MOST)
        for window, (number, length) in enumerate(SLOTS):
            slots = times // length
            for slot in np.unique(slots):
                row = self._slot(window, number, int(slot))
                if row is not None:
                    chosen = slots == slot
                    row += bucket_counts(indices[chosen], weights[chosen])

    def _slot(self, window: int, number: int, slot: int) -> Counts | None:
        """Row of the ring for a slot number, cleared when the ring moves on; None for one that has gone."""
        ring, head = self._rings[window], self._heads[window]
        if slot > head:
            if head < 0 or slot - head >= number:
                ring[:] = 0
            else:
                for passed in range(head + 1, slot + 1):
                    ring[passed % number] = 0
            self._heads[window] = slot
        elif head - slot >= number:
            return None
        row: Counts = ring[slot % number]
        return row

    def all_counts(self) -> list[Counts]:
        """Every vector of counts that is kept: since the start, then the slots of each window, then the lifetime."""
        self.flush()
        return [self.total, *self._rings, self._lifetime]

    def lifetime(self) -> tuple[int, list[int]]:
        """Exact sum (ns) of all samples since the start, and their counts up to each of `bounds` and above the last."""
        self.flush()
        total, *counts = self._lifetime.tolist()
        return total, counts

    def counts(self, now: int, window_s: float) -> Counts:
        """Bucket counts over the window nearest to `window_s` that ends at trace time `now`."""
        self.flush()
        window = nearest_window(window_s)
        if window == len(SLOTS):
            return self.total
        number, length = SLOTS[window]
        ring, head = self._rings[window], self._heads[window]
        oldest = now // length - number + 1
        if head < 0 or oldest > head:
            return np.zeros(BUCKETS, np.int64)
        if oldest <= head - number + 1:
            whole: Counts = ring.sum(axis=0)
            return whole
        rows = [slot % number for slot in range(max(oldest, head - number + 1), head + 1)]
        merged: Counts = ring[rows].sum(axis=0)
        return merged

    def quantiles(self, now: int, window_s: float) -> Quantiles:
        """p50, p95 and p99 in ms over the window nearest to `window_s` (10, 60, 600, infinity) that ends at `now`."""
        counts = self.counts(now, window_s)
        p50, p95, p99 = (None if ns is None else ns / NS_PER_MS for ns in quantiles_ns(counts, (0.5, 0.95, 0.99)))
        return Quantiles(int(counts.sum()), p50, p95, p99)


def nearest_window(window_s: float) -> int:
    """Index in `WINDOWS_S` of the window nearest (by ratio) to `window_s` seconds; the first for NaN and below 0."""
    if not window_s > 0:
        return 0
    if window_s > 2 * WINDOWS_S[-2]:
        return len(WINDOWS_S) - 1
    return min(range(len(WINDOWS_S) - 1), key=lambda index: abs(math.log(window_s / WINDOWS_S[index])))

"""Counts of many series over the same windows: the last 10 s, 1 min, 10 min, and since the start.

There are hundreds of series of which most hold few buckets: a slot is a sorted array of what was
seen in it (`Slot`), so that memory follows what is there, not what could be. A series is a number
below `SERIES`; a sample is a value in ns that falls into a log bucket, or, as a plain counter, all
weight in bucket 0. Series from `COARSE` on take four buckets as one (4 % instead of 1 %): they are
drawn, not read.

What is read ten times a second, the sums of some series of all groups, is kept beside the slots
(`sums`), where adding a few samples does not mean going through all that is there. It follows from
the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tracer.state.metrics.histogram import (
    FLOOR_NS,
    GROWTH,
    SLOTS,
    WindowSums,
    bucket_indices,
    bucket_value_ns,
)

SERIES: Final = 2_048
COARSE: Final = 1_920
STRIDE: Final = 2_048
"""Keys of one series: its buckets, and room."""
COARSENESS: Final = 4
_PENDING: Final = 4_096

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.int32]


class Slot(NamedTuple):
    """Sorted keys (series · `STRIDE` + bucket) and the count of each."""

    keys: Keys
    counts: Ints


NOTHING: Final = Slot(np.zeros(0, np.int32), np.zeros(0, np.int64))


class WindowedCounts:
    """See the module. Samples carry the trace time at which they were taken; one that is older than
    a window when it arrives is not counted in that window. `rows`: for each series the row of
    `sums` that it counts for, -1 for none."""

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self.total = NOTHING
        self._rows = np.full(SERIES, -1, np.int64)
        self._rows[: len(rows)] = rows
        self._sums = WindowSums(int(self._rows.max()) + 1)
        self._summed = 0
        """How many of the samples that are pending are in `_sums`."""
        self._rings: list[dict[int, Slot]] = [{} for _ in SLOTS]
        """Slots by number (time over length) of each window."""
        self._heads = [-1] * len(SLOTS)
        self._pending: list[tuple[int, int, float, int]] = []
        """Samples that are in no slot yet: time, series, value and weight."""

    def add(self, t: int, series: int, value_ns: float, weight: int = 1) -> None:
        """Count `weight` samples of `value_ns` in a series at trace time `t` (ns)."""
        self._pending.append((t, series, value_ns, weight))
        if len(self._pending) >= _PENDING:
            self.flush()

    def sums(self) -> WindowSums:
        """What the series of each row have in all."""
        begin, self._summed = self._summed, len(self._pending)
        if begin < self._summed:
            times, series, values, weights = _columns(self._pending[begin:])
            self._sums.add(times, self._rows[series], bucket_indices(values), weights)
        return self._sums

    def flush(self) -> None:
        """Sort what is pending into the slots. What is read is the same whenever this is called."""
        if not self._pending:
            return
        self.sums()
        self._summed = 0
        times, series, values, weights = _columns(self._pending)
        self._pending = []
        buckets = bucket_indices(values)
        keys = series * STRIDE + np.where(series >= COARSE, buckets // COARSENESS, buckets)
        self.total = _merge([self.total, Slot(keys.astype(np.int32), weights)])
        for window, (number, length) in enumerate(SLOTS):
            ring, slots = self._rings[window], times // length
            head = max(self._heads[window], int(slots.max()))
            if head > self._heads[window]:
                self._heads[window] = head
                for gone in [slot for slot in ring if slot <= head - number]:
                    del ring[gone]
            for slot in np.unique(slots).tolist():
                if slot > head - number:
                    chosen = slots == slot
                    new = Slot(keys[chosen].astype(np.int32), weights[chosen])
                    ring[slot] = _merge([ring.get(slot, NOTHING), new])

    def over(self, now: int, window: int) -> tuple[Slot, int | None]:
        """Counts over a window (its place in `histogram.WINDOWS_S`) that ends at trace time `now`,
        and the instant from which on it holds everything; None where that is the start."""
        self.flush()
        if window >= len(SLOTS):
            return self.total, None
        number, length = SLOTS[window]
        oldest = now // length - number + 1
        kept = [slot for number_, slot in sorted(self._rings[window].items()) if number_ >= oldest]
        return _merge(kept), oldest * length

    def entries(self) -> tuple[Slot, list[int], list[list[tuple[int, Slot]]]]:
        """All that is counted: since the start, and by window the newest slot's number and the
        slots."""
        self.flush()
        return self.total, self._heads, [sorted(ring.items()) for ring in self._rings]


def _columns(
    samples: list[tuple[int, int, float, int]],
) -> tuple[Ints, Ints, npt.NDArray[np.float64], Ints]:
    times, series, values, weights = zip(*samples, strict=True)
    whole = [np.array(column, np.int64) for column in (times, series, weights)]
    return whole[0], whole[1], np.array(values, np.float64), whole[2]


def _merge(slots: Sequence[Slot]) -> Slot:
    """All counts of some slots, whose keys may be in any order and come more than once."""
    if not slots:
        return NOTHING
    keys = np.concatenate([slot.keys for slot in slots])
    if not len(keys):
        return NOTHING
    counts = np.concatenate([slot.counts for slot in slots])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return Slot(keys[begins], np.add.reduceat(counts, begins))


def quantiles_by_row(
    rows: Ints, slot: Slot, number: int, shares: Sequence[float]
) -> tuple[Ints, list[Ints]]:
    """Samples of each row, and nearest-rank buckets for each of `shares` (-1 without samples).

    `rows`: for each key of the slot the row that it counts for, 0 … `number` - 1; -1 for none.
    """
    chosen = rows >= 0
    rows, buckets, counts = (
        rows[chosen],
        slot.keys[chosen].astype(np.int64) % STRIDE,
        slot.counts[chosen],
    )
    totals = np.zeros(number, np.int64)
    if not len(rows):
        return totals, [np.full(number, -1, np.int64) for _ in shares]
    order = np.lexsort((buckets, rows))
    rows, buckets, counts = rows[order], buckets[order], counts[order]
    np.add.at(totals, rows, counts)
    cumulative = np.cumsum(counts)
    before = np.cumsum(totals) - totals
    found = []
    for share in shares:
        ranks = before + np.maximum(1, np.ceil(share * totals).astype(np.int64))
        places = np.minimum(np.searchsorted(cumulative, ranks), len(buckets) - 1)
        found.append(np.where(totals > 0, buckets[places], -1))
    return totals, found


def value_ns(bucket: int, *, coarse: bool = False) -> float | None:
    """The value that stands for a bucket of a series (ns): its geometric middle. None for -1, no
    bucket."""
    if bucket < 0:
        return None
    if not coarse:
        return bucket_value_ns(bucket)
    return (
        float(FLOOR_NS * GROWTH ** (COARSENESS * bucket + COARSENESS / 2 - 1))
        if bucket
        else FLOOR_NS / 2
    )

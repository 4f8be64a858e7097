"""How much of something happened per second over a window: cumulative sums with times, coarse and bounded."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from tracer.clock import NS_PER_S
from tracer.state import chunks

GRAIN_NS = 50_000_000
"""What happens within 50 ms is one entry: a window is right to that."""
ENTRIES = 12_288
"""Entries kept: over ten minutes of constant activity, the longest window but that of everything."""
CHUNK = 64
"""Entries that are told together in a keyframe."""


class RateLog:
    """Sums of `columns` quantities over time. Times that go back are taken as the latest time."""

    def __init__(self, columns: int) -> None:
        self._times: list[int] = []
        self._sums: list[list[int]] = [[] for _ in range(columns)]
        self._dropped = [0] * columns
        self._gone = 0
        """Entries that were dropped."""

    def add(self, t: int, *amounts: int) -> None:
        """Add one amount a column at trace time `t` (ns)."""
        times = self._times
        if times and t < times[-1] + GRAIN_NS:
            for sums, amount in zip(self._sums, amounts, strict=True):
                sums[-1] += amount
            return
        times.append(t)
        for sums, amount in zip(self._sums, amounts, strict=True):
            sums.append((sums[-1] if sums else 0) + amount)
        if len(times) >= 2 * ENTRIES:
            self._dropped = [sums[ENTRIES - 1] for sums in self._sums]
            self._gone += ENTRIES
            for column in (times, *self._sums):
                del column[:ENTRIES]

    def entries(self) -> tuple[list[int], list[list[int]], list[int]]:
        """Times, running sums and what was before them: the whole log."""
        return self._times, self._sums, self._dropped

    def totals(self) -> tuple[int, ...]:
        """Sum of each column since the start."""
        return tuple(sums[-1] if sums else 0 for sums in self._sums)

    def over(self, now: int, window_ns: int) -> tuple[int, ...]:
        """Sum of each column over the `window_ns` before `now`; of everything ever when that reaches back to time 0."""
        last = bisect_right(self._times, now)
        if window_ns >= now:
            return tuple(sums[last - 1] if last else dropped
                         for sums, dropped in zip(self._sums, self._dropped, strict=True))  # fmt: skip
        first = bisect_right(self._times, now - window_ns)
        if last <= first:
            return (0,) * len(self._sums)
        return tuple(
            sums[last - 1] - (sums[first - 1] if first else dropped)
            for sums, dropped in zip(self._sums, self._dropped, strict=True)
        )

    # --- keyframes

    @property
    def end(self) -> int:
        """Entries so far, those that were dropped included."""
        return self._gone + len(self._times)

    def chunks(self, since: int = 0) -> dict[str, bytes]:
        """The entries, in pieces that change one by one; of those that begin before entry `since` none but the sizes.
        `restore` takes them."""
        pieces = {"sizes": array("q", (self._gone, len(self._times), *self._dropped)).tobytes()}
        first = -(-max(since, self._gone) // CHUNK)
        cut = chunks.cut([column[first * CHUNK - self._gone :] for column in (self._times, *self._sums)], CHUNK)
        pieces.update({str(number): piece for number, piece in enumerate(cut, first)})
        return pieces

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Take over what `chunks` told, pieces of entries that have gone left out. Raises ValueError or KeyError."""
        sizes = array("q")
        sizes.frombytes(pieces["sizes"])
        gone, length, *dropped = sizes
        columns = [self._times, *self._sums]
        if gone < 0 or gone % CHUNK or not 0 <= length < 2 * ENTRIES or len(dropped) != len(self._sums):
            raise ValueError("no such entries")
        told = [pieces[str(number)] for number in range(gone // CHUNK, -(-(gone + length) // CHUNK))]
        table = chunks.join(told, len(columns), CHUNK, length)
        if not (np.diff(table[0]) > 0).all():
            raise ValueError("entries out of order")
        for column, values in zip(columns, table, strict=True):
            column += values.tolist()
        self._gone, self._dropped = gone, dropped


def per_second(amount: float, window_ns: int) -> float:
    """`amount` over `window_ns` as a rate per second; 0 for an empty window."""
    return amount * NS_PER_S / window_ns if window_ns > 0 else 0.0

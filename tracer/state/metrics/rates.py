"""How much of something happened per second over a window: cumulative sums with times, coarse and
bounded."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from engine_hooks.protocol.clock import NS_PER_S

GRAIN_NS = 50_000_000
"""What happens within 50 ms is one entry: a window is right to that."""
ENTRIES = 12_288
"""Entries kept: over ten minutes of constant activity, the longest window but that of
everything."""
_MOST = 1 << 62
"""What a sum may reach: what a hostile source adds up to is cut there."""


class RateLog:
    """Sums of `columns` quantities over time. Times that go back are taken as the latest time."""

    def __init__(self, columns: int) -> None:
        self._times = array("q")
        self._sums = [array("q") for _ in range(columns)]
        self._dropped = [0] * columns

    def add(self, t: int, *amounts: int) -> None:
        """Add one amount a column at trace time `t` (ns)."""
        times = self._times
        if times and t < times[-1] + GRAIN_NS:
            for sums, amount in zip(self._sums, amounts, strict=True):
                sums[-1] = min(sums[-1] + amount, _MOST)
            return
        times.append(t)
        for sums, amount in zip(self._sums, amounts, strict=True):
            sums.append(min((sums[-1] if sums else 0) + amount, _MOST))
        if len(times) >= 2 * ENTRIES:
            self._dropped = [sums[ENTRIES - 1] for sums in self._sums]
            for column in (times, *self._sums):
                del column[:ENTRIES]

    def entries(self) -> tuple[array[int], list[array[int]], list[int]]:
        """Times, running sums and what was before them: the whole log."""
        return self._times, self._sums, self._dropped

    def totals(self) -> tuple[int, ...]:
        """Sum of each column since the start."""
        return tuple(sums[-1] if sums else 0 for sums in self._sums)

    def over(self, now: int, window_ns: int) -> tuple[int, ...]:
        """Sum of each column over the `window_ns` before `now`; of everything ever when that
        reaches back to time 0."""
        last = bisect_right(self._times, now)
        if window_ns >= now:
            return tuple(
                sums[last - 1] if last else dropped
                for sums, dropped in zip(self._sums, self._dropped, strict=True)
            )
        first = bisect_right(self._times, now - window_ns)
        if last <= first:
            return (0,) * len(self._sums)
        return tuple(
            sums[last - 1] - (sums[first - 1] if first else dropped)
            for sums, dropped in zip(self._sums, self._dropped, strict=True)
        )


def per_second(amount: float, window_ns: int) -> float:
    """`amount` over `window_ns` as a rate per second; 0 for an empty window."""
    return amount * NS_PER_S / window_ns if window_ns > 0 else 0.0

"""How much of something happened per second over a window: cumulative sums with times, coarse and
bounded."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from engine_hooks.protocol.clock import NS_PER_S
from tracer.state import chunks

GRAIN_NS = 50_000_000
"""What happens within 50 ms is one entry: a window is right to that."""
ENTRIES = 12_288
"""Entries kept: over ten minutes of constant activity, the longest window but that of
everything."""
_MOST = 1 << 62
"""What a sum may reach: what a hostile source adds up to is cut there."""
CHUNK = 64
"""Entries that are told together in a keyframe."""


_AWAKE = 24
"""Pieces that are read at once: those of the last minute, which is asked for first."""


class RateLog:
    """Sums of `columns` quantities over time. Times that go back are taken as the latest time."""

    def __init__(self, columns: int) -> None:
        self._times = array("q")
        self._sums = [array("q") for _ in range(columns)]
        self._dropped = [0] * columns
        self._gone = 0
        """Entries that were dropped."""
        self._asleep: chunks.Sleeping | None = None
        """Entries behind those, before the others, of a log from a keyframe."""

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
        if self._length >= 2 * ENTRIES:
            self._wake()
            times = self._times
            self._dropped = [sums[ENTRIES - 1] for sums in self._sums]
            self._gone += ENTRIES
            for column in (times, *self._sums):
                del column[:ENTRIES]

    def entries(self) -> tuple[array[int], list[array[int]], list[int]]:
        """Times, running sums and what was before them: the whole log."""
        self._wake()
        return self._times, self._sums, self._dropped

    def totals(self) -> tuple[int, ...]:
        """Sum of each column since the start."""
        return tuple(sums[-1] if sums else 0 for sums in self._sums)

    def over(self, now: int, window_ns: int) -> tuple[int, ...]:
        """Sum of each column over the `window_ns` before `now`; of everything ever when that
        reaches back to time 0."""
        since = now if window_ns >= now else now - window_ns
        if self._asleep is not None and (not self._times or self._times[0] > since):
            self._wake()
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

    # --- keyframes

    @property
    def end(self) -> int:
        """Entries so far, those that were dropped included."""
        return self._gone + self._length

    @property
    def _length(self) -> int:
        return len(self._times) + (0 if self._asleep is None else self._asleep.length)

    def chunks(self, since: int = 0) -> dict[str, bytes]:
        """The entries, in pieces that change one by one; of those that begin before entry `since`
        none but the sizes. `restore` takes them."""
        self._wake()
        pieces = {"sizes": array("q", (self._gone, len(self._times), *self._dropped)).tobytes()}
        first = -(-max(since, self._gone) // CHUNK)
        cut = chunks.cut(
            [column[first * CHUNK - self._gone :] for column in (self._times, *self._sums)], CHUNK
        )
        pieces.update({str(number): piece for number, piece in enumerate(cut, first)})
        return pieces

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Take over what `chunks` told, pieces of entries that have gone left out. Raises
        ValueError or KeyError."""
        sizes = array("q")
        sizes.frombytes(pieces["sizes"])
        gone, length, *dropped = sizes
        columns = [self._times, *self._sums]
        if (
            gone < 0
            or gone % CHUNK
            or not 0 <= length < 2 * ENTRIES
            or len(dropped) != len(self._sums)
        ):
            raise ValueError("no such entries")
        self._asleep, told, count = chunks.split(pieces, gone, length, CHUNK, _AWAKE)
        table = chunks.join(told, len(columns), CHUNK, count)
        if not (np.diff(table[0]) > 0).all():
            raise ValueError("entries out of order")
        for column, values in zip(columns, table, strict=True):
            column.frombytes(values.astype(np.int64).tobytes())
        self._gone, self._dropped = gone, dropped

    def _wake(self) -> None:
        asleep, self._asleep = self._asleep, None
        if asleep is None:
            return
        table = asleep.table(1 + len(self._sums), CHUNK)
        if table is None or not (np.diff(table[0], append=self._times[:1]) > 0).all():
            self._gone += asleep.length
            self._dropped = [sums[0] for sums in self._sums]
            return
        self._times, *self._sums = (
            array("q", old.tobytes()) + new
            for old, new in zip(table, (self._times, *self._sums), strict=True)
        )


def per_second(amount: float, window_ns: int) -> float:
    """`amount` over `window_ns` as a rate per second; 0 for an empty window."""
    return amount * NS_PER_S / window_ns if window_ns > 0 else 0.0

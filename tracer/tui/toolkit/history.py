"""A short history of one figure by time, for a sparkline that fills up and then jumps by a quarter
of its width.

Each column is a stretch of time; the widget keeps what it has seen, because a snapshot holds the
latest steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

KEPT: Final = 600
"""Columns kept; older ones are forgotten."""


class History:
    """Largest value and mean of each stretch of `bucket` ns."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self._columns: dict[int, tuple[float, float, int]] = {}

    def add(self, t: int, value: float) -> None:
        """Add a value at an instant (ns)."""
        index = t // self.bucket
        peak, total, count = self._columns.get(index, (value, 0.0, 0))
        self._columns[index] = (max(peak, value), total + value, count + 1)
        if len(self._columns) > KEPT:
            for old in sorted(self._columns)[: KEPT // 4]:
                del self._columns[old]

    def clear(self) -> None:
        self._columns.clear()

    def page(self, width: int, now: int) -> list[float | None]:
        """Return means for `width` columns of the page that holds `now`; None where nothing
        happened."""
        return [None if found is None else found[1] / found[2] for found in self._page(width, now)]

    def peaks(self, width: int, now: int) -> list[float | None]:
        """Return the largest value of each column of the page."""
        return [None if found is None else found[0] for found in self._page(width, now)]

    def _page(self, width: int, now: int) -> list[tuple[float, float, int] | None]:
        if width < 1:
            return []
        jump = max(1, width // 4)
        end = (now // self.bucket // jump + 1) * jump
        return [self._columns.get(index) for index in range(end - width, end)]


def plot(values: Sequence[float | None], rises: str, rows: int, top: float) -> list[str]:
    """Return values as columns of `rows` rows of glyphs, the first row on top; `top` fills a
    column, None leaves it empty."""
    steps = len(rises) - 1
    scale = rows * steps / top if top > 0 else 0.0
    units = [0 if value is None else max(1, round(min(value, top) * scale)) for value in values]
    return [
        "".join(rises[max(0, min(steps, unit - row * steps))] for unit in units)
        for row in range(rows - 1, -1, -1)
    ]


def nice_top(value: float) -> float:
    """Return the next of 1, 2, 5 × 10ⁿ at or above a value, so that a scale changes rarely."""
    if value <= 0:
        return 1.0
    step = 0.001
    while step < value:
        for factor in (2.0, 2.5, 2.0):
            step *= factor
            if step >= value:
                break
    return step

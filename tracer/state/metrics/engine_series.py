"""What one engine's steps, blocks and queue did over time: columns of half a second, and of eight.

The steps themselves are kept for some minutes only, and are too many to draw. Bounded: the last ten
minutes in half seconds, the last nine hours in stretches of eight seconds.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.clock import NS_PER_S

FIELDS: Final = (
    "begin",
    "steps",
    "step_sum",
    "step_max",
    "wait_max",
    "batch_max",
    "tokens",
    "used",
    "cached",
    "free",
    "waiting",
)
"""A column: its begin (ns); how many steps began in it; sum and largest of their lengths (ns); the
longest time that members waited for a step to begin after the one before (ns); the largest batch;
tokens scheduled; and the last told blocks used, cached and free (-1 unknown) and the longest
queue."""
GRAINS: Final = ((NS_PER_S // 2, 1_200), (8 * NS_PER_S, 4_096))
"""Length of a column (ns) and how many are kept."""
_CHUNK: Final = 64
"""Columns that are forgotten together."""
_MOST: Final = 1 << 40
"""No count of ours is larger, whatever a peer says."""

Ints = npt.NDArray[np.int64]


class EngineSeries:
    """Columns of both lengths; those in which no step began are left out."""

    def __init__(self) -> None:
        self._grains: list[list[array[int]]] = [[array("q") for _ in FIELDS] for _ in GRAINS]
        self._dropped = [0] * len(GRAINS)

    def add(
        self,
        t: int,
        length: int,
        wait: int,
        batch: int,
        tokens: int,
        used: int,
        cached: int,
        free: int,
        waiting: int,
    ) -> None:
        """A step of `length` ns began at `t` (ns), `wait` ns after its members were last worked
        on."""
        told = (wait, batch, tokens, used, cached, free, waiting)
        new = (t, 1, length, length, *(min(value, _MOST) for value in told))
        for place, (grain, kept) in enumerate(GRAINS):
            columns = self._grains[place]
            begin = t - t % grain
            begins = columns[0]
            if not begins or begin > begins[-1]:
                for column, value in zip(columns, (begin, *new[1:]), strict=True):
                    column.append(value)
                if len(begins) >= kept + _CHUNK:
                    for column in columns:
                        del column[:_CHUNK]
                    self._dropped[place] += _CHUNK
                continue
            columns[1][-1] += 1
            columns[2][-1] += length
            columns[6][-1] += tokens
            for field in (3, 4, 5, 10):
                if new[field] > columns[field][-1]:
                    columns[field][-1] = new[field]
            for field in (7, 8, 9):
                if new[field] >= 0:
                    columns[field][-1] = new[field]

    def columns(self, since: int) -> tuple[int, dict[str, Ints]]:
        """Length of a column (ns), and the columns from the instant `since` on: the finer ones, if
        they reach so far back."""
        for place, ((grain, _), columns) in enumerate(zip(GRAINS, self._grains, strict=True)):
            begins = columns[0]
            if (
                place == len(GRAINS) - 1
                or not self._dropped[place]
                or (begins and begins[0] <= since)
            ):
                found = {
                    name: np.array(column, np.int64)
                    for name, column in zip(FIELDS, columns, strict=True)
                }
                first = int(np.searchsorted(found["begin"], since - grain, side="right"))
                return grain, {name: column[first:] for name, column in found.items()}
        raise AssertionError("there is always a coarsest")

    def entries(self) -> tuple[list[int], list[list[array[int]]]]:
        """Columns forgotten and columns kept, of each length."""
        return self._dropped, self._grains

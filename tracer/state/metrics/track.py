"""What one engine's steps, blocks and queue did over time: columns of half a second, and of eight.

The steps themselves are kept for some minutes only, and are too many to draw. Bounded: the last ten
minutes in half seconds, the last nine hours in stretches of eight seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.clock import NS_PER_S
from tracer.state import chunks

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
_PIECE: Final = 8
"""Columns that are told together in a keyframe: those of some seconds."""
_MOST: Final = 1 << 40
"""No count of ours is larger, whatever a peer says."""

Ints = npt.NDArray[np.int64]


class Track:
    """Columns of both lengths; those in which no step began are left out."""

    def __init__(self) -> None:
        self._grains: list[list[array[int]]] = [[array("q") for _ in FIELDS] for _ in GRAINS]
        self._dropped = [0] * len(GRAINS)
        self._asleep: list[chunks.Sleeping | None] = [None] * len(GRAINS)
        """Columns behind those, before the others, of a track from a keyframe."""

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
            columns, asleep = self._grains[place], self._asleep[place]
            begin = t - t % grain
            begins = columns[0]
            if not begins or begin > begins[-1]:
                for column, value in zip(columns, (begin, *new[1:]), strict=True):
                    column.append(value)
                if len(begins) + (asleep.length if asleep else 0) >= kept + _CHUNK:
                    self._wake()
                    for column in self._grains[place]:
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
        self._wake()
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

    # --- keyframes

    def chunks(self) -> dict[str, bytes]:
        """All columns, in pieces that change one by one. `restore` takes them."""
        self._wake()
        pieces = {
            "sizes": array(
                "q", [*self._dropped, *(len(columns[0]) for columns in self._grains)]
            ).tobytes()
        }
        for place, columns in enumerate(self._grains):
            first = self._dropped[place]
            cut = chunks.cut(columns, _PIECE)
            pieces.update(
                {f"{place}/{number}": piece for number, piece in enumerate(cut, first // _PIECE)}
            )
        return pieces

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Take over what `chunks` told, pieces that have gone left out. Raises ValueError or
        KeyError."""
        sizes = array("q")
        sizes.frombytes(pieces["sizes"])
        if len(sizes) != 2 * len(GRAINS):
            raise ValueError("no such columns")
        for place, (_, kept) in enumerate(GRAINS):
            first, size = sizes[place], sizes[len(GRAINS) + place]
            if first < 0 or first % _CHUNK or not 0 <= size < kept + _CHUNK:
                raise ValueError("no such columns")
            self._asleep[place], told, count = chunks.split(
                pieces, first, size, _PIECE, 1, f"{place}/"
            )
            whole = chunks.join(told, len(FIELDS), _PIECE, count)
            self._dropped[place] = first
            self._grains[place] = [array("q", row.astype(np.int64).tobytes()) for row in whole]

    def _wake(self) -> None:
        for place, asleep in enumerate(self._asleep):
            if asleep is None:
                continue
            table = asleep.table(len(FIELDS), _PIECE)
            columns, self._asleep[place] = self._grains[place], None
            if table is None:  # the file contradicts itself: these columns have gone
                self._dropped[place] += -(-asleep.length // _CHUNK) * _CHUNK
                continue
            self._grains[place] = [
                array("q", a.tobytes()) + b for a, b in zip(table, columns, strict=True)
            ]

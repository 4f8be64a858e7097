"""What requests came to: one row for each of the last `ROWS` that are over, in columns of whole
numbers.

Lengths, ends, hits and targets are asked for by request, for any group and any window, and by
targets that are only named when somebody looks: sums and histograms cannot answer that. A row is
written when the request is over, and again when something more is told of it.
"""

from __future__ import annotations

import math
from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.clock import NS_PER_S
from tracer.state.request import decode, latency
from tracer.state.request.outcome import reason_of
from tracer.state.request.request import Request

ROWS: Final = 16_384
COLUMNS: Final = (
    "serial",
    "over",
    "group",
    "reason",
    "prompt",
    "cached",
    "output",
    "queue",
    "prefill",
    "ttft",
    "tpot",
    "itl",
    "e2e",
    "preemptions",
)
"""`over`: instant (ns). Times in ns, tokens: -1 where not known. `itl` is the request's own 99th
percentile, `reason` a place in `FinishedTable.reasons`."""
REASONS: Final = 24
"""Ends that are told apart; an engine's further words are ``other``."""
KNOWN_REASONS: Final = ("other", "lost", "cancelled", "failed", "rejected", "unknown")
_WORD: Final = 48
"""Characters of a reason that are told apart."""
_TOKENS: Final = 1 << 18
"""Of a longer output the gaps are not gone through."""
_MOST: Final = 1 << 62
"""Larger than any instant of ours; no hostile number gets further than this."""
_CHUNK: Final = 128
"""Rows that are forgotten together."""

Ints = npt.NDArray[np.int64]


class FinishedTable:
    """See the module."""

    def __init__(self) -> None:
        self._revived: set[int] = set()
        """Requests with a row that are not over after all."""
        self.reasons: list[str] = list(KNOWN_REASONS)
        self.dropped = 0
        """Rows that were forgotten, the oldest first."""
        self._columns: list[array[int]] = [array("q") for _ in COLUMNS]
        self._places: dict[int, int] = {}
        """Number of its row, counted from the first ever, by request."""

    def __len__(self) -> int:
        return len(self._columns[0])

    def write(self, request: Request, group: int) -> None:
        """Write the row of a request that is over."""
        row = tuple(
            min(max(value, -1), _MOST)
            for value in (
                request.serial,
                request.over or 0,
                group,
                self._reason(request),
                request.prompt_tokens,
                request.cached_tokens,
                request.output_tokens,
                _ns(latency.queue(request)),
                _ns(latency.prefill(request)),
                _ns(latency.ttft(request)),
                _ns(latency.tpot(request)),
                _own_itl(request),
                _ns(latency.answer(request)),
                len(request.preemptions),
            )
        )
        self._revived.discard(request.serial)
        place = self._place(request.serial)
        if place is not None:
            for column, value in zip(self._columns, row, strict=True):
                column[place] = value
            return
        self._places[request.serial] = self.dropped + len(self)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        if len(self) >= ROWS + _CHUNK:
            self._forget(_CHUNK)

    def drop(self, serial: int) -> None:
        """The request is not over after all: its row counts for nothing."""
        place = self._place(serial)
        if place is not None:
            self._revived.add(serial)
            self._columns[1][place] = -1

    def _place(self, serial: int) -> int | None:
        """Where the row of a request is in the columns, None when it has none."""
        place = self._places.get(serial)
        return None if place is None or place < self.dropped else place - self.dropped

    def since(self, began: int) -> float | None:
        """From when on all rows are there, in s after `began` (ns); None when none was
        forgotten."""
        return (self._columns[1][0] - began) / NS_PER_S if self.dropped and len(self) else None

    def columns(self) -> dict[str, Ints]:
        """The rows of requests that are over, by column."""
        found = {
            name: np.array(column, np.int64)
            for name, column in zip(COLUMNS, self._columns, strict=True)
        }
        kept = found["over"] >= 0
        return found if kept.all() else {name: column[kept] for name, column in found.items()}

    def _forget(self, number: int) -> None:
        for serial in self._columns[0][:number]:
            if self._places.get(serial, -1) < self.dropped + number:
                self._places.pop(serial, None)
        for column in self._columns:
            del column[:number]
        self.dropped += number

    def _reason(self, request: Request) -> int:
        word = reason_of(request)[:_WORD].replace("\0", " ")
        if word in self.reasons:
            return self.reasons.index(word)
        if len(self.reasons) >= REASONS:
            return 0
        self.reasons.append(word)
        return len(self.reasons) - 1

    def entries(self) -> tuple[list[str], int, list[int], list[array[int]]]:
        """The reasons, how many rows were forgotten, which requests are not over after all, and the
        columns."""
        return self.reasons, self.dropped, sorted(self._revived), self._columns


def _own_itl(request: Request) -> int:
    """99th percentile of the gaps between the request's own tokens (ns, nearest rank); -1 when they
    are not known."""
    if (
        request.incomplete
        or request.unseen
        or not request.output_tokens <= request.observed <= _TOKENS
    ):
        return -1
    times, _ = decode.token_times(request)
    if len(times) < 2 or len(times) < request.output_tokens:
        return -1
    gaps = np.diff(np.frombuffer(times, np.int64))
    rank = max(1, math.ceil(0.99 * len(gaps)))
    if gaps.all():
        return int(np.partition(gaps, rank - 1)[rank - 1])
    # Several tokens at one instant share the gap before it; those that came with the first one took
    # none.
    ends = np.flatnonzero(gaps)
    counts = np.diff(ends, append=len(gaps))
    shared = np.repeat(gaps[ends] / counts, counts)
    none = len(gaps) - len(shared)
    return int(np.partition(shared, rank - 1 - none)[rank - 1 - none]) if rank > none else 0


def _ns(value: float | None) -> int:
    return -1 if value is None else round(value)

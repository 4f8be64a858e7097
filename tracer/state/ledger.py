"""What requests came to: one row for each of the last `ROWS` that are over, in columns of whole numbers.

Lengths, ends, hits and targets are asked for by request, for any group and any window, and by targets that are only
named when somebody looks: sums and histograms cannot answer that. A row is written when the request is over, and again
when something more is told of it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tracer.clock import NS_PER_S
from tracer.state import chunks, decode, latency
from tracer.state.requests import Request
from tracer.state.tally import reason_of

ROWS: Final = 16_384
COLUMNS: Final = (
    "serial", "over", "group", "reason", "prompt", "cached", "output", "queue", "prefill", "ttft", "tpot", "itl", "e2e",
    "preemptions",
)  # fmt: skip
"""`over`: instant (ns). Times in ns, tokens: -1 where not known. `itl` is the request's own 99th percentile, `reason` a
place in `Ledger.reasons`."""
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
_PIECE: Final = 32
"""Rows that are told together in a keyframe: those of some seconds."""

Ints = npt.NDArray[np.int64]


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self.reasons: list[str] = list(KNOWN_REASONS)
        self.dropped = 0
        """Rows that were forgotten, the oldest first."""
        self._columns: list[array[int]] = [array("q") for _ in COLUMNS]
        self._places: dict[int, int] = {}
        """Number of its row, counted from the first ever, by request."""

    def __len__(self) -> int:
        return len(self._columns[0])

    def put(self, request: Request, group: int) -> None:
        """Write the row of a request that is over."""
        row = tuple(min(max(value, -1), _MOST) for value in (
            request.serial, request.over or 0, group, self._reason(request), request.prompt_tokens,
            request.cached_tokens, request.output_tokens, _ns(latency.queue(request)), _ns(latency.prefill(request)),
            _ns(latency.ttft(request)), _ns(latency.tpot(request)), _own_itl(request), _ns(latency.e2e(request)),
            len(request.preemptions),
        ))  # fmt: skip
        place = self._places.get(request.serial)
        if place is not None and place >= self.dropped:
            at = place - self.dropped
            for column, value in zip(self._columns, row, strict=True):
                column[at] = value
            return
        self._places[request.serial] = self.dropped + len(self)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        if len(self) >= ROWS + _CHUNK:
            self._forget(_CHUNK)

    def drop(self, serial: int) -> None:
        """The request is not over after all: its row counts for nothing."""
        place = self._places.get(serial)
        if place is not None and place >= self.dropped:
            self._columns[1][place - self.dropped] = -1

    def since(self, began: int) -> float | None:
        """From when on all rows are there, in s after `began` (ns); None when none was forgotten."""
        return (self._columns[1][0] - began) / NS_PER_S if self.dropped and len(self) else None

    def columns(self) -> dict[str, Ints]:
        """The rows of requests that are over, by column."""
        found = {name: np.array(column, np.int64) for name, column in zip(COLUMNS, self._columns, strict=True)}
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

    # --- keyframes

    def chunks(self) -> dict[str, bytes]:
        """All rows, in pieces that change one by one. `restore` takes them."""
        pieces = {"reasons": "\0".join(self.reasons).encode("utf-8", "surrogatepass")}
        first = self.dropped
        cut = chunks.cut(self._columns, _PIECE)
        pieces.update({str(number): piece for number, piece in enumerate(cut, first // _PIECE)})
        pieces["size"] = array("q", (first, len(self))).tobytes()
        return pieces

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Take over what `chunks` told, pieces of rows that have gone left out. Raises ValueError or KeyError."""
        size = array("q")
        size.frombytes(pieces["size"])
        first, rows = size
        words = pieces["reasons"].decode("utf-8", "surrogatepass").split("\0")
        if not (first >= 0 and 0 <= rows < ROWS + _CHUNK and first % _CHUNK == 0) or len(words) > REASONS:
            raise ValueError("no such rows")
        self.reasons, self.dropped = words, first
        told = [pieces[str(number)] for number in range(first // _PIECE, -(-(first + rows) // _PIECE))]
        for column, values in zip(self._columns, chunks.join(told, len(COLUMNS), _PIECE, rows), strict=True):
            column.frombytes(values.astype(np.int64).tobytes())
        reasons = np.frombuffer(self._columns[COLUMNS.index("reason")], np.int64)
        if rows and not 0 <= reasons.min() <= reasons.max() < len(words):
            raise ValueError("no such reason")
        self._places = dict(zip(self._columns[0], range(first, first + rows), strict=True))


def _own_itl(request: Request) -> int:
    """99th percentile of the gaps between the request's own tokens (ns, nearest rank); -1 when they are not known."""
    if request.incomplete or request.unseen or not request.output_tokens <= request.observed <= _TOKENS:
        return -1
    times, _ = decode.token_times(request)
    if len(times) < 2 or len(times) < request.output_tokens:
        return -1
    instants, counts = np.unique(np.frombuffer(times, np.int64), return_counts=True)
    # Several tokens at one instant share the gap before it; those that came with the first one took none.
    gaps = np.concatenate([[0.0], np.diff(instants) / counts[1:]])
    counts[0] -= 1
    order = np.argsort(gaps)
    reached = np.cumsum(counts[order])
    rank = max(1, math.ceil(0.99 * (len(times) - 1)))
    return int(gaps[order[int(np.searchsorted(reached, rank))]])


def _ns(value: float | None) -> int:
    return -1 if value is None else round(value)

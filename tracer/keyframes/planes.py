"""Columns of numbers as keyframes hold them: in planes of bytes, which zstd packs better than numbers one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_NONES: Final = 0x80
"""Flag: which rows hold nothing is told first, a byte for each."""
_SUMMED: Final = 0x40
"""Flag: each number is written less the one before it."""
_POSITIVE: Final = np.int64((1 << 63) - 1)
_OF_A_BYTE: Final[Ints] = np.array([byte >> 1 ^ -(byte & 1) for byte in range(256)], np.int64)


def pack_column(values: Sequence[int | None]) -> bytes:
    """Numbers, or None, as bytes: flags and the width of a number, which rows hold None, and the zigzagged numbers, all
    lowest bytes first. Raises OverflowError for what 64 bits do not hold."""
    known = [value for value in values if value is not None]
    flags, nones = 0, b""
    if len(known) < len(values):
        flags |= _NONES
        nones = bytes([value is None for value in values])
    numbers = np.array(known, np.int64)
    less = np.diff(numbers, prepend=0)
    if _bits(less) < _bits(numbers):
        numbers = less
        flags |= _SUMMED
    zigzagged = ((numbers << 1) ^ (numbers >> 63)).astype("<i8")
    width = max(1, (int(zigzagged.view(np.uint64).max(initial=0)).bit_length() + 7) // 8)
    return bytes([flags | width]) + nones + zigzagged.view(np.uint8).reshape(-1, 8).T[:width].tobytes()


def unpack_column(packed: bytes, rows: int) -> list[Any]:
    """The numbers of `pack_column`, of which there must be `rows`. Raises ValueError or IndexError when there are not.
    Each takes a byte of `packed` at least, so that it bounds what is made."""
    flags, at = packed[0], 1
    holds: npt.NDArray[np.bool_] | None = None
    count = rows
    if flags & _NONES:
        holds = np.frombuffer(packed, np.uint8, rows, at) == 0
        count, at = int(holds.sum()), at + rows
    width = flags & 15
    if not 0 < width <= 8 or len(packed) - at != width * count:
        raise ValueError("a column was cut")
    if not count:
        return [None] * rows
    if width == 1:
        numbers = _OF_A_BYTE[np.frombuffer(packed, np.uint8, count, at)]
    else:
        wide = np.zeros((count, 8), np.uint8)
        wide[:, :width] = np.frombuffer(packed, np.uint8, width * count, at).reshape(width, count).T
        zigzagged = wide.view("<i8").ravel()
        numbers = ((zigzagged >> 1) & _POSITIVE) ^ -(zigzagged & 1)
    if flags & _SUMMED:
        numbers = np.add.accumulate(numbers)
    found: list[Any] = numbers.tolist()
    if holds is None:
        return found
    rest = iter(found)
    return [next(rest) if there else None for there in holds.tolist()]


def _bits(numbers: Ints) -> float:
    return float(np.log2(1.0 + np.abs(numbers.astype(np.float64))).sum())

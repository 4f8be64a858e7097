"""Columns of numbers as keyframes hold them: in planes of bytes, which zstd packs better than
numbers one by one."""

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

_OF_BYTES: Final[list[int]] = _OF_A_BYTE.tolist()


def pack_column(values: Sequence[int | None]) -> bytes:
    """Numbers, or None, as bytes: flags and the width of a number, which rows hold None, and the
    zigzagged numbers, all lowest bytes first. Raises OverflowError for what 64 bits do not hold."""
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
    return (
        bytes([flags | width]) + nones + zigzagged.view(np.uint8).reshape(-1, 8).T[:width].tobytes()
    )


def unpack_column(packed: bytes, rows: int) -> list[Any]:
    """The numbers of `pack_column`, of which there must be `rows`. Raises ValueError or IndexError
    when there are not. Each takes a byte of `packed` at least, so that it bounds what is made."""
    flags, at = packed[0], 1
    # mostly: all the same
    if flags == 1 and len(packed) == rows + 1 and packed.count(packed[1:2], 1) == rows:
        return [_OF_BYTES[packed[1]]] * rows if rows else []
    holds: npt.NDArray[np.bool_] | None = None
    count = rows
    if flags & _NONES:
        count = packed.count(0, at, at + rows)
        if count == 0 and len(packed) == rows + 1:
            return [None] * rows
        holds = np.frombuffer(packed, np.uint8, rows, at) == 0
        at += rows
    width = flags & 15
    if not 0 < width <= 8 or len(packed) - at != width * count:
        raise ValueError("a column was cut")
    if not count:
        return [None] * rows
    if width == 1:
        if not flags & _SUMMED and holds is None:
            return list(map(_OF_BYTES.__getitem__, packed[at:]))
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


def pack_columns(columns: Sequence[Sequence[int | None]]) -> bytes:
    """Columns of one length, one behind the other, so that those of one width are read at once: the
    flags and the width of each (0 where all its numbers are the same), which rows hold None, then
    the numbers, by width, as in `pack_column`; of a column of width 0 the number, in eight bytes.
    Raises OverflowError for what 64 bits do not hold."""
    heads, nones = bytearray(), bytearray()
    parts: dict[int, list[Ints]] = {}
    for column in columns:
        known = [value for value in column if value is not None]
        flags = 0
        if len(known) < len(column):
            flags |= _NONES
            nones += bytes([value is None for value in column])
        numbers = np.array(known, np.int64)
        if known.count(known[0]) == len(known) if known else True:
            heads.append(flags)
            parts.setdefault(0, []).append(numbers[:1] if known else np.zeros(1, np.int64))
            continue
        less = np.diff(numbers, prepend=0)
        if _bits(less) < _bits(numbers):
            numbers = less
            flags |= _SUMMED
        zigzagged = (numbers << 1) ^ (numbers >> 63)
        width = max(1, (int(zigzagged.view(np.uint64).max()).bit_length() + 7) // 8)
        heads.append(flags | width)
        parts.setdefault(width, []).append(zigzagged)
    body = b"".join(
        np.concatenate(parts[width])
        .astype("<i8")
        .view(np.uint8)
        .reshape(-1, 8)
        .T[: width or 8]
        .tobytes()
        for width in sorted(parts)
    )
    return bytes(heads) + bytes(nones) + body


def unpack_columns(packed: bytes, number: int, rows: int) -> list[list[Any]]:
    """The columns of `pack_columns`, of which there must be so many, with so many rows. Raises
    ValueError or IndexError when there are not."""
    heads, at = packed[:number], number
    masks: dict[int, bytes] = {}
    places: dict[int, list[tuple[int, int]]] = {}
    for place in range(number):
        count = rows
        if heads[place] & _NONES:
            masks[place] = packed[at : at + rows]
            count = masks[place].count(0)
            at += rows
        width = heads[place] & 15
        places.setdefault(width, []).append((place, count if width else 1))
    found: list[list[Any]] = [[]] * number
    for width in sorted(places):
        size, total = width or 8, sum(count for _, count in places[width])
        wide = np.zeros((total, 8), np.uint8)
        wide[:, :size] = np.frombuffer(packed, np.uint8, size * total, at).reshape(size, total).T
        at += size * total
        flat = wide.view("<i8").ravel()
        if width:
            flat = ((flat >> 1) & _POSITIVE) ^ -(flat & 1)
        plain, begin = flat.tolist(), 0
        for place, count in places[width]:
            if not width:
                same = masks[place].count(0) if place in masks else rows
                found[place] = [plain[begin]] * same
            elif heads[place] & _SUMMED:
                found[place] = np.add.accumulate(flat[begin : begin + count]).tolist()
            else:
                found[place] = plain[begin : begin + count]
            begin += count
    if at != len(packed) or len(heads) != number:
        raise ValueError("columns were cut")
    for place, mask in masks.items():
        if len(mask) != rows:
            raise ValueError("a column was cut")
        rest = iter(found[place])
        found[place] = (
            [None if none else next(rest) for none in mask] if found[place] else [None] * rows
        )
    return found


def _bits(numbers: Ints) -> float:
    return float(np.log2(1.0 + np.abs(numbers.astype(np.float64))).sum())

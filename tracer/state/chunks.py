"""Columns of whole numbers in pieces of so many entries, as keyframes tell what only grows: a piece
that is full does not change any more. In a piece each number is less the one before it, lowest
bytes of all of them first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def planes(numbers: Ints) -> bytes:
    """Numbers in eight planes of bytes, the lowest first: zstd packs them better than one by
    one."""
    return numbers.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes()


def from_planes(data: bytes | memoryview) -> Ints:
    """The numbers of `planes`. Raises ValueError when the planes are not of one length."""
    numbers: Ints = (
        np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(8, -1).T).view("<i8").ravel()
    )
    return numbers


def cut(columns: Sequence[Sequence[int]], size: int) -> list[bytes]:
    """Pieces of `size` entries of columns that are of one length; the last one may have less."""
    table = np.array(columns, np.int64)
    rest = np.diff(table, axis=1, prepend=0)
    rest[:, ::size] = table[:, ::size]  # each piece stands alone
    rows, full = len(columns), table.shape[1] // size
    laid = (
        rest[:, : full * size].reshape(rows, full, size).transpose(1, 0, 2).astype("<i8", order="C")
    )
    whole = laid.view(np.uint8).reshape(full, rows * size, 8).transpose(0, 2, 1).tobytes()
    length = 8 * rows * size
    pieces = [whole[begin : begin + length] for begin in range(0, len(whole), length)]
    if table.shape[1] > full * size:
        pieces.append(planes(rest[:, full * size :].ravel()))
    return pieces


def join(pieces: Sequence[bytes], rows: int, size: int, count: int) -> Ints:
    """The columns of `cut`, as `rows` rows of `count` entries. Raises ValueError for what these are
    not."""
    length = 8 * rows * size
    if len(pieces) != -(-count // size) or any(len(piece) != length for piece in pieces[:-1]):
        raise ValueError("entries are missing")
    if not pieces:
        return np.zeros((rows, 0), np.int64)
    whole = np.frombuffer(b"".join(pieces[:-1]), np.uint8).reshape(-1, 8, rows * size)
    laid = np.ascontiguousarray(whole.transpose(0, 2, 1)).view("<i8").reshape(-1, rows, size)
    full = np.add.accumulate(laid, axis=2).transpose(1, 0, 2).reshape(rows, -1)
    table = np.concatenate(
        [full, np.add.accumulate(from_planes(pieces[-1]).reshape(rows, -1), axis=1)], axis=1
    )
    if table.shape[1] != count:
        raise ValueError("entries are missing")
    return table


class Sleeping(NamedTuple):
    """Columns of `length` entries that are still in their pieces, those numbered `numbers` behind
    `prefix`: read when someone looks at them."""

    pieces: Mapping[str, bytes]
    prefix: str
    numbers: range
    length: int

    def table(self, rows: int, size: int) -> Ints | None:
        """As `join`; None where the pieces contradict themselves."""
        try:
            told = [self.pieces[f"{self.prefix}{number}"] for number in self.numbers]
            return join(told, rows, size, self.length).astype(np.int64)
        except (ValueError, TypeError, LookupError):
            return None


def split(
    pieces: Mapping[str, bytes], first: int, count: int, size: int, awake: int, prefix: str = ""
) -> tuple[Sleeping | None, list[bytes], int]:
    """Of `count` entries from number `first` on, in pieces of `size`: those that may sleep, the
    last pieces, `awake` of them, and how many entries these hold. Raises KeyError when one of these
    is missing."""
    numbers = range(first // size, -(-(first + count) // size))
    before = max(0, len(numbers) - awake)
    asleep = Sleeping(pieces, prefix, numbers[:before], before * size) if before else None
    return (
        asleep,
        [pieces[f"{prefix}{number}"] for number in numbers[before:]],
        count - before * size,
    )

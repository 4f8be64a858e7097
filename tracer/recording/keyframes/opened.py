"""A keyframe that was read, and what was taken out of it so far.

A state is made of a hundred keyframes, most of them the same as those of the state before: what was
unpacked of one is kept with it, so that it is not unpacked again.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.events import unpack_u32
from tracer.recording.keyframes.records import (
    SETTLED,
    Alive,
    Keyframe,
    Told,
    columns_of,
    early_record,
    found_record,
    late_record,
    steps_record,
    told_columns,
    unpacked,
)
from tracer.state.chunks import from_planes

Ints = npt.NDArray[np.int64]
Row = tuple[Any, ...]
StepColumns = tuple["array[int]", "array[int]", "array[int]"]
"""Token instants, batch sizes and prefill tokens of steps."""

_NONE: Final[dict[int, Row]] = {}
LAST: Final = 4 + SETTLED.index("last")
"""Place of `last` in `steps_record`."""
ROW_BYTES: Final = 800
"""About what a row of a request takes in memory."""


class KeyframeError(ValueError):
    """This is no keyframe of ours, or one that contradicts itself."""


def check(holds: bool, what: str) -> None:
    """Raise KeyframeError unless `holds`."""
    if not holds:
        raise KeyframeError(what)


class Opened:
    """A keyframe. `size`: about how many bytes it takes with what was taken out of it. Everything
    else raises an exception where the keyframe contradicts itself."""

    def __init__(self, keyframe: Keyframe, size: int) -> None:
        self.keyframe = keyframe
        self.size = size
        self._pieces: dict[int, list[bytes]] = {}

    @functools.cached_property
    def found(self) -> dict[int, Row]:
        """By request, by what it is found, with instants absolute: rows of
        `columns_of("found")`."""
        told = self.keyframe.found
        rows = dict(zip(unpack_u32(told.requests).tolist(), _found_rows(told), strict=True))
        self.size += ROW_BYTES * len(rows)
        return rows

    @functools.cached_property
    def early(self) -> list[Row]:
        """Rows of `columns_of("early")`: those of all that live are wanted, wherever they began."""
        rows: list[Row] = list(zip(*told_columns(early_record(), self.keyframe.early), strict=True))
        self.size += ROW_BYTES * len(rows)
        return rows

    @functools.cached_property
    def running(self) -> dict[int, Row]:
        """Rows of the group ``steps``, of those that live here alone: until they end, these are
        wanted."""
        live = set(unpack_u32(_alive_decoder().decode(unpacked(self.keyframe.present)).live))
        told = unpack_u32(self.keyframe.steps.requests)
        rows = {
            serial: row for serial, row in zip(told, self.steps(), strict=True) if serial in live
        }
        self.size += ROW_BYTES * len(rows)
        return rows

    def steps(self) -> list[Row]:
        """Rows of the group ``steps``, with `last` made absolute."""
        columns = told_columns(steps_record(), self.keyframe.steps)
        columns[LAST] = np.cumsum(np.asarray(columns[LAST], np.int64)).tolist()
        return list(zip(*columns, strict=True))

    @functools.cached_property
    def columns(self) -> dict[str, StepColumns]:
        """By source, what is told of its steps."""
        found: dict[str, StepColumns] = {}
        for name, record in self.keyframe.histories.items():
            columns = (
                array("q", summed(record.tokens).tobytes()),
                unpack_u32(record.sizes),
                unpack_u32(record.prefills),
            )
            check(
                len(columns[0]) == len(columns[1]) == len(columns[2]), "columns of different length"
            )
            found[name] = columns
            self.size += 16 * len(columns[0])
        return found

    @functools.cached_property
    def weights(self) -> Ints:
        """Four rows: finished requests, their characters, their tokens and their flags."""
        rows = summed(self.keyframe.weights).reshape(4, -1)
        self.size += rows.nbytes
        return rows

    @functools.cached_property
    def pieces(self) -> dict[str, dict[str, Place]]:
        """Where the pieces are that it tells, by kind and name."""
        kinds: dict[str, dict[str, Place]] = {}
        for number, record in enumerate(self.keyframe.pieces):
            for place, name in enumerate(record.names):
                kind, _, rest = name.rpartition(":" if name.startswith("books/") else "/")
                kinds.setdefault(kind, {})[rest] = (self, number, place)
        return kinds

    def piece(self, number: int, place: int) -> bytes:
        """A piece of the record `number`."""
        told = self._pieces.get(number)
        if told is None:
            record = self.keyframe.pieces[number]
            told = self._pieces[number] = _pieces_decoder().decode(unpacked(record.pieces))
            check(len(told) == len(record.names), "pieces without a name")
            self.size += record.pieces.size
        return told[place]

    def warm(self) -> None:
        """Take out what most states ask for, while nobody waits for one."""
        for part in ("found", "early", "running", "pieces", "weights", "columns"):
            getattr(self, part)
        for number, record in enumerate(self.keyframe.pieces):
            if (
                record.names
                and record.names[0][-1].isdigit()
                and not record.names[0].startswith("books/ledger")
            ):
                self.piece(number, 0)


Place = tuple[Opened, int, int]
"""Where a piece is: the keyframe, which of its records, and the place in that."""


class Pieces(Mapping[str, bytes]):
    """Pieces of one kind by name, each read when it is asked for."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> bytes:
        opened, number, place = self._places[name]
        return opened.piece(number, place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def pieces_of(chain: Sequence[Opened]) -> dict[str, Pieces]:
    """By kind, the pieces that a chain of keyframes tells: what is told last holds."""
    kinds: dict[str, dict[str, Place]] = {}
    for opened in chain:
        for kind, places in opened.pieces.items():
            kinds.setdefault(kind, {}).update(places)
    return {kind: Pieces(places) for kind, places in kinds.items()}


def opened(content: bytes | Opened) -> Opened:
    """A keyframe from its bytes. Raises KeyframeError for what is none."""
    if isinstance(content, Opened):
        return content
    try:
        return Opened(_decoder().decode(content), len(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise KeyframeError(f"{type(error).__name__}: {error}") from None


class Rows:
    """What a chain of keyframes tells of requests: by what they are found at once, all else once
    someone wants one of the same keyframe. What is told last holds."""

    NEAR = 8
    """Keyframes at the end of a chain that are looked through one by one: those that are live are
    told of there."""

    def __init__(self, chain: Sequence[Opened]) -> None:
        self._chain = chain
        self._near: dict[tuple[int, str], dict[int, int]] = {}
        """Places of requests in the last keyframes, by keyframe and group."""
        self._all: dict[str, tuple[npt.NDArray[np.uint32], Ints]] = {}
        """By group: the requests of all keyframes, one after the other, and where each keyframe
        begins."""
        self._read: dict[tuple[int, str], list[Row]] = {}

    def found(self, wanted: set[int]) -> dict[int, Row]:
        """By what the requests `wanted` are found: rows of `columns_of("found")`."""
        missing = wanted.copy()
        found: dict[int, Row] = {}
        for opened in reversed(self._chain):  # those of now are mostly told of near the end
            if not missing:
                break
            here = missing.intersection(unpack_u32(opened.keyframe.found.requests))
            if here:
                rows = opened.found
                found.update({serial: rows[serial] for serial in here})
                missing -= here
        return found

    def row(self, group: str, serial: int) -> Row:
        """The row of a request in the group ``early``, ``late`` or ``steps``, of the latter with
        `last` made absolute."""
        last = len(self._chain)
        for number in range(last - 1, max(last - self.NEAR, 0) - 1, -1):
            places = self._near.get((number, group))
            if places is None:
                requests: array[int] = unpack_u32(self._told(number, group).requests)
                places = self._near[number, group] = dict(
                    zip(requests, range(len(requests)), strict=True)
                )
            if serial in places:
                row = (
                    self._chain[number].__dict__.get("running", _NONE).get(serial)
                    if group == "steps"
                    else None
                )
                return self._rows(number, group)[places[serial]] if row is None else row
        known = self._all.get(group)
        if known is None:
            parts = [self._told(number, group).requests for number in range(last)]
            firsts = np.cumsum([0, *(len(part) // 4 for part in parts)])
            known = self._all[group] = np.frombuffer(b"".join(parts), "<u4"), firsts
        serials, firsts = known
        found = np.flatnonzero(serials == serial)
        check(len(found) > 0, "a request is not told")
        place = int(found[-1])
        number = int(np.searchsorted(firsts, place, side="right")) - 1
        return self._rows(number, group)[place - int(firsts[number])]

    def _told(self, number: int, group: str) -> Told:
        told: Told = getattr(self._chain[number].keyframe, group)
        return told

    def _rows(self, number: int, group: str) -> list[Row]:
        opened = self._chain[number]
        if group == "early":
            return opened.early
        rows = self._read.get((number, group))
        if rows is None:
            rows = (
                opened.steps()
                if group == "steps"
                else list(zip(*told_columns(late_record(), opened.keyframe.late), strict=True))
            )
            self._read[number, group] = rows
        return rows


def summed(packed: bytes) -> Ints:
    """Values of which the differences are told, in planes."""
    values: Ints = np.add.accumulate(from_planes(packed))
    return values


def _found_rows(told: Told) -> Iterator[Row]:
    """Rows of `columns_of("found")`, with instants made absolute."""
    columns = told_columns(found_record(), told)
    seen, received = map(columns_of("found").index, ("first_seen", "received"))
    columns[seen] = np.cumsum(np.asarray(columns[seen], np.int64)).tolist()
    columns[received] = [
        None if late is None else first + late
        for first, late in zip(columns[seen], columns[received], strict=True)
    ]  # fmt: skip
    return zip(*columns, strict=True)


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Keyframe]:
    return msgspec.msgpack.Decoder(Keyframe)


@functools.cache
def _alive_decoder() -> msgspec.msgpack.Decoder[Alive]:
    return msgspec.msgpack.Decoder(Alive)


@functools.cache
def _pieces_decoder() -> msgspec.msgpack.Decoder[list[bytes]]:
    return msgspec.msgpack.Decoder(list[bytes])

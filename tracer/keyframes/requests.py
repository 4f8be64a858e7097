"""Requests from the columns of keyframes.

Most requests of a state are over, and nobody looks at them: they are made when someone does. Until then a
`SleepingRequest` stands for one, with what it takes to be found and put in order.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Set
from dataclasses import MISSING, fields
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.events import unpack_u32
from tracer.keyframes.records import (
    CACHES,
    HistoryRecord,
    Keyframe,
    Told,
    columns_of,
    early_record,
    instants_of,
    late_record,
    steps_record,
    unpacked,
)
from tracer.state.decode import DECODE_PARTS
from tracer.state.request_table import _shorten as shorten
from tracer.state.requests import Request, Settled
from tracer.state.source import Source

Ints = npt.NDArray[np.int64]
Row = tuple[Any, ...]


class KeyframeError(ValueError):
    """This is no keyframe of ours, or one that contradicts itself."""


def check(holds: bool, what: str) -> None:
    """Raise KeyframeError unless `holds`."""
    if not holds:
        raise KeyframeError(what)


class Rows:
    """What a chain of keyframes tells of the requests `kept`: the early row of each; late rows and those of steps once
    someone wants one of the same keyframe."""

    def __init__(self, chain: list[Keyframe], kept: set[int]) -> None:
        self._chain = chain
        self._late: dict[int, tuple[int, int]] = {}
        self._steps: dict[int, tuple[int, int]] = {}
        for number, keyframe in enumerate(chain):
            for places, told in ((self._late, keyframe.late), (self._steps, keyframe.steps)):
                serials = unpack_u32(told.requests)
                places.update(zip(serials, zip(repeat(number), range(len(serials))), strict=False))
        self._read: dict[tuple[int, str], list[Row]] = {}
        self.early: dict[int, Row] = {}
        missing = kept.copy()
        for keyframe in reversed(chain):  # what is told last holds, and is mostly near the end
            found = missing.intersection(unpack_u32(keyframe.early.requests)) if missing else missing
            if found:
                self.early.update(_early_rows(keyframe.early, found))
                missing -= found

    def late(self, serial: int) -> Row:
        """The late row of a request."""
        number, place = self._late[serial]
        rows = self._read.get((number, "late"))
        if rows is None:
            told = self._chain[number].late
            columns = msgspec.structs.astuple(_decoder_of(late_record()).decode(unpacked(told.columns)))
            rows = self._read[number, "late"] = list(zip(*columns, strict=True))
        return rows[place]

    def steps(self, serial: int) -> Row:
        """The row of a request's steps, with `last` made absolute."""
        number, place = self._steps[serial]
        rows = self._read.get((number, "steps"))
        if rows is None:
            told = self._chain[number].steps
            columns = list(msgspec.structs.astuple(_decoder_of(steps_record()).decode(unpacked(told.columns))))
            columns[_LAST] = np.cumsum(np.asarray(columns[_LAST], np.int64)).tolist()
            rows = self._read[number, "steps"] = list(zip(*columns, strict=True))
        return rows[place]


def _early_rows(told: Told, wanted: Set[int]) -> Iterator[tuple[int, Row]]:
    """The early rows of the requests `wanted`, with `first_seen` made absolute, for which all rows are needed."""
    columns = list(msgspec.structs.astuple(_decoder_of(early_record()).decode(unpacked(told.columns))))
    seen = columns_of("early").index("first_seen")
    columns[seen] = np.cumsum(np.asarray(columns[seen], np.int64)).tolist()
    for serial, row in zip(unpack_u32(told.requests), zip(*columns, strict=True), strict=True):
        if serial in wanted:
            yield serial, row


_LAST: Final = 2
"""Place of `last` in `steps_record`."""
_APART: Final = 10
"""Columns there before those that are fields of a request."""


@functools.cache
def _decoder_of(record: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(record)


def _absolute(row: Row, places: tuple[int, ...], origin: int) -> list[Any]:
    """A row with its instants no longer differences."""
    values = list(row)
    for place in places:
        if values[place] is not None:
            values[place] = origin = origin + values[place]
    return values


class Columns:
    """Token instants, batch sizes and prefill tokens of one source's steps, by index; there may be holes."""

    def __init__(self, chain: list[HistoryRecord]) -> None:
        self._firsts: list[int] = []
        self._parts: list[tuple[array[int], array[int], array[int]]] = []
        for record in chain:
            columns = array("q"), unpack_u32(record.sizes), unpack_u32(record.prefills)
            columns[0].frombytes(summed(record.tokens).astype("=i8").tobytes())
            check(len(columns[0]) == len(columns[1]) == len(columns[2]), "columns of different length")
            if self._parts and record.first == self._firsts[-1] + len(self._parts[-1][0]):
                for column, more in zip(self._parts[-1], columns, strict=True):
                    column.extend(more)
            elif len(columns[0]):
                check(record.first >= 0, "no such steps")
                self._firsts.append(record.first)
                self._parts.append(columns)

    def cut(self, first: int, length: int) -> tuple[array[int], array[int], array[int]]:
        """The columns from index `first` on."""
        if not length:
            return array("q"), array("I"), array("I")
        place = bisect_right(self._firsts, first) - 1
        check(place >= 0 and length > 0, "no such steps")
        begin = first - self._firsts[place]
        tokens, sizes, prefills = self._parts[place]
        check(begin + length <= len(tokens), "no such steps")
        return tokens[begin : begin + length], sizes[begin : begin + length], prefills[begin : begin + length]


class Maker:
    """Makes requests of their rows."""

    def __init__(self, sources: dict[str, Source], columns: dict[str, Columns], rows: Rows) -> None:
        self._sources = sources
        self._columns = columns
        self._rows = rows
        early, late, steps = map(columns_of, ("early", "late", "steps"))
        self._caches = [field.default for field in fields(Request) if field.name in CACHES]
        names = ("serial", "batch", "settled", *early, *late, *steps, *_cache_names())
        self._order = [names.index(field.name) for field in fields(Request)]
        places = map(early.index, ("first_seen", "id", "ids", "received"))
        self._first_seen, self._id, self._ids, self._received = places
        self._finding = itemgetter(*map(early.index, ("first_seen", "keys", "names", "ids")))
        self._over = late.index("over")

    def now(self, serial: int) -> Request:
        """The request. Raises an exception when its rows contradict themselves."""
        facts = self._facts(self._rows.early[serial])
        values = self._values(serial, facts, self._rows.late(serial), self._rows.steps(serial))
        request = Request(*[values[place] for place in self._order])
        _check_steps(request)
        return request

    def later(self, serial: int) -> Request:
        """The request, to be made when someone looks at it."""
        early = self._rows.early[serial]
        first_seen, keys, names, ids = self._found(early)
        received = early[self._received]
        request = _asleep(SleepingRequest)
        _put(request, "front", self)
        _put(request, "serial", serial)
        _put(request, "first_seen", first_seen)
        _put(request, "received", None if received is None else first_seen + received)
        _put(request, "keys", keys)
        _put(request, "names", names)
        _put(request, "ids", ids)
        return request

    def wake(self, request: Request) -> None:
        """Fill in a sleeping request. One that contradicts itself has no steps, is lost and incomplete."""
        serial, rows = request.serial, self._rows
        facts = self._facts(rows.early[serial])
        _put(request, "__class__", Request)
        try:
            values = self._values(serial, facts, rows.late(serial), rows.steps(serial))
            Request.__init__(request, *[values[place] for place in self._order])
            _check_steps(request)
            check(request.over is not None, "a finished request is not over")
        except (ValueError, TypeError, LookupError, OverflowError):
            values = self._values(serial, facts, None, None)
            Request.__init__(request, *[values[place] for place in self._order])
            request.over = request.first_seen
            request.lost = request.incomplete = True

    def _facts(self, early: Row) -> list[Any]:
        """A row of early fields as they are in a request."""
        facts = _absolute(early, instants_of("early"), early[self._first_seen])
        facts[self._ids] = ids = self._found(early)[-1]
        facts[self._id] = facts[self._id] or ids[-1]
        return facts

    def _found(self, early: Row) -> tuple[int, list[tuple[str, int]], list[str], list[str]]:
        """By what a request is found: when it was first seen, keys, names and ids."""
        first_seen, keys, names, ids = self._finding(early)
        if "" in ids:
            check(bool(names), "a request without a name is named after it")
            short = shorten(names[0])
            ids = [name or short for name in ids]
        check(bool(ids and keys), "a request that nobody knows")
        return first_seen, keys, names, ids

    def _values(self, serial: int, facts: list[Any], late: Row | None, steps: Row | None) -> list[Any]:
        """Values of all fields, in the order that `_order` refers to; those of no `late` and no `steps` as in a new
        request."""
        head = [serial, None, Settled(), *facts]
        head += _defaults("late") if late is None else _absolute(late, instants_of("late"), facts[self._first_seen])
        if steps is None:
            return [*head, *_defaults("steps"), *self._caches]
        source, count, last, parts, step, token, end, runs, times, sizes = steps[:_APART]
        head[1] = self._sources[source].batch if source else None
        check(len(parts) in (0, len(DECODE_PARTS)), "another division of a step")
        instants, batches = self._tokens(source, runs, times, sizes)
        check(len(instants) == len(batches) <= count, "token instants without tokens")
        head[2] = Settled(count, last, instants, batches, parts, step, last + token, last + token + end)
        return [*head, *_absolute(steps[_APART:], instants_of("steps"), last), *self._caches]

    def _tokens(
        self, source: str, runs: list[int] | None, times: bytes, sizes: bytes
    ) -> tuple[array[int], array[int]]:
        """Token instants and batch sizes."""
        instants, batches = array("q"), array("I")
        if runs is None:
            instants.frombytes(summed(times).astype("=i8").tobytes())
            return instants, unpack_u32(sizes)
        for first, length in zip(runs[::2], runs[1::2], strict=True):
            part, size, _ = self._columns[source].cut(first, length)
            instants.extend(part)
            batches.extend(size)
        return instants, batches


class SleepingRequest(Request):
    """A request of which little is filled in yet: it becomes a `Request` as soon as anything else is asked for, or
    changed."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        self._wake()
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._wake()
        setattr(self, name, value)

    def went_on(self) -> None:
        """As in `Request`, whose `front` is something else as long as it sleeps."""
        self._wake()
        self.went_on()

    def _wake(self) -> None:
        maker: Maker = object.__getattribute__(self, "front")
        maker.wake(self)


_put: Final = object.__setattr__
_asleep: Final = SleepingRequest.__new__


def _cache_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Request) if field.name in CACHES)


def _defaults(group: str) -> list[Any]:
    """Values of a group's fields in a new request."""
    known = {field.name: field for field in fields(Request)}
    return [
        field.default if field.default_factory is MISSING else field.default_factory()
        for field in map(known.__getitem__, columns_of(group))
    ]  # fmt: skip


def _check_steps(request: Request) -> None:
    """What the request says of steps is about steps that its batch has, or once had."""
    if request.batch is None:
        check(not (request.spans or request.passes or request.redo) and request.open_since < 0, "steps of no batch")
        return
    history = request.batch.history
    base, last = history.base, history.last_index
    for span in request.spans:
        check(base <= span.first <= span.last <= last and 0 < span.produced <= 0xFFFF, "a span of no steps")
    for part in (*request.passes, *request.redo):
        check(not isinstance(part.step, int) or base <= part.step <= last, "a pass of no step")
    check(-1 <= request.open_since <= last and not 0 <= request.open_since < base, "a run of no steps")
    check(-1 <= request.settled.step <= last, "settled beyond the last step")


def summed(packed: bytes) -> Ints:
    """Packed i64 differences as values."""
    values: Ints = np.cumsum(np.frombuffer(packed, "<i8"))
    return values

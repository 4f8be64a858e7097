"""Requests from the columns of keyframes.

Most requests of a state are over, and nobody looks at them: they are made when someone does. Until then a
`SleepingRequest` stands for one, with what it takes to be found and put in order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tracer.events import unpack_u32
from tracer.keyframes.records import (
    CACHES,
    SETTLED,
    At,
    HistoryRecord,
    Keyframe,
    Told,
    columns_of,
    early_record,
    found_record,
    instants_of,
    late_record,
    steps_record,
    told_columns,
)
from tracer.keyframes.sleeping_steps import StepsOf, read_step
from tracer.state.chunks import from_planes
from tracer.state.decode import DECODE_PARTS
from tracer.state.requests import Request, Settled
from tracer.state.source import Source

Ints = npt.NDArray[np.int64]
Row = tuple[Any, ...]


NEAR: Final = 8
"""Keyframes at the end of a chain that are looked through one by one."""


class KeyframeError(ValueError):
    """This is no keyframe of ours, or one that contradicts itself."""


def check(holds: bool, what: str) -> None:
    """Raise KeyframeError unless `holds`."""
    if not holds:
        raise KeyframeError(what)


class Rows:
    """What a chain of keyframes tells of requests: by what they are found at once, all else once someone wants one of
    the same keyframe. What is told last holds."""

    def __init__(self, chain: list[Keyframe]) -> None:
        self._chain = chain
        self._near: dict[tuple[int, str], dict[int, int]] = {}
        """Places of requests in the last keyframes, by keyframe and group."""
        self._far: dict[str, tuple[dict[int, int], list[int]]] = {}
        """By group: places of requests in all keyframes, one after the other, and where each keyframe begins."""
        self._read: dict[tuple[int, str], list[Row]] = {}

    def found(self, wanted: set[int]) -> dict[int, Row]:
        """By what the requests `wanted` are found, with instants absolute: rows of `columns_of("found")`."""
        missing = wanted.copy()
        found: dict[int, Row] = {}
        for keyframe in reversed(self._chain):  # those of now are mostly told of near the end
            told = keyframe.found
            serials = unpack_u32(told.requests).tolist()
            here = missing.intersection(serials)
            if not here:
                continue
            rows = dict(zip(serials, _found_rows(told), strict=True))
            found.update({serial: rows[serial] for serial in here})
            missing -= here
        return found

    def row(self, group: str, serial: int) -> Row:
        """The row of a request in the group ``early``, ``late`` or ``steps``, of the latter with `last` made
        absolute."""
        last = len(self._chain)
        for number in range(last - 1, max(last - NEAR, 0) - 1, -1):  # those that are live are told of here
            places = self._near.get((number, group))
            if places is None:
                places = self._near[number, group] = _places(unpack_u32(self._told(number, group).requests))
            if serial in places:
                return self._rows(number, group)[places[serial]]
        known = self._far.get(group)
        if known is None:
            serials, firsts = array("I"), []
            for number in range(last):
                firsts.append(len(serials))
                serials.extend(unpack_u32(self._told(number, group).requests))
            known = self._far[group] = (_places(serials), firsts)
        places, firsts = known
        place = places.get(serial)
        if place is None:
            raise KeyframeError("a request is not told")
        number = bisect_right(firsts, place) - 1
        return self._rows(number, group)[place - firsts[number]]

    def _told(self, number: int, group: str) -> Told:
        told: Told = getattr(self._chain[number], group)
        return told

    def _rows(self, number: int, group: str) -> list[Row]:
        rows = self._read.get((number, group))
        if rows is None:
            columns = told_columns(_RECORDS[group](), self._told(number, group))
            if group == "steps":
                columns[_LAST] = np.cumsum(np.asarray(columns[_LAST], np.int64)).tolist()
            rows = self._read[number, group] = list(zip(*columns, strict=True))
        return rows


def _places(serials: array[int]) -> dict[int, int]:
    return dict(zip(serials, range(len(serials)), strict=True))


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


_RECORDS: Final = {"early": early_record, "late": late_record, "steps": steps_record}
_LAST: Final = 4 + SETTLED.index("last")
"""Place of `last` in `steps_record`."""
_APART: Final = 4 + len(SETTLED)
"""Columns there before those that are fields of a request."""


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

    def __init__(
        self, sources: dict[str, Source], columns: dict[str, Columns], rows: Rows, steps_of: StepsOf
    ) -> None:
        self._sources = sources
        self._columns = columns
        self._rows = rows
        self._steps_of = steps_of
        found, early, late, steps = map(columns_of, ("found", "early", "late", "steps"))
        self._caches = [field.default for field in fields(Request) if field.name in CACHES]
        names = ("serial", "batch", "settled", *found, *early, *late, *steps, *_cache_names())
        self._order = [names.index(field.name) for field in fields(Request)]
        self._first_seen, self._ids = map(found.index, ("first_seen", "ids"))
        self._id = len(found) + early.index("id")
        self._passes = [steps.index("passes"), steps.index("redo")]

    def now(self, serial: int, found: Row) -> Request:
        """The request, of which `found` is known. Raises an exception when its rows contradict themselves."""
        rows = self._rows
        facts = self._facts(found, rows.row("early", serial))
        values = self._values(serial, facts, rows.row("late", serial), rows.row("steps", serial))
        request = Request(*[values[place] for place in self._order])
        _check_steps(request)
        return request

    def later(self, found: dict[int, Row]) -> list[Request]:
        """These requests, each to be made when someone looks at it."""
        requests: list[Request] = [_asleep(SleepingRequest) for _ in found]
        columns: list[Any] = [repeat(self), found, *zip(*found.values(), strict=True)]
        for name, column in zip(("front", "serial", *columns_of("found")), columns, strict=bool(found)):
            deque(map(getattr(Request, name).__set__, requests, column), 0)
        return requests

    def wake(self, request: Request) -> None:
        """Fill in a sleeping request. One that contradicts itself has no steps, is lost and incomplete."""
        serial, rows = request.serial, self._rows
        found = tuple(getattr(request, name) for name in columns_of("found"))
        _put(request, "__class__", Request)
        try:
            facts = self._facts(found, rows.row("early", serial))
            values = self._values(serial, facts, rows.row("late", serial), rows.row("steps", serial))
            Request.__init__(request, *[values[place] for place in self._order])
            _check_steps(request)
            check(request.over is not None, "a finished request is not over")
        except (ValueError, TypeError, LookupError, OverflowError):
            values = self._values(serial, self._facts(found, None), None, None)
            Request.__init__(request, *[values[place] for place in self._order])
            request.over = request.first_seen
            request.lost = request.incomplete = True

    def _facts(self, found: Row, early: Row | None) -> list[Any]:
        """The found and early fields as they are in a request; those of no `early` as in a new one."""
        origin = found[self._first_seen]
        facts = [*found, *(_defaults("early") if early is None else _absolute(early, instants_of("early"), origin))]
        facts[self._id] = facts[self._id] or facts[self._ids][-1]
        return facts

    def _values(self, serial: int, facts: list[Any], late: Row | None, steps: Row | None) -> list[Any]:
        """Values of all fields, in the order that `_order` refers to; those of no `late` and no `steps` as in a new
        request."""
        head = [serial, None, Settled(), *facts]
        head += _defaults("late") if late is None else _absolute(late, instants_of("late"), facts[self._first_seen])
        if steps is None:
            return [*head, *_defaults("steps"), *self._caches]
        source, runs, times, sizes, count, last, step, token, end, *parts = steps[:_APART]
        parts = [part for part in parts if part is not None]
        head[1] = self._sources[source].batch if source else None
        check(len(parts) in (0, len(DECODE_PARTS)), "another division of a step")
        instants, batches = self._tokens(source, runs, times, sizes)
        check(len(instants) == len(batches) <= count, "token instants without tokens")
        head[2] = Settled(count, last, instants, batches, parts, step, last + token, last + token + end)
        fields = _absolute(steps[_APART:], instants_of("steps"), last)
        for place in self._passes:
            fields[place] = [
                part._replace(step=read_step(self._steps_of, source, *part.step, facts[self._first_seen]))
                if isinstance(part.step, At) else part
                for part in fields[place]
            ]  # fmt: skip
        return [*head, *fields, *self._caches]

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
    """Values of which the differences are told, in planes."""
    values: Ints = np.add.accumulate(from_planes(packed))
    return values

"""Requests from the columns of keyframes.

Most requests of a state are over, and nobody looks at them: they are made when someone does. Until
then a `SleepingRequest` stands for one, with what it takes to be found and put in order.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from itertools import chain as chained
from itertools import repeat
from typing import Any, Final

from engine_hooks.protocol.events import unpack_u32
from tracer.recording.keyframes.opened import Row, Rows, StepColumns, check, summed
from tracer.recording.keyframes.records import (
    CACHES,
    SETTLED,
    At,
    HistoryRecord,
    columns_of,
    instants_of,
)
from tracer.recording.keyframes.sleeping_steps import StepsOf, read_step
from tracer.state.engine.source import Source
from tracer.state.engine.step_history import StepHistory
from tracer.state.request.decode import DECODE_PARTS
from tracer.state.request.request import Request, Settled

_APART: Final = 4 + len(SETTLED)
"""Columns there before those that are fields of a request."""


def _absolute(row: Row, places: tuple[int, ...], origin: int) -> list[Any]:
    """A row with its instants no longer differences, and lists of its own: the row is there for
    other states, too."""
    values: list[Any] = [value.copy() if type(value) is list else value for value in row]
    for place in places:
        if values[place] is not None:
            values[place] = origin = origin + values[place]
    return values


class Columns:
    """Token instants, batch sizes and prefill tokens of one source's steps, by index; there may be
    holes."""

    def __init__(self, chain: Iterable[tuple[HistoryRecord, StepColumns]]) -> None:
        self._firsts: list[int] = []
        self._parts: list[StepColumns] = []
        for record, columns in chain:
            if self._parts and record.first == self._firsts[-1] + len(self._parts[-1][0]):
                for column, more in zip(self._parts[-1], columns, strict=True):
                    column.extend(more)
            elif len(columns[0]):
                check(record.first >= 0, "no such steps")
                self._firsts.append(record.first)
                tokens, sizes, prefills = columns
                self._parts.append((tokens[:], sizes[:], prefills[:]))

    def cut(self, first: int, length: int) -> tuple[array[int], array[int], array[int]]:
        """The columns from index `first` on."""
        if not length:
            return array("q"), array("I"), array("I")
        place = bisect_right(self._firsts, first) - 1
        check(place >= 0 and length > 0, "no such steps")
        begin = first - self._firsts[place]
        tokens, sizes, prefills = self._parts[place]
        check(begin + length <= len(tokens), "no such steps")
        return (
            tokens[begin : begin + length],
            sizes[begin : begin + length],
            prefills[begin : begin + length],
        )


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
        names = ("serial", *found, *early, *late, "batch", "settled", *steps, *_cache_names())
        self._order = [names.index(field.name) for field in fields(Request)]
        self._first_seen, self._ids = map(found.index, ("first_seen", "ids"))
        self._id = early.index("id")
        self._passes = [steps.index("passes"), steps.index("redo")]

    def now(self, serial: int, found: Row) -> Request:
        """The request, of which `found` is known. Raises an exception when its rows contradict
        themselves."""
        first_seen, ids = found[self._first_seen], found[self._ids]
        parts = [self.values(group, serial, first_seen, ids) for group in ASLEEP]
        request = self._made(serial, found, parts)
        _check_steps(request, None if request.batch is None else request.batch.history)
        return request

    def later(self, found: dict[int, Row]) -> list[Request]:
        """These requests, each to be made when someone looks at it."""
        requests: list[Request] = [_asleep(SleepingRequest) for _ in found]
        columns: list[Any] = [repeat(self), found, *zip(*found.values(), strict=True)]
        for name, column in zip(
            ("front", "serial", *columns_of("found")), columns, strict=bool(found)
        ):
            # rows are there for other states, too
            own = map(list.copy, column) if name in _LISTS else column
            deque(map(getattr(Request, name).__set__, requests, own), 0)
        return requests

    @staticmethod
    def foretell(requests: Sequence[Request], flags: Sequence[int]) -> None:
        """Tell sleeping requests what is asked of the oldest when they go: 1 incomplete, 2
        tallied."""
        for name, known in (
            ("incomplete", (False, True, False, True)),
            ("tallied", (False, False, True, True)),
        ):
            deque(map(getattr(Request, name).__set__, requests, map(known.__getitem__, flags)), 0)

    def _made(self, serial: int, found: Row, parts: list[list[Any]]) -> Request:
        values = [serial, *_absolute(found, (), 0), *chained.from_iterable(parts), *self._caches]
        return Request(*[values[place] for place in self._order])

    def fill(self, request: Request, group: str) -> None:
        """Tell a sleeping request the fields of a group. One that contradicts itself has no steps,
        is lost and incomplete."""
        try:
            values = self.values(group, request.serial, request.first_seen, request.ids)
            for name, value in zip(names_of(group), values, strict=True):
                if name not in FORETOLD or not _has(request, name):
                    _put(request, name, value)
            if group == "late":
                check(request.over is not None, "a finished request is not over")
            if group == "steps" and request.batch is not None:
                _check_steps(request, request.batch.past(request))
                request.batch.woken(request)
        except (ValueError, TypeError, LookupError, OverflowError):
            self._spoil(request)

    def wake(self, request: Request) -> None:
        """Fill in all of a sleeping request."""
        for group in ASLEEP:
            if request.asleep and not _told(request, group):
                self.fill(request, group)
        if request.asleep:
            self._awake(request)

    def _awake(self, request: Request) -> None:
        """It has all its fields: nothing about it is special any more."""
        for name, value in zip(_cache_names(), self._caches, strict=True):
            _put(request, name, value)
        _put(request, "__class__", Request)

    def _spoil(self, request: Request) -> None:
        dropped = _has(request, "dropped") and request.dropped
        for group in ASLEEP:
            for name, value in zip(
                names_of(group), self._defaults(group, request.ids), strict=True
            ):
                _put(request, name, value)
        self._awake(request)
        request.over = request.first_seen
        request.lost = request.incomplete = True
        request.dropped = dropped

    def _defaults(self, group: str, ids: list[str]) -> list[Any]:
        """Values of a group's fields in a request that is new but for its ids."""
        values = _defaults(columns_of(group))
        if group == "early":
            values[self._id] = ids[-1]
        return values if group != "steps" else [None, Settled(), *values]

    def values(self, group: str, serial: int, first_seen: int, ids: list[str]) -> list[Any]:
        """Values of the fields `names_of` a group. Raises an exception when what is told
        contradicts itself."""
        row = self._rows.row(group, serial)
        if group == "steps":
            return self._steps(row, first_seen)
        values = _absolute(row, instants_of(group), first_seen)
        if group == "early":
            values[self._id] = values[self._id] or ids[-1]
        return values

    def _steps(self, row: Row, first_seen: int) -> list[Any]:
        source, runs, times, sizes, count, last, step, token, end, *parts = row[:_APART]
        parts = [part for part in parts if part is not None]
        batch = self._sources[source].batch if source else None
        check(len(parts) in (0, len(DECODE_PARTS)), "another division of a step")
        instants, batches = self._tokens(source, runs, times, sizes)
        check(len(instants) == len(batches) <= count, "token instants without tokens")
        settled = Settled(
            count, last, instants, batches, parts, step, last + token, last + token + end
        )
        fields = _absolute(row[_APART:], instants_of("steps"), last)
        for place in self._passes:
            fields[place] = [
                part._replace(step=read_step(self._steps_of, source, *part.step, first_seen))
                if isinstance(part.step, At) else part
                for part in fields[place]
            ]  # fmt: skip
        return [batch, settled, *fields]

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
    """A request of which little is filled in yet. A group of its fields is as soon as one of them
    is asked for, or changed; with any other it becomes a `Request`."""

    __slots__ = ()

    asleep = True

    def __getattr__(self, name: str) -> Any:
        self._fill(name)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FORETOLD:
            self._fill(name)
        if self.asleep:
            _put(self, name, value)
        else:
            setattr(self, name, value)

    def went_on(self) -> None:
        """As in `Request`, whose `front` is something else as long as it sleeps."""
        self._maker.wake(self)
        self.went_on()

    @property
    def _maker(self) -> Maker:
        maker: Maker = object.__getattribute__(self, "front")
        return maker

    def _fill(self, name: str) -> None:
        group = _groups().get(name)
        if group is None:
            self._maker.wake(self)
        elif group != "found" and not _told(self, group):
            self._maker.fill(self, group)


_LISTS: Final = frozenset({"keys", "names", "ids"})
"""Fields of the group ``found`` that are lists."""
_put: Final = object.__setattr__
_asleep: Final = SleepingRequest.__new__

ASLEEP: Final = ("early", "late", "steps")
"""Groups of fields that a sleeping request lacks."""


@functools.cache
def names_of(group: str) -> tuple[str, ...]:
    """The fields of a request that are filled in with a group."""
    return columns_of(group) if group != "steps" else ("batch", "settled", *columns_of(group))


@functools.cache
def _groups() -> dict[str, str]:
    """In which group a field is, those that are none of the state left out."""
    return {name: group for group in ("found", *ASLEEP) for name in names_of(group)}


FORETOLD: Final = frozenset({"incomplete", "tallied", "dropped"})
"""Fields that a sleeping request may have without the others of their group."""


def _told(request: Request, group: str) -> bool:
    """Whether a sleeping request has been told the fields of a group."""
    return _has(request, _first(group))


@functools.cache
def _first(group: str) -> str:
    return next(name for name in names_of(group) if name not in FORETOLD)


def _has(request: Request, name: str) -> bool:
    """Whether a sleeping request has this field."""
    try:
        getattr(Request, name).__get__(request)
    except AttributeError:
        return False
    return True


def _cache_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Request) if field.name in CACHES)


def _defaults(names: Iterable[str]) -> list[Any]:
    """Values of these fields in a new request."""
    known = {field.name: field for field in fields(Request)}
    return [
        field.default if field.default_factory is MISSING else field.default_factory()
        for field in map(known.__getitem__, names)
    ]  # fmt: skip


def _check_steps(request: Request, history: StepHistory | None) -> None:
    """What the request says of steps is about steps that its batch had (`history`) when the
    keyframe was made, or once before."""
    if history is None:
        check(
            not (request.spans or request.passes or request.redo) and request.open_since < 0,
            "steps of no batch",
        )
        return
    base, last = history.base, history.last_index
    for span in request.spans:
        check(
            base <= span.first <= span.last <= last and 0 < span.produced <= 0xFFFF,
            "a span of no steps",
        )
    for part in (*request.passes, *request.redo):
        check(not isinstance(part.step, int) or base <= part.step <= last, "a pass of no step")
    check(
        -1 <= request.open_since <= last and not 0 <= request.open_since < base, "a run of no steps"
    )
    check(-1 <= request.settled.step <= last, "settled beyond the last step")

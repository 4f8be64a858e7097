"""The parts of a state as rows and records: what a keyframe is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from operator import attrgetter, eq
from typing import Any

import numpy as np

from engine_hooks.protocol.events import pack_u32
from tracer.recording.keyframes.records import (
    CACHES,
    BlocksRecord,
    TablesRecord,
    Told,
    columns_of,
    instants_of,
    laid,
    packed,
)
from tracer.state.chunks import planes
from tracer.state.engine.kv import CACHED, FIRST_SLOT, FREE, BlockMap
from tracer.state.engine.step_history import StepHistory
from tracer.state.request.request import Preemption, Request

Row = tuple[Any, ...]
Rows = list[tuple[Request, Row]]
"""Requests, and what is to be told of each."""


def told(rows: Rows, record: Any, told: Iterable[list[Any]]) -> Told:
    """Rows as columns, with whose they are."""
    return Told(pack_u32(request.serial for request, _ in rows), packed(laid(record, told)))


def found_rows(rows: Rows) -> Iterator[list[Any]]:
    """See `found_record`."""
    seen = columns_of("found").index("first_seen")
    before = 0
    for _, values in rows:
        row = list(values)
        first_seen = row[seen]
        row[seen], before = first_seen - before, first_seen
        make_relative(row, instants_of("found"), first_seen)
        yield row


def early_rows(rows: Rows) -> Iterator[list[Any]]:
    """See `early_record`."""
    shown = columns_of("early").index("id")
    for request, values in rows:
        row = list(values)
        make_relative(row, instants_of("early"), request.first_seen)
        row[shown] = "" if request.ids[-1:] == [row[shown]] else row[shown]
        yield row


def late_rows(rows: Rows) -> Iterator[list[Any]]:
    """See `late_record`."""
    for request, values in rows:
        row = list(values)
        make_relative(row, instants_of("late"), request.first_seen)
        yield row


def make_relative(row: list[Any], places: Iterable[int], origin: int) -> None:
    """Make the instants in a row differences, each from the one before it that is known."""
    for place in places:
        instant = row[place]
        if instant is not None:
            row[place], origin = instant - origin, instant


def mark(request: Request) -> Row:
    """What tells that a finished request has changed since it was looked at last. Lists only grow,
    or their items age: a step that leaves the history is put in place of its index."""
    settled = request.settled
    aged = 0
    for part in (*request.passes, *request.redo):
        aged += not isinstance(part.step, int)
    return (
        _plain_of()(request),
        settled.count,
        len(settled.times),
        len(request.spans),
        len(request.passes),
        len(request.redo),
        len(request.output),
        aged,
    )


@functools.cache
def _plain_of() -> Callable[[Request], Row]:
    """The fields of a request that hold a number or a word, `version` included."""
    lists = {field.name for field in fields(Request) if field.default_factory is not MISSING}
    return attrgetter(
        *[
            field.name
            for field in fields(Request)
            if field.name not in lists | (CACHES - {"version"})
        ]
    )


def frozen(values: Row) -> Row:
    """Values of which the lists are no longer the request's own, so that a later change is seen."""
    return tuple(
        [[_still(item) for item in value] if type(value) is list else value for value in values]
    )


def _still(item: Any) -> Any:
    return replace(item) if type(item) is Preemption else item


def moves(before: list[int], after: list[int]) -> tuple[list[int], list[int]]:
    """Who came to the end of `before`, in order, and who left it, so that it becomes `after`."""
    known = set(before)
    kept = len(after)
    while kept and after[kept - 1] not in known:
        kept -= 1
    staying = set(after[:kept])
    if [serial for serial in before if serial in staying] != after[:kept]:
        return after, before  # someone left and came back in between: tell all of it
    return after[kept:], [serial for serial in before if serial not in staying]


def blocks_record(blocks: BlockMap) -> BlocksRecord:
    """What a map shows, less the tables of the requests."""
    holders: dict[int, int] = {}
    for ids in blocks._held.values():
        holders.update(dict.fromkeys(ids, 1))
    shared = [
        value for block in sorted(holders.keys() | blocks._holders.keys())
        if (count := blocks._holders.get(block, 0)) != holders.get(block, 0)
        for value in (block, count)
    ]  # fmt: skip
    size = len(blocks._bytes)
    shown = shown_bytes(size, blocks._held, blocks._slots, blocks._cached)
    differ = np.flatnonzero(
        np.frombuffer(shown, np.uint8) != np.frombuffer(blocks._bytes, np.uint8)
    ).tolist()
    return BlocksRecord(
        size=size,
        held=pack_u32(blocks._held),
        shared=pack_u32(shared),
        slots=pack_u32(value for pair in blocks._slots.items() for value in pair),
        free_slots=differences(blocks._free_slots),
        cached=pack_u32(blocks._cached),
        other=pack_u32(value for block in differ for value in (block, blocks._bytes[block])),
        since=differences(blocks.cached_since()),
    )


def tables_record(held: Mapping[int, list[int]], told: dict[int, list[int]]) -> TablesRecord:
    """Block tables that are not as `told`, which is brought up to date."""
    changed: list[int] = []
    blocks: list[int] = []
    for serial in [serial for serial in told if serial not in held]:
        del told[serial]
    for serial, ids in held.items():
        before = told.get(serial, [])
        if before == ids:
            continue
        kept = len(before) if ids[: len(before)] == before else 0
        changed += (serial, kept, len(ids) - kept)
        blocks += ids[kept:]
        told[serial] = ids.copy()
    differences = np.diff(np.asarray(blocks, "<u4"), prepend=np.uint32(0))
    return TablesRecord(
        pack_u32(changed), differences.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes()
    )


def shown_bytes(
    size: int, held: Mapping[int, Sequence[int]], slots: Mapping[int, int], cached: Iterable[int]
) -> bytearray:
    """What a map of `size` blocks shows by who holds them and which are cached. Blocks must be
    below `size`."""
    shown = bytearray([FREE]) * size
    for block in cached:
        shown[block] = CACHED
    for serial, ids in held.items():
        byte = FIRST_SLOT + slots.get(serial, 0)
        for block in ids:
            shown[block] = byte
    return shown


def numbers(history: StepHistory) -> bytes | None:
    """Step numbers, then the indices that they stand for, where these do not both rise by one up to
    the last step."""
    index_of, size = history.index_of, len(history)
    if not size:
        return differences([*index_of, *index_of.values()]) if index_of else None
    behind = history.steps[-1].n + 1
    expected = zip(
        range(behind - size, behind), range(history.base, history.base + size), strict=True
    )
    plain = len(index_of) == size and all(map(eq, index_of.items(), expected))
    return None if plain else differences([*index_of, *index_of.values()])


def by_block(places: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """Places of steps, by block."""
    blocks: dict[int, list[int]] = {}
    for block, place in places:
        blocks.setdefault(block, []).append(place)
    return [(block, pack_u32(found)) for block, found in blocks.items()]


def pairs(table: Mapping[int, Request]) -> bytes:
    return pack_u32(value for key, request in table.items() for value in (key, request.serial))


def packed_ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i8").tobytes()


def rows_told(rows: Iterable[tuple[int, ...]]) -> bytes:
    """Rows of numbers as columns, one after the other, in differences."""
    return differences([value for column in zip(*rows, strict=True) for value in column])


def differences(values: Sequence[int]) -> bytes:
    """Each value less the one before it, in planes (`tracer.state.chunks`)."""
    numbers = np.asarray(values, np.int64)
    return planes(np.diff(numbers, prepend=0).astype(np.int64))

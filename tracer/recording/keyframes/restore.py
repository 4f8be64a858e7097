"""The state from a chain of keyframes: what `tracer.recording.keyframes` wrote down, made a
`TraceState` again.

A keyframe comes from a file that nobody vouches for. Its types are checked as it is decoded, and
here that whatever refers to something (a request, a step, a block) refers to what is there; all
else is plain numbers and text, which the state takes from events just so. Whatever does not hold
raises KeyframeError, and the reader folds the events instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as chained
from itertools import repeat
from operator import itemgetter, lt
from typing import Any, Final

import msgspec
import numpy as np

from engine_hooks.protocol.events import Step, unpack_u32
from engine_hooks.protocol.stamps import LEAP
from tracer.recording.keyframes.opened import (
    KeyframeError,
    Opened,
    Rows,
    check,
    opened,
    pieces_of,
    summed,
)
from tracer.recording.keyframes.planes import unpack_column
from tracer.recording.keyframes.records import (
    AMENDED,
    BatchRecord,
    HistoryRecord,
    Present,
    SourceRecord,
    TallyRecord,
    columns_of,
    packed_version,
    state_version,
    unpacked,
)
from tracer.recording.keyframes.requests import Columns, Maker
from tracer.recording.keyframes.rows import shown_bytes
from tracer.recording.keyframes.sleeping_steps import (
    SleepingSteps,
    StepFinder,
    StepsLostError,
    StepsOf,
)
from tracer.state.engine.kv import BLOCKS_SHOWN, SLOTS, BlockMap
from tracer.state.engine.source import Source
from tracer.state.engine.step_history import StepHistory
from tracer.state.metrics.tally import Tally
from tracer.state.request.request import Request
from tracer.state.trace_state import TraceState

LONGEST_CHAIN: Final = 1_000
MOST_STEPS: Final = 1 << 20
MOST_FINISHED: Final = 1 << 24
STEPPED: Final = 6
"""How many numbers `waterfall.stepped_lengths` gives."""

Earlier = Callable[[int], bytes | Opened]


def usable(content: bytes) -> bool:
    """Whether a keyframe was made by this version of the fold. Another one's state would not be
    ours."""
    return content[1:].startswith(packed_version()) or content[3:].startswith(packed_version())


def restore(
    chain: Sequence[bytes | Opened],
    earlier: Earlier,
    steps_of: StepsOf,
    intact: Callable[[int], bool] = lambda number: True,
) -> tuple[TraceState, dict[str, int]]:
    """The state that the last keyframe of `chain` tells, and the number of the next event of each
    source.

    The first one is whole, each further one builds upon those before it; each is bytes, or
    `opened`. `earlier` gives those that the first one needs beside, by `Keyframe.number`, or raises
    KeyframeError. Steps are read from their blocks when someone looks at them; `intact` says of the
    number of a block whether that will work. Raises KeyframeError, and StepsLostError where it will
    not.
    """
    if not 0 < len(chain) <= LONGEST_CHAIN:
        raise KeyframeError("no chain of keyframes")
    try:
        with without_collections():
            return _Restoration(list(map(opened, chain)), earlier, steps_of, intact).state()
    except KeyframeError:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # msgspec's errors are among these, and those of numpy and array for lengths that do not
        # fit.
        raise KeyframeError(f"{type(error).__name__}: {error}") from None


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from walking a state in the making again and again: nothing in it
    is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def _present_decoder() -> msgspec.msgpack.Decoder[Present]:
    return msgspec.msgpack.Decoder(Present)


class _Restoration:
    """One state in the making."""

    def __init__(
        self,
        chain: list[Opened],
        earlier: Earlier,
        steps_of: StepsOf,
        intact: Callable[[int], bool],
    ) -> None:
        self._opened = chain
        self._chain = [each.keyframe for each in chain]
        first, last = self._chain[0], self._chain[-1]
        check(
            first.base and not any(keyframe.base for keyframe in self._chain[1:]),
            "the chain has no begin",
        )
        numbers = [*unpack_u32(first.needs), *(keyframe.number for keyframe in self._chain)]
        check(all(map(lt, numbers, numbers[1:])), "keyframes out of order")
        self._all = [*map(opened, map(earlier, numbers[: -len(chain)])), *chain]
        """The chain, and before it those that it needs for requests and pieces alone."""
        check(
            {each.keyframe.version for each in self._all} == {state_version()},
            "made by another version",
        )
        self._present = present = _present_decoder().decode(unpacked(last.present))
        self._steps_of = steps_of
        self._intact = intact
        check(
            0 < present.keep_steps <= MOST_STEPS and 0 <= present.keep_finished <= MOST_FINISHED,
            "unlikely bounds",
        )
        self._state = TraceState(keep_finished=present.keep_finished, keep_steps=present.keep_steps)
        self._requests: dict[int, Request] = {}
        self._columns: dict[str, Columns] = {}

    def state(self) -> tuple[TraceState, dict[str, int]]:
        """The state, and the number of the next event of each source."""
        state, last = self._state, self._present
        state.now, state._near, state.began = (
            last.now,
            last.now + LEAP if last.now else -1,
            last.began,
        )
        state.unknown, state.received_total = last.unknown, last.received_total
        sources = [(self._source(record), record) for record in last.sources]
        self._request_table()
        for source, record in sources:
            self._batch(source, record.batch)
            self._blocks(source.blocks, record)
        self._figures()
        check(all(seq >= 0 for seq in last.seqs.values()), "negative numbers of events")
        return state, dict(last.seqs)

    # --- requests ---------------------------------------------------------------------------------

    def _request_table(self) -> None:
        table, last = self._state.requests, self._present
        over: dict[int, None] = {}
        for keyframe in self._chain:
            deque(map(over.pop, unpack_u32(keyframe.gone), repeat(None)), 0)
            over.update(dict.fromkeys(unpack_u32(keyframe.came)))
        told = np.concatenate([each.weights for each in self._all], axis=1)
        serials, *weight = told.tolist()
        weights: dict[int, tuple[int, int, int]] = dict(
            zip(serials, zip(*weight, strict=True), strict=True)
        )
        live = unpack_u32(last.live)
        told_rows = Rows(self._all)
        found = told_rows.found({*live, *over})
        check(len(found) == len(live) + len(over), "a request is told twice, or not at all")
        make = Maker(self._state.sources, self._columns, told_rows, self._steps_of)
        for serial in live:
            table.live[serial] = request = make.now(serial, found[serial])
            check(request.over is None, "a live request is over")
        sleeping = {serial: found[serial] for serial in over}
        table.over.update(zip(over, make.later(sleeping), strict=True))
        weighed = [serial for serial in over if serial in weights]
        for serial in weighed:
            texts, tokens, _ = weights[serial]
            table._weighty[serial] = (table.over[serial], texts, tokens)
        make.foretell(
            [table.over[serial] for serial in weighed], [weights[serial][2] for serial in weighed]
        )
        self._requests = {**table.live, **table.over}
        requests = list(self._requests.values())
        rows = [*map(found.__getitem__, live), *sleeping.values()]
        columns = dict(zip(columns_of("found"), zip(*rows, strict=True), strict=bool(rows)))
        self._indices(requests, *(columns.get(name, ()) for name in ("keys", "names", "ids")))
        # `Request.order`, without asking each request for it.
        instants = [
            first if received is None else received
            for first, received in zip(
                columns.get("first_seen", ()), columns.get("received", ()), strict=True
            )
        ]
        table.order = [
            self._requests[serial]
            for _, serial in sorted(zip(instants, self._requests, strict=True))
        ]
        table._serial = last.serial
        table.finished_total = last.finished_total
        table.dropped_incomplete, table.over_incomplete = (
            last.dropped_incomplete,
            last.over_incomplete,
        )
        table._texts, table._tokens = last.texts, last.tokens

    def _indices(
        self,
        requests: list[Request],
        keys: Sequence[list[tuple[str, int]]],
        names: Sequence[list[str]],
        ids: Sequence[list[str]],
    ) -> None:
        """By what requests are found."""
        table = self._state.requests
        check(all(keys) and all(ids), "a request that nobody knows")
        for index, known in ((table._by_key, keys), (table._by_id, ids), (table._by_name, names)):
            owners: Iterator[Any] = chained.from_iterable(map(repeat, requests, map(len, known)))
            if index is table._by_name:
                owners = map(list, zip(owners))
            index.update(zip(chained.from_iterable(known), owners, strict=True))  # type: ignore[arg-type]
        sources = set(map(itemgetter(0), table._by_key))
        check(sources <= self._state.sources.keys(), "a request of an unknown source")
        for name, peers in self._present.peers.items():
            table._by_name[name] = [self._requests[serial] for serial in peers]

    # --- sources ----------------------------------------------------------------------------------

    def _source(self, record: SourceRecord) -> Source:
        check(record.name not in self._state.sources, "a source is told twice")
        source = self._state._source(record.name)
        source.header = record.header
        if record.header is not None:
            source.stamps.meet(record.header)
        check(record.set_aside >= 0, "less than no events set aside")
        source.stamps.resume(record.held, record.set_aside, beats=record.beat is not None)
        if record.engine is not None:
            source.describe(record.engine)
        for coverage in record.coverage:
            source.cover(coverage)
        for fault in record.faults:
            source.fault(fault)
        source.status, source.reason, source.gone = record.status, record.reason, record.gone
        source.missing = record.missing
        source.beat, source.beat_before = record.beat, record.beat_before
        source.preempted, source.evicted = record.preempted, record.evicted
        source.last_step_end = record.last_step_end
        source.given_back = record.given_back
        batch = source.batch
        batch.last = self._history(batch.history, record.name)
        source.gauges = batch.last if record.gauges is None else record.gauges
        return source

    def _history(self, history: StepHistory, name: str) -> Step | None:
        """Fill in a source's history; returns its last step, as it came."""
        having = [each for each in self._opened if name in each.keyframe.histories]
        chain: list[HistoryRecord] = [each.keyframe.histories[name] for each in having]
        columns = self._columns[name] = Columns(
            zip(chain, (each.columns[name] for each in having), strict=True)
        )
        record = chain[-1]
        base, length = record.base, record.length
        check(base >= 0 and 0 <= length <= 2 * MOST_STEPS, "no such steps")
        amended: dict[int, list[int]] = {}
        for part in chain:
            for index, *values in (
                np.frombuffer(part.amended, "<i8").reshape(-1, 1 + len(AMENDED)).tolist()
            ):
                amended[index] = values
        last = base + length - 1
        finder = StepFinder(
            name, last, [ref for part in chain for ref in part.refs], amended, self._steps_of
        )
        check(not length or finder.first <= base, "steps are missing")
        for block in finder.blocks(base) if length else ():
            if not self._intact(block):
                raise StepsLostError(block)
        history.base = base
        history.tokens, history.sizes, history.prefills = columns.cut(base, length)
        history.steps = SleepingSteps(finder, base, length, history.tokens[:])
        history._before = record.before
        check(record.newest is not None or not length, "no last step")
        if record.numbers is None:
            behind = record.newest.n + 1 if record.newest is not None and length else 0
            history.index_of = dict(
                zip(range(behind - length, behind), range(base, last + 1), strict=True)
            )
        else:
            numbers, indices = summed(record.numbers).reshape(2, -1).tolist()
            check(all(base <= index <= last for index in indices), "a number of no step")
            history.index_of = dict(zip(numbers, indices, strict=True))
        return record.newest

    def _batch(self, source: Source, record: BatchRecord) -> None:
        batch, known = source.batch, self._requests
        for name in ("members", "loose", "doubtful"):
            values = unpack_u32(getattr(record, name))
            setattr(
                batch,
                name,
                {key: known[serial] for key, serial in zip(values[::2], values[1::2], strict=True)},
            )
        batch.steady, batch.expected = record.steady, record.expected
        batch.count, batch.produced = record.count, record.produced
        batch._unsettled = {serial: known[serial] for serial in summed(record.unsettled).tolist()}
        indices, serials = summed(record.left).reshape(2, -1).tolist()
        batch._left.extend(
            (index, known[serial]) for index, serial in zip(indices, serials, strict=True)
        )

    def _tables(self, name: str, wanted: set[int]) -> dict[int, list[int]]:
        """The blocks that each of the requests `wanted` of a source holds, from all that was told
        of them."""
        tables: dict[int, list[int]] = {}
        for told in [keyframe.tables[name] for keyframe in self._chain if name in keyframe.tables]:
            changed = unpack_u32(told.changed)
            if wanted.isdisjoint(changed[::3]):
                continue
            planes = np.frombuffer(told.blocks, np.uint8).reshape(4, -1)
            blocks = np.cumsum(np.ascontiguousarray(planes.T).view("<u4").ravel(), dtype=np.uint32)
            at = 0
            for serial, kept, new in zip(changed[::3], changed[1::3], changed[2::3], strict=True):
                if serial in wanted:
                    tables[serial] = tables.get(serial, [])[:kept] + blocks[at : at + new].tolist()
                at += new
            check(at == len(blocks), "a block table was cut")
        return tables

    def _blocks(self, blocks: BlockMap, source: SourceRecord) -> None:
        record = source.blocks
        check(0 <= record.size <= BLOCKS_SHOWN, "unlikely many blocks")
        held = unpack_u32(record.held).tolist()
        tables = self._tables(source.name, set(held))
        for serial in held:
            blocks._held[serial] = ids = tables[serial]
            blocks._holders.update(dict.fromkeys(ids, 1))
        shared = unpack_u32(record.shared)
        for block, count in zip(shared[::2], shared[1::2], strict=True):
            if count:
                blocks._holders[block] = count
            else:
                blocks._holders.pop(block, None)
        slots = unpack_u32(record.slots)
        blocks._slots = dict(zip(slots[::2], slots[1::2], strict=True))
        blocks._free_slots = summed(record.free_slots).tolist()
        blocks._cached = OrderedDict.fromkeys(unpack_u32(record.cached))
        everywhere = (
            *blocks._holders,
            *blocks._cached,
            *(block for ids in blocks._held.values() for block in ids),
        )
        check(max(everywhere, default=-1) < record.size, "a block that the map does not have")
        check(
            max((*blocks._slots.values(), *blocks._free_slots), default=0) < SLOTS,
            "a slot that there is not",
        )
        check(min(blocks._free_slots, default=0) >= 0, "a slot that there is not")
        blocks._bytes = shown_bytes(record.size, blocks._held, blocks._slots, blocks._cached)
        blocks._since.frombytes(bytes(8 * record.size))
        for block, t in zip(blocks._cached, summed(record.since).tolist(), strict=True):
            blocks._since[block] = t
        other = unpack_u32(record.other)
        for block, byte in zip(other[::2], other[1::2], strict=True):
            blocks._bytes[block] = byte

    # --- figures ----------------------------------------------------------------------------------

    def _figures(self) -> None:
        state = self._state
        self._tally(state.tally, self._present.tally)
        self._pieces()

    def _pieces(self) -> None:
        state, pieces = self._state, pieces_of(self._all)
        for place, log in enumerate((state.received, state.scheduled, state.produced)):
            log.restore(pieces[str(place)])
        last = {name: source.batch.history.last_index for name, source in state.sources.items()}
        books = {kind.removeprefix("books/"): told for kind, told in pieces.items()}
        state.books.restore(
            books, last, self._requests.__contains__, frozenset(state.requests.over)
        )

    def _tally(self, tally: Tally, record: TallyRecord) -> None:
        tally.pending = {serial: self._requests[serial] for serial in unpack_u32(record.pending)}
        lengths = np.array(unpack_column(record.foretold, STEPPED * len(tally.pending)), np.int64)
        tally.foretold = dict(
            zip(tally.pending, lengths.reshape(STEPPED, -1).T.tolist(), strict=True)
        )
        tally.sources, tally.routes, tally.reasons = record.sources, record.routes, record.reasons
        tally.ended = {
            (source, route, reason): count for source, route, reason, count in record.ended
        }
        for source, route, what, detail, total, counts in record.distributions:
            made = tally.distribution((source, route, what, detail))
            check(len(counts) == len(made.counts) and min(total, *counts) >= 0, "other histograms")
            made.total, made.counts = total, counts

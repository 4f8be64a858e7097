"""The state from a chain of keyframes: what `tracer.keyframes` wrote down, made a `TraceState` again.

A keyframe comes from a file that nobody vouches for. Its types are checked as it is decoded, and here that whatever
refers to something (a request, a step, a block) refers to what is there; all else is plain numbers and text, which the
state takes from events just so. Whatever does not hold raises KeyframeError, and the reader folds the events instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np

from tracer.events import Step, unpack_u32
from tracer.keyframes.records import (
    AMENDED,
    BatchRecord,
    HistoryRecord,
    Keyframe,
    Present,
    SourceRecord,
    TallyRecord,
    packed_version,
    state_version,
    unpacked,
)
from tracer.keyframes.requests import Columns, Ints, KeyframeError, Maker, Rows, check, summed
from tracer.keyframes.rows import shown_bytes
from tracer.state.kv import BLOCKS_SHOWN, SLOTS, BlockMap
from tracer.state.rates import ENTRIES, RateLog
from tracer.state.requests import Request
from tracer.state.source import Source
from tracer.state.step_history import StepHistory
from tracer.state.tally import Tally
from tracer.state.trace_state import TraceState

LONGEST_CHAIN: Final = 1_000
MOST_STEPS: Final = 1 << 20
MOST_FINISHED: Final = 1 << 24

StepsOf = Callable[[int], dict[str, list[Step]]]
"""The steps in a block of events, by source, in order. Raises StepsLostError when the block cannot be read."""


class StepsLostError(Exception):
    """The block with this number, whose steps a keyframe refers to, is not there or damaged."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def usable(content: bytes) -> bool:
    """Whether a keyframe was made by this version of the fold. Another one's state would not be ours."""
    return content[1:].startswith(packed_version()) or content[3:].startswith(packed_version())


def restore(chain: Sequence[bytes], steps_of: StepsOf) -> tuple[TraceState, dict[str, int]]:
    """The state that the last keyframe of `chain` tells, and the number of the next event of each source.

    The first one is whole, each further one builds upon those before it. Raises KeyframeError, and whatever `steps_of`
    raises.
    """
    if not 0 < len(chain) <= LONGEST_CHAIN:
        raise KeyframeError("no chain of keyframes")
    try:
        with without_collections():
            return _Restoration([_decoder().decode(content) for content in chain], steps_of).state()
    except KeyframeError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, ArithmeticError, RecursionError) as error:
        # msgspec's errors are among these, and those of numpy and array for lengths that do not fit.
        raise KeyframeError(f"{type(error).__name__}: {error}") from None


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from walking a state in the making again and again: nothing in it is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Keyframe]:
    return msgspec.msgpack.Decoder(Keyframe)


@functools.cache
def _present_decoder() -> msgspec.msgpack.Decoder[Present]:
    return msgspec.msgpack.Decoder(Present)


@functools.cache
def _pieces_decoder() -> msgspec.msgpack.Decoder[dict[str, bytes]]:
    return msgspec.msgpack.Decoder(dict[str, bytes])


class _Restoration:
    """One state in the making."""

    def __init__(self, chain: list[Keyframe], steps_of: StepsOf) -> None:
        check(chain[0].base and not any(keyframe.base for keyframe in chain[1:]), "the chain has no begin")
        check({keyframe.version for keyframe in chain} == {state_version()}, "made by another version")
        self._chain = chain
        self._present = last = _present_decoder().decode(unpacked(chain[-1].present))
        self._steps_of = steps_of
        check(0 < last.keep_steps <= MOST_STEPS and 0 <= last.keep_finished <= MOST_FINISHED, "unlikely bounds")
        self._state = TraceState(keep_finished=last.keep_finished, keep_steps=last.keep_steps)
        self._requests: dict[int, Request] = {}
        self._columns: dict[str, Columns] = {}
        self._read: dict[int, dict[str, list[Step]]] = {}

    def state(self) -> tuple[TraceState, dict[str, int]]:
        """The state, and the number of the next event of each source."""
        state, last = self._state, self._present
        state.now, state.began = last.now, last.began
        state.unknown, state.received_total = last.unknown, last.received_total
        histories = self._histories()
        sources = [(self._source(record, histories[record.name]), record) for record in last.sources]
        self._request_table()
        for source, record in sources:
            self._batch(source, record.batch)
            self._blocks(source.blocks, record)
        self._figures()
        check(all(seq >= 0 for seq in last.seqs.values()), "negative numbers of events")
        return state, dict(last.seqs)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _request_table(self) -> None:
        table, last = self._state.requests, self._present
        over: dict[int, None] = {}
        weights: dict[int, tuple[int, int]] = {}
        for keyframe in self._chain:
            for serial in unpack_u32(keyframe.gone):
                over.pop(serial, None)
            over.update(dict.fromkeys(unpack_u32(keyframe.came)))
            serials, texts, tokens = np.frombuffer(keyframe.weights, "<i8").reshape(-1, 3).T.tolist()
            weights.update(zip(serials, zip(texts, tokens, strict=True), strict=True))
        live = unpack_u32(last.live)
        rows = Rows(self._chain, {*live, *over})
        check(len(rows.early) == len(live) + len(over), "a request is told twice, or not at all")
        make = Maker(self._state.sources, self._columns, rows)
        for serial in live:
            table.live[serial] = request = make.now(serial)
            check(request.over is None, "a live request is over")
        for serial in over:
            table.over[serial] = request = make.later(serial)
            if serial in weights:
                table._weighty[serial] = (request, *weights[serial])
        self._requests = {**table.live, **table.over}
        by_key, by_name, by_id, sources = table._by_key, table._by_name, table._by_id, self._state.sources
        for request in self._requests.values():
            for key in request.keys:
                check(key[0] in sources, "a request of an unknown source")
                by_key[key] = request
            for name in request.names:
                by_name.setdefault(name, []).append(request)
            for shown in request.ids:
                by_id[shown] = request
        for name, peers in last.peers.items():
            by_name[name] = [self._requests[serial] for serial in peers]
        table.order = sorted(self._requests.values(), key=attrgetter("order"))
        table._serial = last.serial
        table.finished_total = last.finished_total
        table.dropped_incomplete, table.over_incomplete = last.dropped_incomplete, last.over_incomplete
        table._texts, table._tokens = last.texts, last.tokens

    # --- sources ------------------------------------------------------------------------------------------------------

    def _source(self, record: SourceRecord, history: list[Step]) -> Source:
        check(record.name not in self._state.sources, "a source is told twice")
        source = self._state._source(record.name)
        source.header = record.header
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
        batch.last = history[-1] if history else None
        source.gauges = batch.last if record.gauges is None else record.gauges
        check(0 <= record.batch.recent <= min(batch._recent.maxlen or 0, len(history)), "more steps than there are")
        if record.batch.recent:
            batch._recent.extend(history[-record.batch.recent :])
        chain = self._chain_of(record.name)
        columns = self._columns[record.name] = Columns(chain)
        self._history(batch.history, history, chain, columns)
        return source

    def _chain_of(self, name: str) -> list[HistoryRecord]:
        return [keyframe.histories[name] for keyframe in self._chain if name in keyframe.histories]

    def _histories(self) -> dict[str, list[Step]]:
        """The last steps of each source, as they came, from the blocks that hold them."""
        found: dict[str, list[Step]] = {}
        for record in self._present.sources:
            chain = self._chain_of(record.name)
            needed = max(chain[-1].length, record.batch.recent)
            check(0 <= needed <= 2 * MOST_STEPS, "unlikely many steps")
            refs = [ref for history in chain for ref in history.refs]
            taken: list[Step] = []
            for block, packed in reversed(refs):
                if len(taken) >= needed:
                    break
                steps = self._steps_in(block).get(record.name, [])
                taken += [steps[place] for place in reversed(unpack_u32(packed))]
            check(len(taken) >= needed, "steps are missing")
            found[record.name] = taken[:needed][::-1]
        return found

    def _steps_in(self, block: int) -> dict[str, list[Step]]:
        steps = self._read.get(block)
        if steps is None:
            steps = self._read[block] = self._steps_of(block)
        return steps

    def _history(self, history: StepHistory, steps: list[Step], chain: list[HistoryRecord], columns: Columns) -> None:
        record = chain[-1]
        base, length = record.base, record.length
        check(base >= 0 and length >= 0, "no such steps")
        history.base = base
        history.steps = steps[len(steps) - length :]
        history.tokens, history.sizes, history.prefills = columns.cut(base, length)
        amended: dict[int, list[int]] = {}
        for part in chain:
            for index, *values in np.frombuffer(part.amended, "<i8").reshape(-1, 1 + len(AMENDED)).tolist():
                amended[index] = values
        for index, values in amended.items():
            if index >= base:
                step = history.steps[index - base]
                history.steps[index - base] = msgspec.structs.replace(step, **dict(zip(AMENDED, values, strict=True)))
        if record.numbers is None:
            history.index_of = {step.n: index for index, step in enumerate(history.steps, base)}
        else:
            pairs = np.frombuffer(record.numbers, "<i8").reshape(-1, 2).tolist()
            check(all(base <= index < base + length for _, index in pairs), "a number of no step")
            history.index_of = dict(pairs)
        history._sum_before, history._before = record.sum_before, record.before

    def _batch(self, source: Source, record: BatchRecord) -> None:
        batch, known = source.batch, self._requests
        for name in ("members", "loose", "doubtful"):
            values = unpack_u32(getattr(record, name))
            setattr(batch, name, {key: known[serial] for key, serial in zip(values[::2], values[1::2], strict=True)})
        batch.steady, batch.expected = record.steady, record.expected
        batch.count, batch.produced = record.count, record.produced
        batch._unsettled = {serial: known[serial] for serial in unpack_u32(record.unsettled)}
        batch._left.extend((index, known[serial]) for index, serial in record.left)

    def _tables(self, name: str) -> dict[int, list[int]]:
        """The blocks that each request of a source holds, from all that was told of them."""
        tables: dict[int, list[int]] = {}
        for told in [keyframe.tables[name] for keyframe in self._chain if name in keyframe.tables]:
            planes = np.frombuffer(told.blocks, np.uint8).reshape(4, -1)
            blocks = np.cumsum(np.ascontiguousarray(planes.T).view("<u4").ravel(), dtype=np.uint32).tolist()
            changed = unpack_u32(told.changed)
            at = 0
            for serial, kept, new in zip(changed[::3], changed[1::3], changed[2::3], strict=True):
                tables[serial] = tables.get(serial, [])[:kept] + blocks[at : at + new]
                at += new
            check(at == len(blocks), "a block table was cut")
        return tables

    def _blocks(self, blocks: BlockMap, source: SourceRecord) -> None:
        record = source.blocks
        check(0 <= record.size <= BLOCKS_SHOWN, "unlikely many blocks")
        tables = self._tables(source.name)
        for serial in unpack_u32(record.held):
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
        blocks._free_slots = unpack_u32(record.free_slots).tolist()
        blocks._cached = OrderedDict.fromkeys(unpack_u32(record.cached))
        everywhere = (*blocks._holders, *blocks._cached, *(block for ids in blocks._held.values() for block in ids))
        check(max(everywhere, default=-1) < record.size, "a block that the map does not have")
        check(max((*blocks._slots.values(), *blocks._free_slots), default=0) < SLOTS, "a slot that there is not")
        blocks._bytes = shown_bytes(record.size, blocks._held, blocks._slots, blocks._cached)
        blocks._since.frombytes(bytes(8 * record.size))
        for block, t in zip(blocks._cached, summed(record.since).tolist(), strict=True):
            blocks._since[block] = t
        other = unpack_u32(record.other)
        for block, byte in zip(other[::2], other[1::2], strict=True):
            blocks._bytes[block] = byte

    # --- figures ------------------------------------------------------------------------------------------------------

    def _figures(self) -> None:
        state = self._state
        for place, log in enumerate((state.received, state.scheduled, state.produced)):
            self._rate(place, log)
        self._tally(state.tally, self._present.tally)
        self._books()

    def _books(self) -> None:
        pieces: dict[str, bytes] = {}
        for keyframe in self._chain:
            pieces.update(_pieces_decoder().decode(unpacked(keyframe.books)))
        last = {name: source.batch.history.last_index for name, source in self._state.sources.items()}
        self._state.books.restore(pieces, last, self._requests.__contains__)

    def _tally(self, tally: Tally, record: TallyRecord) -> None:
        tally.pending = {serial: self._requests[serial] for serial in unpack_u32(record.pending)}
        tally.sources, tally.routes, tally.reasons = record.sources, record.routes, record.reasons
        tally.ended = {(source, route, reason): count for source, route, reason, count in record.ended}
        for source, route, what, detail, total, counts in record.distributions:
            made = tally.distribution((source, route, what, detail))
            check(len(counts) == len(made.counts) and min(total, *counts) >= 0, "other histograms")
            made.total, made.counts = total, counts

    def _rate(self, place: int, log: RateLog) -> None:
        columns = log.entries()
        pieces: list[list[Ints]] = []
        for keyframe in self._chain:
            record = keyframe.rates[place]
            check(len(record.sums) == len(columns[1]) and len(record.dropped) == len(columns[2]), "other figures")
            new = [summed(packed) for packed in (record.times, *record.sums)]
            check(len({len(column) for column in new}) == 1, "columns of different length")
            if not len(new[0]):
                continue
            while pieces and pieces[-1][0][0] >= new[0][0]:  # told again, or grown since
                pieces.pop()
            if pieces:
                kept = int(np.searchsorted(pieces[-1][0], new[0][0]))
                pieces[-1] = [column[:kept] for column in pieces[-1]]
            pieces.append(new)
        last = self._chain[-1].rates[place]
        told = [np.concatenate(parts) for parts in zip(*pieces, strict=True)] or [summed(b"")] * (1 + len(columns[1]))
        check(0 <= last.length <= min(len(told[0]), 2 * ENTRIES), "entries are missing")
        check(bool((np.diff(told[0]) > 0).all()), "rates out of order")
        for column, values in zip((columns[0], *columns[1]), told, strict=True):
            column += values[len(values) - last.length :].tolist()
        log._dropped = list(last.dropped)

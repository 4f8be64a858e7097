"""The state from a chain of keyframes: what `tracer.keyframes` wrote down, made a `TraceState` again.

A keyframe comes from a file that nobody vouches for. Its types are checked as it is decoded, and here that whatever
refers to something (a request, a step, a block) refers to what is there; all else is plain numbers and text, which the
state takes from events just so. Whatever does not hold raises KeyframeError, and the reader folds the events instead.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.events import Step, unpack_u32
from tracer.keyframes import AMENDED, shown_bytes
from tracer.state.decode import DECODE_PARTS
from tracer.state.kv import BLOCKS_SHOWN, SLOTS, BlockMap
from tracer.state.rates import ENTRIES, RateLog
from tracer.state.request_table import _shorten as shorten
from tracer.state.requests import Request, Settled
from tracer.state.source import Source
from tracer.state.step_history import StepHistory
from tracer.state.timers import TIMERS
from tracer.state.trace_state import TraceState
from tracer.state_records import (
    CACHES,
    BatchRecord,
    BlocksRecord,
    HistoryRecord,
    Keyframe,
    SourceRecord,
    Told,
    columns_of,
    early_record,
    instants_of,
    late_record,
    packed_version,
    steps_record,
)

LONGEST_CHAIN: Final = 1_000
MOST_STEPS: Final = 1 << 20
MOST_FINISHED: Final = 1 << 24

StepsOf = Callable[[int], dict[str, list[Step]]]
"""The steps in a block of events, by source, in order. Raises what says that the block cannot be read."""

Ints = npt.NDArray[np.int64]


class KeyframeError(ValueError):
    """This is no keyframe of ours, or one that contradicts itself."""


def usable(content: bytes) -> bool:
    """Whether a keyframe was made by this version of the fold. Another one's state would not be ours."""
    return content[1:].startswith(packed_version()) or content[3:].startswith(packed_version())


def restore(chain: Sequence[bytes], steps_of: StepsOf) -> tuple[TraceState, dict[str, int]]:
    """The state that the last keyframe of `chain` tells, and the number of the next event of each source.

    The first one is whole, each further one builds upon those before it. Raises KeyframeError.
    """
    if not 0 < len(chain) <= LONGEST_CHAIN:
        raise KeyframeError("no chain of keyframes")
    try:
        return _Restoration([_decoder().decode(content) for content in chain], steps_of).state()
    except KeyframeError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, ArithmeticError, RecursionError) as error:
        # msgspec's errors are among these, and those of numpy and array for lengths that do not fit.
        raise KeyframeError(f"{type(error).__name__}: {error}") from None


def _decoder() -> msgspec.msgpack.Decoder[Keyframe]:
    global _keyframe_decoder
    if _keyframe_decoder is None:
        _keyframe_decoder = msgspec.msgpack.Decoder(Keyframe)
    return _keyframe_decoder


_keyframe_decoder: msgspec.msgpack.Decoder[Keyframe] | None = None


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise KeyframeError(what)


class _Restoration:
    """One state in the making."""

    def __init__(self, chain: list[Keyframe], steps_of: StepsOf) -> None:
        _check(chain[0].base and not any(keyframe.base for keyframe in chain[1:]), "the chain has no begin")
        self._chain = chain
        self._last = last = chain[-1]
        self._steps_of = steps_of
        _check(0 < last.keep_steps <= MOST_STEPS and 0 <= last.keep_finished <= MOST_FINISHED, "unlikely bounds")
        self._state = TraceState(keep_finished=last.keep_finished, keep_steps=last.keep_steps)
        self._requests: dict[int, Request] = {}
        self._columns: dict[str, _Columns] = {}
        self._read: dict[int, dict[str, list[Step]]] = {}

    def state(self) -> tuple[TraceState, dict[str, int]]:
        """The state, and the number of the next event of each source."""
        state, last = self._state, self._last
        state.now, state.began = last.now, last.began
        state.unknown, state.received_total = last.unknown, last.received_total
        histories = self._histories()
        sources = [(self._source(record, histories[record.name]), record) for record in last.sources]
        self._request_table()
        for source, record in sources:
            self._batch(source, record.batch)
            self._blocks(source.blocks, record.blocks)
        self._figures()
        _check(all(seq >= 0 for seq in last.seqs.values()), "negative numbers of events")
        return state, dict(last.seqs)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _request_table(self) -> None:
        table, last = self._state.requests, self._last
        over: dict[int, None] = {}
        weights: dict[int, tuple[int, int]] = {}
        for keyframe in self._chain:
            for serial in unpack_u32(keyframe.gone):
                over.pop(serial, None)
            over.update(dict.fromkeys(unpack_u32(keyframe.came)))
            triples = np.frombuffer(keyframe.weights, "<i8").reshape(-1, 3).tolist()
            weights.update((serial, (texts, tokens)) for serial, texts, tokens in triples)
        live = unpack_u32(last.live)
        kept = {*live, *over}
        _check(len(kept) == len(live) + len(over), "a request is told twice")
        early: dict[int, Row] = {}
        late: dict[int, Row] = {}
        steps: dict[int, Row] = {}
        for keyframe in self._chain:
            early.update(_early(keyframe.early, kept))
            late.update(_rows(keyframe.late, late_record(), kept))
            steps.update(_steps(keyframe.steps, kept))
        make = _Maker(self._state.sources, self._columns)
        for serial in live:
            table.live[serial] = request = make(serial, early[serial], late[serial], steps[serial])
            _check(request.over is None, "a live request is over")
        for serial in over:
            table.over[serial] = request = make(serial, early[serial], late[serial], steps[serial])
            _check(request.over is not None, "a finished request is not over")
            if serial in weights:
                table._weighty[serial] = (request, *weights[serial])
        self._requests = {**table.live, **table.over}
        for request in self._requests.values():
            _check(bool(request.keys), "a request that nobody knows")
            for key in request.keys:
                _check(key[0] in self._state.sources, "a request of an unknown source")
                table._by_key[key] = request
            for name in request.names:
                table._by_name.setdefault(name, []).append(request)
            for shown in request.ids:
                table._by_id[shown] = request
        for name, peers in last.peers.items():
            table._by_name[name] = [self._requests[serial] for serial in peers]
        table.order = sorted(self._requests.values(), key=attrgetter("order"))
        table._serial = last.serial
        table.finished_total = last.finished_total
        table.dropped_incomplete, table.over_incomplete = last.dropped_incomplete, last.over_incomplete
        table._texts, table._tokens = last.texts, last.tokens

    # --- sources --------------------------------------------------------------------------------------------------------

    def _source(self, record: SourceRecord, history: list[Step]) -> Source:
        _check(record.name not in self._state.sources, "a source is told twice")
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
        batch = source.batch
        batch.last = history[-1] if history else None
        source.gauges = batch.last if record.gauges is None else record.gauges
        _check(0 <= record.batch.recent <= min(batch._recent.maxlen or 0, len(history)), "more steps than there are")
        if record.batch.recent:
            batch._recent.extend(history[-record.batch.recent :])
        chain = self._chain_of(record.name)
        columns = self._columns[record.name] = _Columns(chain)
        self._history(batch.history, record.batch.history, history, chain, columns)
        return source

    def _chain_of(self, name: str) -> list[HistoryRecord]:
        return [
            record.batch.history for keyframe in self._chain for record in keyframe.sources if record.name == name
        ]  # fmt: skip

    def _histories(self) -> dict[str, list[Step]]:
        """The last steps of each source, as they came, from the blocks that hold them."""
        found: dict[str, list[Step]] = {}
        for record in self._last.sources:
            needed = max(record.batch.history.length, record.batch.recent)
            _check(0 <= needed <= 2 * MOST_STEPS, "unlikely many steps")
            refs = [ref for history in self._chain_of(record.name) for ref in history.refs]
            taken: list[Step] = []
            for block, packed in reversed(refs):
                if len(taken) >= needed:
                    break
                steps = self._steps_in(block).get(record.name, [])
                taken += [steps[place] for place in reversed(unpack_u32(packed))]
            _check(len(taken) >= needed, "steps are missing")
            found[record.name] = taken[:needed][::-1]
        return found

    def _steps_in(self, block: int) -> dict[str, list[Step]]:
        steps = self._read.get(block)
        if steps is None:
            steps = self._read[block] = self._steps_of(block)
        return steps

    def _history(
        self,
        history: StepHistory,
        record: HistoryRecord,
        steps: list[Step],
        chain: list[HistoryRecord],
        columns: _Columns,
    ) -> None:
        base, length = record.base, record.length
        _check(base >= 0 and length >= 0, "no such steps")
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
            _check(all(base <= index < base + length for _, index in pairs), "a number of no step")
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

    def _blocks(self, blocks: BlockMap, record: BlocksRecord) -> None:
        _check(0 <= record.size <= BLOCKS_SHOWN, "unlikely many blocks")
        tables = np.cumsum(np.frombuffer(record.tables, "<u4"), dtype=np.uint32).tolist()
        pairs = unpack_u32(record.held)
        at = 0
        for serial, count in zip(pairs[::2], pairs[1::2], strict=True):
            blocks._held[serial] = ids = tables[at : at + count]
            blocks._holders.update(dict.fromkeys(ids, 1))
            at += count
        _check(at == len(tables), "a block table was cut")
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
        _check(max(everywhere, default=-1) < record.size, "a block that the map does not have")
        _check(max((*blocks._slots.values(), *blocks._free_slots), default=0) < SLOTS, "a slot that there is not")
        blocks._bytes = shown_bytes(record.size, blocks._held, blocks._slots, blocks._cached)
        other = unpack_u32(record.other)
        for block, byte in zip(other[::2], other[1::2], strict=True):
            blocks._bytes[block] = byte

    # --- figures ------------------------------------------------------------------------------------------------------

    def _figures(self) -> None:
        state = self._state
        for place, log in enumerate((state.received, state.scheduled, state.produced)):
            self._rate(place, log)
        for place, name in enumerate(TIMERS):
            timer = state.timers._timers[name]
            parts = timer.all_counts()
            flat = np.concatenate([counts.ravel() for counts in parts])
            for keyframe in self._chain:
                record = keyframe.timers[place]
                places = np.cumsum(np.asarray(record.places, np.int64))
                _check(not len(places) or int(places.min()) >= 0, "no such counts")
                flat[places] = np.asarray(record.counts, np.int64)
            _check(int(flat.min()) >= 0, "negative counts")
            begin = 0
            for counts in parts:
                counts[...] = flat[begin : begin + counts.size].reshape(counts.shape)
                begin += counts.size
            heads = self._last.timers[place].heads
            _check(len(heads) == len(timer._heads), "no such windows")
            timer._heads = list(heads)

    def _rate(self, place: int, log: RateLog) -> None:
        times, sums, dropped = log.entries()
        for keyframe in self._chain:
            record = keyframe.rates[place]
            new = _summed(record.times)
            _check(len(record.sums) == len(sums) and len(record.dropped) == len(dropped), "other figures")
            kept = int(np.searchsorted(np.asarray(times, np.int64), new[0])) if len(new) else len(times)
            for column, packed in zip((times, *sums), (record.times, *record.sums), strict=True):
                del column[kept:]
                column += _summed(packed).tolist()
                _check(len(column) == len(times), "columns of different length")
        length = self._last.rates[place].length
        _check(0 <= length <= min(len(times), 2 * ENTRIES), "entries are missing")
        for column in (times, *sums):
            del column[: len(column) - length]
        _check(all(a < b for a, b in pairwise(times)), "rates out of order")
        log._dropped = list(self._last.rates[place].dropped)


Row = tuple[Any, ...]


def _rows(told: Told, record: type[msgspec.Struct], kept: set[int]) -> Iterator[tuple[int, Row]]:
    """The rows of the requests `kept`."""
    columns = msgspec.structs.astuple(_decoder_of(record).decode(told.columns))
    serials = unpack_u32(told.requests)
    for serial, row in zip(serials, zip(*columns, strict=True), strict=True):
        if serial in kept:
            yield serial, row


def _early(told: Told, kept: set[int]) -> Iterator[tuple[int, Row]]:
    """As `_rows`, with `first_seen` made absolute, for which all rows are needed."""
    columns = list(msgspec.structs.astuple(_decoder_of(early_record()).decode(told.columns)))
    seen = columns_of("early").index("first_seen")
    columns[seen] = np.cumsum(np.asarray(columns[seen], np.int64)).tolist()
    for serial, row in zip(unpack_u32(told.requests), zip(*columns, strict=True), strict=True):
        if serial in kept:
            yield serial, row


def _steps(told: Told, kept: set[int]) -> Iterator[tuple[int, Row]]:
    """As `_rows`, with `last` made absolute."""
    columns = list(msgspec.structs.astuple(_decoder_of(steps_record()).decode(told.columns)))
    columns[_LAST] = np.cumsum(np.asarray(columns[_LAST], np.int64)).tolist()
    for serial, row in zip(unpack_u32(told.requests), zip(*columns, strict=True), strict=True):
        if serial in kept:
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


class _Columns:
    """Token instants, batch sizes and prefill tokens of one source's steps, by index; there may be holes."""

    def __init__(self, chain: list[HistoryRecord]) -> None:
        self._firsts: list[int] = []
        self._parts: list[tuple[array[int], array[int], array[int]]] = []
        for record in chain:
            columns = array("q"), unpack_u32(record.sizes), unpack_u32(record.prefills)
            columns[0].frombytes(_summed(record.tokens).astype("=i8").tobytes())
            _check(len(columns[0]) == len(columns[1]) == len(columns[2]), "columns of different length")
            if self._parts and record.first == self._firsts[-1] + len(self._parts[-1][0]):
                for column, more in zip(self._parts[-1], columns, strict=True):
                    column.extend(more)
            elif len(columns[0]):
                _check(record.first >= 0, "no such steps")
                self._firsts.append(record.first)
                self._parts.append(columns)

    def cut(self, first: int, length: int) -> tuple[array[int], array[int], array[int]]:
        """The columns from index `first` on."""
        if not length:
            return array("q"), array("I"), array("I")
        place = bisect_right(self._firsts, first) - 1
        _check(place >= 0 and length > 0, "no such steps")
        begin = first - self._firsts[place]
        tokens, sizes, prefills = self._parts[place]
        _check(begin + length <= len(tokens), "no such steps")
        return tokens[begin : begin + length], sizes[begin : begin + length], prefills[begin : begin + length]


class _Maker:
    """Makes requests of their rows."""

    def __init__(self, sources: dict[str, Source], columns: dict[str, _Columns]) -> None:
        self._sources = sources
        self._columns = columns
        early, late, steps = map(columns_of, ("early", "late", "steps"))
        told = ("serial", "batch", "settled", *early, *late, *steps)
        self._caches = [field.default for field in fields(Request) if field.name in CACHES]
        told += tuple(field.name for field in fields(Request) if field.name in CACHES)
        self._order = [told.index(field.name) for field in fields(Request)]
        self._seen, self._id, self._names, self._ids = map(early.index, ("first_seen", "id", "names", "ids"))

    def __call__(self, serial: int, early: Row, late: Row, steps: Row) -> Request:
        source, count, last, parts, step, token, end, runs, times, sizes = steps[:_APART]
        batch = self._sources[source].batch if source else None
        _check(len(parts) in (0, len(DECODE_PARTS)), "another division of a step")
        instants, batches = self._tokens(source, runs, times, sizes)
        _check(len(instants) == len(batches) <= count, "token instants without tokens")
        settled = Settled(count, last, instants, batches, parts, step, last + token, last + token + end)
        seen = early[self._seen]
        facts = _absolute(early, instants_of("early"), seen)
        names, ids = facts[self._names], facts[self._ids]
        if "" in ids:
            _check(bool(names), "a request without a name is named after it")
            short = shorten(names[0])
            facts[self._ids] = ids = [name or short for name in ids]
        _check(bool(ids), "a request that is shown as nothing")
        facts[self._id] = facts[self._id] or ids[-1]
        values = (
            serial, batch, settled, *facts, *_absolute(late, instants_of("late"), seen),
            *_absolute(steps[_APART:], instants_of("steps"), last), *self._caches,
        )  # fmt: skip
        request = Request(*[values[place] for place in self._order])
        _check_steps(request)
        return request

    def _tokens(
        self, source: str, runs: list[int] | None, times: bytes, sizes: bytes
    ) -> tuple[array[int], array[int]]:
        """Token instants and batch sizes."""
        instants, batches = array("q"), array("I")
        if runs is None:
            instants.frombytes(_summed(times).astype("=i8").tobytes())
            return instants, unpack_u32(sizes)
        for first, length in zip(runs[::2], runs[1::2], strict=True):
            part, size, _ = self._columns[source].cut(first, length)
            instants.extend(part)
            batches.extend(size)
        return instants, batches


def _check_steps(request: Request) -> None:
    """What the request says of steps is about steps that its batch has, or once had."""
    if request.batch is None:
        _check(not (request.spans or request.passes or request.redo) and request.open_since < 0, "steps of no batch")
        return
    history = request.batch.history
    base, last = history.base, history.last_index
    for span in request.spans:
        _check(base <= span.first <= span.last <= last and 0 < span.produced <= 0xFFFF, "a span of no steps")
    for part in (*request.passes, *request.redo):
        _check(not isinstance(part.step, int) or base <= part.step <= last, "a pass of no step")
    _check(-1 <= request.open_since <= last and not 0 <= request.open_since < base, "a run of no steps")
    _check(-1 <= request.settled.step <= last, "settled beyond the last step")


def _summed(packed: bytes) -> Ints:
    summed: Ints = np.cumsum(np.frombuffer(packed, "<i8"))
    return summed

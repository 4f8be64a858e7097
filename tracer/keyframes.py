"""Keyframes: the state written down, so that a player need not fold everything before the place it is sent to.

A `Keyframer` folds what a recorder writes and makes a keyframe when asked. What has changed since the keyframe before is
told, and a chain of keyframes begins with one that tells everything. Steps are not repeated: a keyframe says in which
blocks they are. `tracer.restore` reads them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.events import Step, pack_u32
from tracer.intake import Delivery
from tracer.state.histogram import WindowedTimer
from tracer.state.kv import CACHED, FIRST_SLOT, FREE, BlockMap
from tracer.state.rates import RateLog
from tracer.state.request_table import _shorten as shorten
from tracer.state.requests import Pass, Preemption, Request
from tracer.state.source import Source
from tracer.state.step_history import StepHistory
from tracer.state.steps import Batch
from tracer.state.timers import TIMERS
from tracer.state.trace_state import TraceState
from tracer.state_records import (
    BatchRecord,
    BlocksRecord,
    HistoryRecord,
    Keyframe,
    Present,
    RateRecord,
    SourceRecord,
    TimerRecord,
    Told,
    columns_of,
    early_record,
    instants_of,
    late_record,
    packed,
    state_version,
    steps_record,
)

CHAIN: Final = 60
"""Keyframes that build upon one another. More make smaller files and longer seeks."""

AMENDED: Final = ("embed", "layers", "head", "logits", "sampled", "timing")
"""What device times that come later change in a step."""

_KEPT_OF_STEPS: Final = (
    "scheduled", "launched", "embed", "layers", "head", "logits", "sampled", "token", "end", "batch", "tokens", "timing",
    "graph",
)  # fmt: skip

Ints = npt.NDArray[np.int64]
Row = tuple[Any, ...]
Rows = list[tuple[Request, Row]]
"""Requests, and what is to be told of each."""


class _Steps:
    """What is known of one source's steps: where their events are, as they came, as keyframes told them."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        """(block, place among the steps of this source in it) of the steps taken in since the last keyframe."""
        self.seen = 0
        """Steps of this source in the block at hand."""
        self.kept: list[tuple[int, int]] = []
        """As `places`, for steps of earlier keyframes that a whole one would have to name."""
        self.told: dict[int, Step] = {}
        """By index, the amended steps as they were told last."""
        self.original: dict[int, Step] = {}
        """By index, the steps as they came."""
        self.first = 0
        """Index of the first step in these columns, which reach back to the oldest that a finished request refers to."""
        self.tokens: array[int] = array("q")
        self.sizes: array[int] = array("I")
        self.prefills: array[int] = array("I")

    @property
    def next(self) -> int:
        """Index of the first step that no keyframe has told."""
        return self.first + len(self.tokens)

    def catch_up(self, history: StepHistory) -> None:
        """Take over the columns of the steps that are new in the history."""
        if not self.tokens or history.base > self.next:  # in the latter case some came and went since
            self.first = max(self.next, history.base)
            del self.tokens[:], self.sizes[:], self.prefills[:]
        new = self.next - history.base
        self.tokens.extend(history.tokens[new:])
        self.sizes.extend(history.sizes[new:])
        self.prefills.extend(history.prefills[new:])

    def forget(self, first: int) -> None:
        """Drop the columns before index `first`."""
        drop = min(max(first - self.first, 0), len(self.tokens))
        del self.tokens[:drop], self.sizes[:drop], self.prefills[:drop]
        self.first += drop

    def runs(self, times: array[int], sizes: array[int]) -> list[int] | None:
        """These token instants and batch sizes as runs of steps (first index, length, …); None when they are none."""
        runs: list[int] = []
        at = 0
        while at < len(times):
            begin = bisect_left(self.tokens, times[at])
            length = _common(self.tokens, self.sizes, begin, times, sizes, at)
            if not length or len(runs) > 16 + len(times) // 4:
                return None
            runs += (self.first + begin, length)
            at += length
        return runs


class Keyframer:
    """Folds deliveries into `state` and makes keyframes of it. `chain`: how many build upon one another."""

    def __init__(self, state: TraceState | None = None, *, chain: int = CHAIN) -> None:
        self.state = TraceState() if state is None else state
        self._chain = max(1, chain)
        self._since_base = -1
        self._steps: dict[str, _Steps] = {}
        self._over: list[int] = []
        self._told: dict[int, tuple[Row, Row, Row]] = {}
        self._marks: dict[int, Row] = {}
        self._runs: dict[int, int] = {}
        """Index of the first step that a request's settled tokens refer to."""
        self._timers: dict[str, Ints] = {}
        self._rates: list[int | None] = [None] * 3

    def take(self, number: int, deliveries: Sequence[Delivery]) -> None:
        """Fold in what block `number` of the file holds."""
        state = self.state
        for steps in self._steps.values():
            steps.seen = 0
        for delivery in deliveries:
            source = delivery.source
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            for event in delivery.events:
                if type(event) is Step:
                    self._step(number, source, event)
                else:
                    state.apply(source, event)

    def _step(self, number: int, source: str, event: Step) -> None:
        steps = self._steps.get(source)
        if steps is None:
            steps = self._steps[source] = _Steps()
        before = self._last_index(source)
        self.state.apply(source, event)
        index = self._last_index(source)
        if index != before:
            steps.places.append((number, steps.seen))
            steps.original[index] = event
        steps.seen += 1

    def _last_index(self, source: str) -> int:
        known = self.state.sources.get(source)
        return -1 if known is None else known.batch.history.last_index

    # --- the keyframe -------------------------------------------------------------------------------------------------

    def make(self, number: int, seqs: Mapping[str, int]) -> tuple[bytes, bool]:
        """The state now: content of a keyframe's block, and whether it is whole. `number`: of the last block taken;
        `seqs`: number of the next event of each source.

        Raises an exception when the state holds what no keyframe can tell, which is a defect.
        """
        base = not 0 <= self._since_base < self._chain - 1
        self._since_base = 0 if base else self._since_base + 1
        if base:
            self._over, self._told, self._marks, self._timers, self._rates = [], {}, {}, {}, [None] * 3
        state, table = self.state, self.state.requests
        firsts = {name: self._steps.setdefault(name, _Steps()).next for name in state.sources}
        for name, source in state.sources.items():
            self._steps[name].catch_up(source.batch.history)
        live, over = list(table.live.values()), list(table.over.values())
        early, late, steps = self._changes([*live, *over])
        if base:
            self._forget_columns()
        serials = list(table.over)
        came, gone = _moves(self._over, serials)
        self._over = serials
        changed = {request.serial for request, _ in late}.intersection(serials)
        present = Present(
            keep_finished=table._keep,
            keep_steps=state._keep_steps,
            seqs=dict(seqs),
            now=state.now,
            began=state.began,
            unknown=state.unknown,
            received_total=state.received_total,
            sources=[self._source(source) for source in state.sources.values()],
            live=pack_u32(request.serial for request in live),
            peers={
                name: [request.serial for request in peers]
                for name, peers in table._by_name.items() if len(peers) != 1
            },
            serial=table._serial,
            finished_total=table.finished_total,
            dropped_incomplete=table.dropped_incomplete,
            over_incomplete=table.over_incomplete,
            texts=table._texts,
            tokens=table._tokens,
        )  # fmt: skip
        keyframe = Keyframe(
            version=state_version(),
            number=number,
            base=base,
            present=packed(present),
            histories={
                name: self._history(self._steps[name], source.batch, None if base else firsts[name])
                for name, source in state.sources.items()
            },
            gone=pack_u32(gone),
            came=pack_u32(came),
            early=_told(early, early_record(), _early_rows(early)),
            late=_told(late, late_record(), _late_rows(late)),
            steps=_told(steps, steps_record(), self._step_rows(steps)),
            weights=_packed([
                value for serial, (_, texts, tokens) in table._weighty.items() if serial in changed
                for value in (serial, texts, tokens)
            ]),
            rates=[self._rate(place, log) for place, log in enumerate((state.received, state.scheduled, state.produced))],
            timers=[self._timer(name, state.timers._timers[name]) for name in TIMERS],
        )  # fmt: skip
        return msgspec.msgpack.encode(keyframe), base

    # --- requests -----------------------------------------------------------------------------------------------------

    def _changes(self, requests: list[Request]) -> tuple[Rows, Rows, Rows]:
        """Of which requests early, late, or steps' fields are not what the keyframes before have told."""
        groups = [attrgetter(*columns_of(group)) for group in ("early", "late", "steps")]
        told, self._told = self._told, {}
        marks, self._marks = self._marks, {}
        changes: tuple[Rows, Rows, Rows] = [], [], []
        for request in requests:
            serial, settled = request.serial, request.settled
            if request.over is not None:
                mark = self._marks[serial] = _mark(request)
                if marks.get(serial) == mark:
                    self._told[serial] = told[serial]
                    continue
            early, late, steps = [_frozen(group(request)) for group in groups]
            steps += (settled.count, settled.last, len(settled.times), *settled.parts, settled.step, settled.token,
                      settled.end, id(request.batch))  # fmt: skip
            now = (early, late, steps)
            before = told.get(serial, (None, None, None))
            for rows, then, values in zip(changes, before, now, strict=True):
                if then != values:
                    rows.append((request, values))
            self._told[serial] = now
        self._runs = {serial: first for serial, first in self._runs.items() if serial in self._told}
        return changes

    def _step_rows(self, rows: Rows) -> Iterator[list[Any]]:
        """See `steps_record`."""
        names = {id(source.batch): name for name, source in self.state.sources.items()}
        of_fields = attrgetter(*columns_of("steps"))
        passes = [columns_of("steps").index(name) for name in ("passes", "redo")]
        last = 0
        for request, _ in rows:
            settled = request.settled
            source = "" if request.batch is None else names[id(request.batch)]
            runs = self._steps[source].runs(settled.times, settled.batches) if source else None
            if runs:
                self._runs[request.serial] = min(runs[::2])
            literal = runs is None
            fields = list(of_fields(request))
            for place in passes:
                fields[place] = [_slim(part) for part in fields[place]]
            _make_relative(fields, instants_of("steps"), settled.last)
            yield [
                source, settled.count, settled.last - last, settled.parts, settled.step, settled.token - settled.last,
                settled.end - settled.token, runs, _differences(settled.times) if literal else b"",
                settled.batches.tobytes() if literal else b"", *fields,
            ]  # fmt: skip
            last = settled.last

    def _forget_columns(self) -> None:
        """Drop the columns of steps that no request refers to any more."""
        referred: dict[str, int] = {}
        names = {id(source.batch): name for name, source in self.state.sources.items()}
        for request in (*self.state.requests.live.values(), *self.state.requests.over.values()):
            first = self._runs.get(request.serial)
            if first is not None and request.batch is not None:
                name = names[id(request.batch)]
                referred[name] = min(first, referred.get(name, first))
        for name, steps in self._steps.items():
            source = self.state.sources.get(name)
            if source is not None:
                steps.forget(min(source.batch.history.base, referred.get(name, steps.next)))

    # --- sources --------------------------------------------------------------------------------------------------------

    def _source(self, source: Source) -> SourceRecord:
        return SourceRecord(
            name=source.name,
            header=source.header,
            engine=source.engine,
            coverage=list(source.coverage.values()),
            status=source.status,
            reason=source.reason,
            gone=source.gone,
            missing=source.missing,
            faults=list(source.faults.values()),
            beat=source.beat,
            beat_before=source.beat_before,
            gauges=None if source.gauges is source.batch.last else source.gauges,
            preempted=source.preempted,
            evicted=source.evicted,
            last_step_end=source.last_step_end,
            blocks=_blocks(source.blocks),
            batch=self._batch(source.batch),
        )

    def _batch(self, batch: Batch) -> BatchRecord:
        kept = self.state.requests
        return BatchRecord(
            members=_pairs(batch.members),
            loose=_pairs(batch.loose),
            doubtful=_pairs(batch.doubtful),
            steady=batch.steady,
            expected=batch.expected,
            count=batch.count,
            produced=batch.produced,
            unsettled=pack_u32(batch._unsettled),
            left=[
                (index, request.serial) for index, request in batch._left
                if request.serial in kept.live or request.serial in kept.over
            ],
            recent=len(batch._recent),
        )  # fmt: skip

    def _history(self, steps: _Steps, batch: Batch, first: int | None) -> HistoryRecord:
        """The history's news. `first`: index of the first step that is to be told, None for all."""
        history = batch.history
        base = first is None
        needed = max(len(history), len(batch._recent))
        places = steps.kept + steps.places
        refs = places if base else steps.places
        if needed > len(places):
            raise ValueError("steps were taken in that no block holds")
        amended: list[int] = []
        told: dict[int, Step] = {}
        for index, step in enumerate(history.steps, history.base):
            if step is not steps.original.get(index):
                told[index] = step
                if base or steps.told.get(index) is not step:
                    amended += (index, *(getattr(step, field) for field in AMENDED))
        steps.told = told
        steps.original = {index: step for index, step in steps.original.items() if index >= history.base}
        steps.kept, steps.places = places[-needed:] if needed else [], []
        first = steps.first if first is None else max(first, steps.first)
        new = first - steps.first
        return HistoryRecord(
            base=history.base,
            length=len(history),
            first=first,
            tokens=_differences(steps.tokens[new:]),
            sizes=steps.sizes[new:].tobytes(),
            prefills=steps.prefills[new:].tobytes(),
            refs=_by_block(refs[-needed:] if base and needed else refs),
            amended=_packed(amended),
            numbers=_numbers(history),
            sum_before=history._sum_before,
            before=history._before,
        )

    # --- figures ------------------------------------------------------------------------------------------------------

    def _rate(self, place: int, log: RateLog) -> RateRecord:
        times, sums, dropped = log.entries()
        last = self._rates[place]
        # The newest entry that was told may have grown since: it is told again.
        new = 0 if last is None else bisect_left(times, last)
        self._rates[place] = times[-1] if times else None
        return RateRecord(
            len(times), _differences(times[new:]), [_differences(column[new:]) for column in sums], list(dropped)
        )

    def _timer(self, name: str, timer: WindowedTimer) -> TimerRecord:
        flat = np.concatenate([counts.ravel() for counts in timer.all_counts()])
        before = self._timers.get(name)
        places = np.flatnonzero(flat if before is None else flat != before)
        self._timers[name] = flat
        steps = np.diff(places, prepend=0).astype("<u4")
        return TimerRecord(list(timer._heads), steps.tobytes(), flat[places].astype("<i8").tobytes())


def _told(rows: Rows, record: Any, told: Iterable[list[Any]]) -> Told:
    """Rows as columns, with whose they are."""
    columns = [list(column) for column in zip(*told, strict=True)] or [[] for _ in record.__struct_fields__]
    return Told(pack_u32(request.serial for request, _ in rows), packed(record(*columns)))


def _early_rows(rows: Rows) -> Iterator[list[Any]]:
    """See `early_record`."""
    names = columns_of("early")
    seen, shown, known, shown_before = map(names.index, ("first_seen", "id", "names", "ids"))
    before = 0
    for _, values in rows:
        row = list(values)
        first_seen = row[seen]
        row[seen], before = first_seen - before, first_seen
        _make_relative(row, instants_of("early"), first_seen)
        row[shown] = "" if row[shown_before][-1:] == [row[shown]] else row[shown]
        short = shorten(row[known][0]) if row[known] else ""
        row[shown_before] = ["" if name == short else name for name in row[shown_before]]
        yield row


def _late_rows(rows: Rows) -> Iterator[list[Any]]:
    """See `late_record`."""
    for request, values in rows:
        row = list(values)
        _make_relative(row, instants_of("late"), request.first_seen)
        yield row


def _make_relative(row: list[Any], places: Iterable[int], origin: int) -> None:
    """Make the instants in a row differences, each from the one before it that is known."""
    for place in places:
        instant = row[place]
        if instant is not None:
            row[place], origin = instant - origin, instant


def _mark(request: Request) -> Row:
    """What tells that a finished request has changed: events raise its version; what ages (steps that leave the history,
    texts and instants that are over their budget) does not."""
    settled = request.settled
    return (
        request.version, request.over, request.produced, len(request.spans), settled.count, len(settled.times),
        len(request.output), request.prompt_text is None, len(request.prompt_ids),
        sum([isinstance(part.step, int) for part in request.passes]),
        sum([isinstance(part.step, int) for part in request.redo]),
    )  # fmt: skip


def _frozen(values: Row) -> Row:
    """Values of which the lists are no longer the request's own, so that a later change is seen."""
    return tuple([[_still(item) for item in value] if type(value) is list else value for value in values])


def _still(item: Any) -> Any:
    return replace(item) if type(item) is Preemption else item


def _slim(part: Pass) -> Pass:
    """A pass whose step, if it is told itself, is without members, blocks and gauges: nobody reads them there."""
    if isinstance(part.step, int):
        return part
    step = part.step
    instants = {name: getattr(step, name) for name in _KEPT_OF_STEPS}
    return part._replace(step=Step(step.t, step.n, **instants))


def _common(
    tokens: array[int], sizes: array[int], begin: int, times: array[int], batches: array[int], at: int
) -> int:
    """How many values from `begin` on in the first two columns are those from `at` on in the others."""
    length = min(len(tokens) - begin, len(times) - at)
    if length <= 0:
        return 0
    same = np.asarray(tokens[begin : begin + length]) == np.asarray(times[at : at + length])
    same &= np.asarray(sizes[begin : begin + length]) == np.asarray(batches[at : at + length])
    return length if same.all() else int(same.argmin())


def _moves(before: list[int], after: list[int]) -> tuple[list[int], list[int]]:
    """Who came to the end of `before`, in order, and who left it, so that it becomes `after`."""
    known = set(before)
    kept = len(after)
    while kept and after[kept - 1] not in known:
        kept -= 1
    staying = set(after[:kept])
    if [serial for serial in before if serial in staying] != after[:kept]:
        return after, before  # someone left and came back in between: tell all of it
    return after[kept:], [serial for serial in before if serial not in staying]


def _blocks(blocks: BlockMap) -> BlocksRecord:
    held: list[int] = []
    tables: list[int] = []
    holders: dict[int, int] = {}
    for serial, ids in blocks._held.items():
        held += (serial, len(ids))
        tables += ids
        holders.update(dict.fromkeys(ids, 1))
    shared = [
        value for block in sorted(holders.keys() | blocks._holders.keys())
        if (count := blocks._holders.get(block, 0)) != holders.get(block, 0)
        for value in (block, count)
    ]  # fmt: skip
    size = len(blocks._bytes)
    shown = shown_bytes(size, blocks._held, blocks._slots, blocks._cached)
    differ = np.flatnonzero(np.frombuffer(shown, np.uint8) != np.frombuffer(blocks._bytes, np.uint8)).tolist()
    return BlocksRecord(
        size=size,
        held=pack_u32(held),
        tables=np.diff(np.asarray(tables, "<u4"), prepend=np.uint32(0)).astype("<u4").tobytes(),
        shared=pack_u32(shared),
        slots=pack_u32(value for pair in blocks._slots.items() for value in pair),
        free_slots=pack_u32(blocks._free_slots),
        cached=pack_u32(blocks._cached),
        other=pack_u32(value for block in differ for value in (block, blocks._bytes[block])),
    )


def shown_bytes(
    size: int, held: Mapping[int, Sequence[int]], slots: Mapping[int, int], cached: Iterable[int]
) -> bytearray:
    """What a map of `size` blocks shows by who holds them and which are cached. Blocks must be below `size`."""
    shown = bytearray([FREE]) * size
    for block in cached:
        shown[block] = CACHED
    for serial, ids in held.items():
        byte = FIRST_SLOT + slots.get(serial, 0)
        for block in ids:
            shown[block] = byte
    return shown


def _numbers(history: StepHistory) -> bytes | None:
    """Where the index by step number is not what the steps give: the numbers that are in it."""
    plain = {step.n: index for index, step in enumerate(history.steps, history.base)}
    if plain == history.index_of:
        return None
    return _packed([value for pair in history.index_of.items() for value in pair])


def _by_block(places: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """Places of steps, by block."""
    blocks: dict[int, list[int]] = {}
    for block, place in places:
        blocks.setdefault(block, []).append(place)
    return [(block, pack_u32(found)) for block, found in blocks.items()]


def _pairs(table: Mapping[int, Request]) -> bytes:
    return pack_u32(value for key, request in table.items() for value in (key, request.serial))


def _packed(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i8").tobytes()


def _differences(values: Sequence[int]) -> bytes:
    """Packed i64: each value less the one before it."""
    return np.diff(np.asarray(values, np.int64), prepend=np.int64(0)).astype("<i8").tobytes()

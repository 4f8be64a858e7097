"""Keyframes: the state written down, so that a player need not fold everything before the place it is sent to.

A `Keyframer` folds what a recorder writes and makes a keyframe when asked. It tells what has changed since the keyframe
before; a chain of keyframes begins with one that tells everything. Steps are not repeated: a keyframe says in which
blocks they are. `tracer.keyframes.restore` reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from tracer.events import Step, pack_u32
from tracer.intake import Delivery
from tracer.keyframes.records import (
    AMENDED,
    BatchRecord,
    HistoryRecord,
    Keyframe,
    Present,
    RateRecord,
    SourceRecord,
    TallyRecord,
    columns_of,
    early_record,
    instants_of,
    late_record,
    packed,
    state_version,
    steps_record,
)
from tracer.keyframes.rows import (
    Row,
    Rows,
    blocks_record,
    by_block,
    differences,
    early_rows,
    frozen,
    late_rows,
    make_relative,
    mark,
    moves,
    numbers,
    packed_ints,
    pairs,
    slim,
    tables_record,
    told,
)
from tracer.keyframes.steps import ToldSteps
from tracer.state.rates import RateLog
from tracer.state.requests import Request
from tracer.state.source import Source
from tracer.state.steps import Batch
from tracer.state.trace_state import TraceState

CHAIN: Final = 60
"""Keyframes that build upon one another. More make smaller files and longer seeks."""



class Keyframer:
    """Folds deliveries into `state` and makes keyframes of it. `chain`: how many build upon one another."""

    def __init__(self, state: TraceState | None = None, *, chain: int = CHAIN) -> None:
        self.state = TraceState() if state is None else state
        self._chain = max(1, chain)
        self._since_base = -1
        self._steps: dict[str, ToldSteps] = {}
        self._over: list[int] = []
        self._told: dict[int, tuple[Row, Row, Row]] = {}
        self._marks: dict[int, Row] = {}
        self._runs: dict[int, int] = {}
        """Index of the first step that a request's settled tokens refer to."""
        self._tables: dict[str, dict[int, list[int]]] = {}
        self._rates: list[int | None] = [None] * 3
        self._books: dict[str, bytes] = {}

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
            steps = self._steps[source] = ToldSteps()
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
            self._over, self._told, self._marks = [], {}, {}
            self._tables, self._rates, self._books = {}, [None] * 3, {}
        state, table = self.state, self.state.requests
        firsts = {name: self._steps.setdefault(name, ToldSteps()).next for name in state.sources}
        for name, source in state.sources.items():
            self._steps[name].catch_up(source.batch.history)
        live, over = list(table.live.values()), list(table.over.values())
        early, late, steps = self._changes([*live, *over])
        if base:
            self._forget_columns()
        serials = list(table.over)
        came, gone = moves(self._over, serials)
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
            tally=TallyRecord(
                state.tally.sources, state.tally.routes, state.tally.reasons, pack_u32(state.tally.pending),
                *state.tally.entries(),
            ),
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
            tables={
                name: tables_record(source.blocks._held, self._tables.setdefault(name, {}))
                for name, source in state.sources.items()
            },
            gone=pack_u32(gone),
            came=pack_u32(came),
            early=told(early, early_record(), early_rows(early)),
            late=told(late, late_record(), late_rows(late)),
            steps=told(steps, steps_record(), self._step_rows(steps)),
            weights=packed_ints([
                value for serial, (_, texts, tokens) in table._weighty.items() if serial in changed
                for value in (serial, texts, tokens)
            ]),
            rates=[
                self._rate(place, log)
                for place, log in enumerate((state.received, state.scheduled, state.produced))
            ],
            books=packed(self._pieces()),
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
                now = self._marks[serial] = mark(request)
                if marks.get(serial) == now:
                    self._told[serial] = told[serial]
                    continue
            early, late, steps = [frozen(group(request)) for group in groups]
            steps += (settled.count, settled.last, len(settled.times), *settled.parts, settled.step, settled.token,
                      settled.end, id(request.batch))  # fmt: skip
            row = (early, late, steps)
            before = told.get(serial, (None, None, None))
            for rows, then, values in zip(changes, before, row, strict=True):
                if then != values:
                    rows.append((request, values))
            self._told[serial] = row
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
                fields[place] = [slim(part) for part in fields[place]]
            make_relative(fields, instants_of("steps"), settled.last)
            yield [
                source, settled.count, settled.last - last, settled.parts, settled.step, settled.token - settled.last,
                settled.end - settled.token, runs, differences(settled.times) if literal else b"",
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

    # --- sources ------------------------------------------------------------------------------------------------------

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
            given_back=source.given_back,
            blocks=blocks_record(source.blocks),
            batch=self._batch(source.batch),
        )

    def _batch(self, batch: Batch) -> BatchRecord:
        kept = self.state.requests
        return BatchRecord(
            members=pairs(batch.members),
            loose=pairs(batch.loose),
            doubtful=pairs(batch.doubtful),
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

    def _history(self, steps: ToldSteps, batch: Batch, first: int | None) -> HistoryRecord:
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
            tokens=differences(steps.tokens[new:]),
            sizes=steps.sizes[new:].tobytes(),
            prefills=steps.prefills[new:].tobytes(),
            refs=by_block(refs[-needed:] if base and needed else refs),
            amended=packed_ints(amended),
            numbers=numbers(history),
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
            len(times), differences(times[new:]), [differences(column[new:]) for column in sums], list(dropped)
        )

    def _pieces(self) -> dict[str, bytes]:
        """The pieces of the books that have changed."""
        before, self._books = self._books, self.state.books.chunks()
        return {name: piece for name, piece in self._books.items() if before.get(name) != piece}

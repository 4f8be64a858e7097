"""Keyframes: the state written down, so that a player need not fold everything before the place it
is sent to.

A `Keyframer` folds what a recorder writes and makes a keyframe when asked. It tells what has
changed since the keyframe before; a chain of keyframes begins with one that tells everything. Steps
are not repeated: a keyframe says in which blocks they are. `tracer.recording.keyframes.restore`
reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from engine_hooks.protocol.events import Event, Step, pack_u32
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.recording import event_columns
from tracer.recording.keyframes.planes import pack_column
from tracer.recording.keyframes.records import (
    AMENDED,
    At,
    BatchRecord,
    HistoryRecord,
    Keyframe,
    PiecesRecord,
    Present,
    SourceRecord,
    TallyRecord,
    columns_of,
    early_record,
    found_record,
    instants_of,
    late_record,
    packed,
    state_version,
    steps_record,
)
from tracer.recording.keyframes.rows import (
    Row,
    Rows,
    blocks_record,
    by_block,
    differences,
    early_rows,
    found_rows,
    frozen,
    late_rows,
    make_relative,
    mark,
    moves,
    numbers,
    packed_ints,
    pairs,
    rows_told,
    tables_record,
    told,
)
from tracer.recording.keyframes.steps import ToldSteps
from tracer.state.engine.source import Source
from tracer.state.engine.steps import Batch
from tracer.state.metrics.rates import CHUNK
from tracer.state.metrics.tally import Tally
from tracer.state.request.decode import DECODE_PARTS
from tracer.state.request.request import Request
from tracer.state.request.waterfall import stepped_lengths
from tracer.state.trace_state import TraceState

CHAIN: Final = 150
"""Keyframes that build upon one another. More make smaller files and longer seeks."""

WORTH: Final = 16
"""Rows, or pieces, in an earlier keyframe for which it is worth while to read it. More make longer
files, and fewer keyframes to be read."""

NO_PARTS: Final = (None,) * len(DECODE_PARTS)


class Keyframer:
    """Folds deliveries into `state` and makes keyframes of it. `chain`: how many build upon one
    another; `worth`: how many rows, or pieces, in an earlier one make it worth while to read
    that."""

    def __init__(
        self, state: TraceState | None = None, *, chain: int = CHAIN, worth: int = WORTH
    ) -> None:
        self.state = TraceState() if state is None else state
        self._chain = max(1, chain)
        self._worth = worth
        self._since_base = -1
        self._steps: dict[str, ToldSteps] = {}
        self._over: list[int] = []
        self._told: dict[int, tuple[Row, Row, Row, Row]] = {}
        self._marks: dict[int, Row] = {}
        self._runs: dict[int, int] = {}
        """Index of the first step that a request's settled tokens refer to."""
        self._prefills: dict[int, tuple[Step, At]] = {}
        """Where the steps are that ran more than one token of a request, by identity."""
        self._waiting: dict[str, list[tuple[Step, At]]] = {}
        """By source the steps that wait to be believed, and where they are."""
        self._tables: dict[str, dict[int, list[int]]] = {}
        self._pieces: dict[str, bytes] = {}
        self._rates = [0] * 3
        """Entries of each rate that no longer change, and were told."""
        self._rows_at: dict[int, list[int]] = {}
        """By request the numbers of the keyframes that told it, group by group."""
        self._pieces_at: dict[str, int] = {}

    def encode(self, seq: int, events: list[Event]) -> list[bytes]:
        """Frames of events, the first one numbered `seq`: as dense as a viewer can make them."""
        return event_columns.encode(seq, events)

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
                if type(event) is Step or source in self._waiting:
                    self._step(number, source, event)
                else:
                    state.apply(source, event)

    def _step(self, number: int, source: str, event: Event) -> None:
        """Take in a step, or whatever comes while steps wait to be believed
        (`engine_hooks.protocol.stamps`): it may release them."""
        steps = self._steps.get(source)
        if steps is None:
            steps = self._steps[source] = ToldSteps()
        coming = self._waiting.pop(source, [])
        if type(event) is Step:
            coming.append((event, At(number, steps.seen)))
            steps.seen += 1
        before = self._last_index(source)
        self.state.apply(source, event)
        index = self._last_index(source)
        known = self.state.sources.get(source)
        held = [] if known is None else known.stamps.held
        if held:
            waiting = [(step, at) for step, at in coming if any(step is each for each in held)]
            if waiting:
                self._waiting[source] = waiting
        if known is None or index == before:
            return
        places = {(step.n, step.t): (step, at) for step, at in reversed(coming)}
        history = known.batch.history
        for new in range(before + 1, index + 1):
            taken = history.step(new)  # amended already, perhaps
            step, at = places[taken.n, taken.t]
            steps.places.append(at)
            steps.original[new] = step
            if step.odd:
                self._prefills[id(step)] = (step, at)

    def _last_index(self, source: str) -> int:
        known = self.state.sources.get(source)
        return -1 if known is None else known.batch.history.last_index

    # --- the keyframe -----------------------------------------------------------------------------

    def make(self, number: int, seqs: Mapping[str, int]) -> tuple[bytes, bool]:
        """The state now: content of a keyframe's block, and whether it is whole. `number`: of the
        last block taken; `seqs`: number of the next event of each source.

        Raises an exception when the state holds what no keyframe can tell, which is a defect.
        """
        base = not 0 <= self._since_base < self._chain - 1
        self._since_base = 0 if base else self._since_base + 1
        if base:
            self._over, self._tables = [], {}
        state, table = self.state, self.state.requests
        firsts = {name: self._steps.setdefault(name, ToldSteps()).next for name in state.sources}
        caught_up = {
            name: self._steps[name].catch_up(source.batch.history)
            for name, source in state.sources.items()
        }
        if not all(caught_up.values()):
            # the columns that these requests refer to are no longer there
            for serial in self._runs:
                self._marks.pop(serial, None)
                self._told[serial] = (*self._told[serial][:3], ())
            self._runs = {}
        live, over = list(table.live.values()), list(table.over.values())
        found, early, late, steps = self._changes([*live, *over], number, base)
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
            tally=self._tally(state.tally),
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
            found=told(found, found_record(), found_rows(found)),
            early=told(early, early_record(), early_rows(early)),
            late=told(late, late_record(), late_rows(late)),
            steps=told(steps, steps_record(), self._step_rows(steps)),
            weights=rows_told(
                (serial, texts, tokens, request.incomplete + 2 * request.tallied)
                for serial, (request, texts, tokens) in table._weighty.items() if serial in changed
            ),
            pieces=self._pieces_told(number, base),
            needs=pack_u32(self._needs(number)) if base else b"",
        )  # fmt: skip
        return msgspec.msgpack.encode(keyframe), base

    # --- requests ---------------------------------------------------------------------------------

    def _changes(
        self, requests: list[Request], number: int, base: bool
    ) -> tuple[Rows, Rows, Rows, Rows]:
        """Of which requests found, early, late, or steps' fields are not what the keyframes before
        have told; for a whole keyframe, those too that lie scattered in earlier ones."""
        groups = [attrgetter(*columns_of(group)) for group in ("found", "early", "late", "steps")]
        told, self._told = self._told, {}
        marks, self._marks = self._marks, {}
        told_at, self._rows_at = self._rows_at, {}
        scattered = (
            self._scattered(place for places in told_at.values() for place in places)
            if base
            else frozenset()
        )
        changes: tuple[Rows, Rows, Rows, Rows] = [], [], [], []
        for request in requests:
            serial, settled = request.serial, request.settled
            before = told.get(serial, (None, None, None, None))
            places = self._rows_at[serial] = told_at.get(serial) or [-1] * len(groups)
            again = bool(scattered) and not scattered.isdisjoint(places)
            if request.over is not None:
                now = self._marks[serial] = mark(request)
                if marks.get(serial) == now and not again:
                    self._told[serial] = told[serial]
                    continue
            found, early, late, steps = [frozen(group(request)) for group in groups]
            steps += (
                settled.count,
                settled.last,
                len(settled.times),
                *settled.parts,
                settled.step,
                settled.token,
                settled.end,
                id(request.batch),
            )
            row = (found, early, late, steps)
            if found != before[0]:
                # an early row leaves an id out that is the last one found
                before = (before[0], None, *before[2:])
            for group, (rows, then, values) in enumerate(zip(changes, before, row, strict=True)):
                if then != values or places[group] in scattered:
                    rows.append((request, values))
                    places[group] = number
            self._told[serial] = row
        self._runs = {serial: first for serial, first in self._runs.items() if serial in self._told}
        return changes

    def _needs(self, number: int) -> list[int]:
        """Numbers of the earlier keyframes that told what is still so."""
        places = {place for places in self._rows_at.values() for place in places}
        return sorted(places.union(self._pieces_at.values()) - {number})

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
            if request.over is not None:  # nobody asks for it before the request wakes
                for place in passes:
                    fields[place] = [
                        part._replace(step=self._where(part.step)) for part in fields[place]
                    ]
            make_relative(fields, instants_of("steps"), settled.last)
            yield [
                source,
                runs,
                differences(settled.times) if literal else b"",
                settled.batches.tobytes() if literal else b"",
                settled.count,
                settled.last - last,
                settled.step,
                settled.token - settled.last,
                settled.end - settled.token,
                *(settled.parts or NO_PARTS),
                *fields,
            ]
            last = settled.last

    def _where(self, step: Any) -> Any:
        """The place of a step that is as it was there, else itself."""
        return self._prefills[id(step)][1] if id(step) in self._prefills else step

    def _forget_columns(self) -> None:
        """Drop the columns and places of steps that no request refers to any more."""
        requests = (*self.state.requests.live.values(), *self.state.requests.over.values())
        kept = {id(part.step) for request in requests for part in (*request.passes, *request.redo)}
        kept.update(id(step) for steps in self._steps.values() for step in steps.original.values())
        self._prefills = {name: found for name, found in self._prefills.items() if name in kept}
        referred: dict[str, int] = {}
        names = {id(source.batch): name for name, source in self.state.sources.items()}
        for request in requests:
            first = self._runs.get(request.serial)
            if first is not None and request.batch is not None:
                name = names[id(request.batch)]
                referred[name] = min(first, referred.get(name, first))
        for name, steps in self._steps.items():
            source = self.state.sources.get(name)
            if source is not None:
                steps.forget(min(source.batch.history.base, referred.get(name, steps.next)))

    # --- sources ----------------------------------------------------------------------------------

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
            set_aside=source.stamps.set_aside,
            held=source.stamps.held,  # type: ignore[arg-type]
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
            unsettled=differences(list(batch._unsettled)),
            left=rows_told(
                (index, request.serial) for index, request in batch._left
                if request.serial in kept.live or request.serial in kept.over
            ),
        )  # fmt: skip

    def _history(self, steps: ToldSteps, batch: Batch, first: int | None) -> HistoryRecord:
        """The history's news. `first`: index of the first step that is to be told, None for all."""
        history = batch.history
        base = first is None
        needed = len(history)
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
        steps.original = {
            index: step for index, step in steps.original.items() if index >= history.base
        }
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
            before=history._before,
            newest=batch.last,
        )

    # --- figures ----------------------------------------------------------------------------------

    def _tally(self, tally: Tally) -> TallyRecord:
        lengths = [stepped_lengths(request) for request in tally.pending.values()]
        return TallyRecord(
            tally.sources,
            tally.routes,
            tally.reasons,
            pack_u32(tally.pending),
            pack_column([length for of_stage in zip(*lengths, strict=True) for length in of_stage]),
            *tally.entries(),
        )

    def _pieces_told(self, number: int, base: bool) -> list[PiecesRecord]:
        """The pieces that have changed. Those that are not numbered, and change in every keyframe,
        lie apart: of them none but the last are read. So do those of the ledger, which are rarely
        read at all."""
        before, self._pieces = self._pieces, self._pieces_now()
        places = self._pieces_at = {
            name: place for name, place in self._pieces_at.items() if name in self._pieces
        }
        scattered = self._scattered(places.values()) if base else frozenset()
        changed = {
            name
            for name, piece in self._pieces.items()
            if before.get(name) != piece or places[name] in scattered
        }
        places.update(dict.fromkeys(changed, number))
        numbered = {name for name in changed if name[-1].isdigit()}
        ledger = {name for name in numbered if name.startswith("books/ledger")}
        return [
            PiecesRecord(names, packed([self._pieces[name] for name in names]))
            for names in map(sorted, (changed - numbered, ledger, numbered - ledger))
            if names
        ]

    def _pieces_now(self) -> dict[str, bytes]:
        """All pieces of the books and of the rates. Of the latter, which are long and only grow,
        those that do not change any more are as they were."""
        pieces = {f"books/{name}": piece for name, piece in self.state.books.chunks().items()}
        for place, log in enumerate(
            (self.state.received, self.state.scheduled, self.state.produced)
        ):
            known, first = self._rates[place], log.end - len(log.entries()[0])
            for chunk in range(first // CHUNK, known // CHUNK):
                pieces[f"{place}/{chunk}"] = self._pieces[f"{place}/{chunk}"]
            pieces.update({f"{place}/{name}": piece for name, piece in log.chunks(known).items()})
            # the newest entry may still grow
            self._rates[place] = max(0, log.end - 1) // CHUNK * CHUNK
        return pieces

    def _scattered(self, places: Iterable[int]) -> frozenset[int]:
        """Those keyframes of which few rows or pieces are still needed: they are told again, so
        that not all keyframes have to be read for them."""
        return frozenset({place for place, count in Counter(places).items() if count < self._worth})

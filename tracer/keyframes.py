"""Keyframes: the state written down, so that a player need not fold everything before the place it is sent to.

A `Keyframer` folds what a recorder writes and makes a keyframe when asked. It writes what lives (requests,
members of the batch, gauges) whole and what only grows since the keyframe before: a chain of keyframes that begins with
one that is whole. Steps are not repeated: a keyframe says in which blocks they are. `tracer.restore` reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.events import Step, pack_u32
from tracer.intake import Delivery
from tracer.state.histogram import WindowedTimer
from tracer.state.kv import BlockMap
from tracer.state.rates import RateLog
from tracer.state.requests import Request
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
    RateRecord,
    SettledRecord,
    SourceRecord,
    TimerRecord,
    request_fields,
    request_record,
    state_version,
)

CHAIN: Final = 30
"""Keyframes that build upon one another. More make smaller files and longer seeks."""

AMENDED: Final = ("embed", "layers", "head", "logits", "sampled", "timing")
"""What device times that come later change in a step."""

_encode: Final = msgspec.msgpack.Encoder().encode
Ints = npt.NDArray[np.int64]


class _Steps:
    """What is known of one source's steps since its last keyframe: where their events are, and the steps as they were
    when they came and as the keyframe before told them."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        """(block, place among the steps of this source in it) of the steps taken in since the last keyframe."""
        self.seen = 0
        """Steps of this source in the block at hand."""
        self.kept: list[tuple[int, int]] = []
        """As `places`, for steps of earlier keyframes that a whole one would have to name."""
        self.next = 0
        """Index of the first step that no keyframe has told."""
        self.told: dict[int, Step] = {}
        """By index, the amended steps as they were told last."""
        self.original: dict[int, Step] = {}
        """By index, the steps as they came."""


class Keyframer:
    """Folds deliveries into `state` and makes keyframes of it. `chain`: how many build upon one another."""

    def __init__(self, state: TraceState | None = None, *, chain: int = CHAIN) -> None:
        self.state = TraceState() if state is None else state
        self._chain = max(1, chain)
        self._since_base = -1
        self._steps: dict[str, _Steps] = {}
        self._over: dict[int, bytes] = {}
        self._timers: dict[str, Ints] = {}
        self._rates: list[int | None] = [None] * 3

    def take(self, number: int, deliveries: Sequence[Delivery]) -> None:
        """Fold in what block `number` of the file holds."""
        state, steps_of = self.state, self._steps
        for steps in steps_of.values():
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
            self._over, self._timers, self._rates = {}, {}, [None] * 3
        state, table = self.state, self.state.requests
        live = list(table.live.values())
        over_before = self._over
        encode = _RequestEncoder({id(source.batch): name for name, source in state.sources.items()})
        encoded = {serial: encode(request) for serial, request in table.over.items()}
        changed = [request for serial, request in table.over.items() if over_before.get(serial) != encoded[serial]]
        came, gone = _moves(list(over_before), list(encoded))
        self._over = encoded
        told = [*live, *changed]
        keyframe = Keyframe(
            version=state_version(),
            number=number,
            base=base,
            keep_finished=table._keep,
            keep_steps=state._keep_steps,
            seqs=dict(seqs),
            now=state.now,
            began=state.began,
            unknown=state.unknown,
            received_total=state.received_total,
            sources=[self._source(source, base) for source in state.sources.values()],
            live=[msgspec.Raw(encode(request)) for request in live],
            over=[msgspec.Raw(encoded[request.serial]) for request in changed],
            gone=pack_u32(gone),
            came=pack_u32(came),
            serials=pack_u32([request.serial for request in told]),
            counts=pack_u32([len(request.settled.times) for request in told]),
            times=_differences([t for request in told for t in request.settled.times]),
            batches=b"".join(request.settled.batches.tobytes() for request in told),
            weights=_packed([
                value for request in changed if request.serial in table._weighty
                for value in (request.serial, *table._weighty[request.serial][1:])
            ]),
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
            rates=[self._rate(place, log) for place, log in enumerate((state.received, state.scheduled, state.produced))],
            timers=[self._timer(name, state.timers._timers[name]) for name in TIMERS],
        )  # fmt: skip
        return _encode(keyframe), base

    # --- sources --------------------------------------------------------------------------------------------------------

    def _source(self, source: Source, base: bool) -> SourceRecord:
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
            batch=self._batch(source.name, source.batch, base),
        )

    def _batch(self, name: str, batch: Batch, base: bool) -> BatchRecord:
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
            history=self._history(self._steps.setdefault(name, _Steps()), batch, base),
        )  # fmt: skip

    def _history(self, steps: _Steps, batch: Batch, base: bool) -> HistoryRecord:
        history = batch.history
        if len(steps.places) != history.last_index + 1 - steps.next:
            raise ValueError("steps were taken in that no block holds")
        needed = max(len(history), len(batch._recent))
        places = steps.kept + steps.places
        refs = places[-needed:] if base and needed else steps.places
        first = history.base if base else max(steps.next, history.base)
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
        steps.next = history.last_index + 1
        new = first - history.base
        return HistoryRecord(
            base=history.base,
            length=len(history),
            first=first,
            tokens=_differences(history.tokens[new:]),
            sizes=history.sizes[new:].tobytes(),
            prefills=history.prefills[new:].tobytes(),
            refs=_by_block(refs),
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
        return TimerRecord(list(timer._heads), places.astype("<u4").tobytes(), flat[places].astype("<i8").tobytes())


class _RequestEncoder:
    """Makes records of requests. `sources`: the name of the source that each batch belongs to, by its identity."""

    def __init__(self, sources: Mapping[int, str]) -> None:
        names = request_fields()
        self._sources = sources
        self._values: Any = attrgetter(*names)
        self._record: Any = request_record()
        self._batch = names.index("batch")
        self._settled = names.index("settled")

    def __call__(self, request: Request) -> bytes:
        """The record of `request`, encoded. Its token instants are told beside it."""
        values = list(self._values(request))
        batch, settled = values[self._batch], values[self._settled]
        values[self._batch] = "" if batch is None else self._sources[id(batch)]
        values[self._settled] = SettledRecord(
            settled.count, settled.last, len(settled.times), settled.parts, settled.step, settled.token, settled.end
        )
        return _encode(self._record(*values))


def _moves(before: list[int], after: list[int]) -> tuple[list[int], list[int]]:
    """Who came to the end of `before`, in order, and who left it, so that it becomes `after`."""
    known = set(before)
    kept = len(after)
    while kept and after[kept - 1] not in known:
        kept -= 1
    stayed = [serial for serial in before if serial in set(after[:kept])]
    if stayed != after[:kept]:  # someone left and came back in between: tell all of it
        return after, before
    left = known.difference(stayed)
    return after[kept:], [serial for serial in before if serial in left]


def _blocks(blocks: BlockMap) -> BlocksRecord:
    held: list[int] = []
    holders: dict[int, int] = {}
    for serial, ids in blocks._held.items():
        held += (serial, len(ids), *ids)
        holders.update(dict.fromkeys(ids, 1))
    shared = [
        value for block in holders.keys() | blocks._holders.keys()
        if (count := blocks._holders.get(block, 0)) != holders.get(block, 0)
        for value in (block, count)
    ]  # fmt: skip
    return BlocksRecord(
        shown=bytes(blocks._bytes),
        held=pack_u32(held),
        shared=pack_u32(shared),
        slots=pack_u32(value for pair in blocks._slots.items() for value in pair),
        free_slots=pack_u32(blocks._free_slots),
        cached=pack_u32(blocks._cached),
    )


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
    """Packed i64: each value less the one before it. Runs that are the same in many requests look the same so."""
    return np.diff(np.asarray(values, np.int64), prepend=np.int64(0)).astype("<i8").tobytes()

"""The state at any place of a trace file: from the nearest snapshot before it, and the events from
there on.

The state at an instant is the fold of all events that were known by then, in the order in which
they were recorded: what a live viewer had. A snapshot only saves folding: the state is the same
without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from engine_hooks.protocol.block_maker import is_calm, known_at
from engine_hooks.protocol.blocks import Block
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Event, Header
from engine_hooks.protocol.frames import SequenceCheck
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.recording.trace_file import TraceFile
from tracer.replay.folding import MANY, Folding
from tracer.replay.pickled import collections_paused
from tracer.replay.snapshot_file import Place, SnapshotFile
from tracer.state.trace_state import TraceState

NEAR_NS: Final = 2 * NS_PER_S
"""So far ahead one folds on from where one is: a snapshot is not reached sooner."""

AT_ONCE: Final = 2_048
"""Events of a block that are taken in at one go, without looking at the clock: what a screen can
wait for."""


class Item(NamedTuple):
    """One thing to take in: an event of `source`, or what came with a delivery. `due`: when it was
    known (ns)."""

    due: int
    source: str
    event: Event | None
    header: Header | None = None
    unknown: int = 0


class Cursor:
    """A place in a trace file, and the state there: another object after a `jump`, when the one
    before is of no use."""

    def __init__(self, trace: TraceFile, snapshots: SnapshotFile | None = None) -> None:
        self.trace = trace
        self._snapshots = snapshots
        self.state = TraceState()
        self.due = self.trace.begin
        """When the last event taken in was known (ns)."""
        self.reseated = 0
        """How often `state` became another object."""
        self.active = self.due
        """When something was last known to happen (ns): more than signs of life."""
        self._left_behind: list[TraceState] = []
        self._checks: dict[str, SequenceCheck] = {}
        self._next = 0
        self._items: list[Item] = []
        self._at = 0

    def peek(self) -> Item | None:
        """What comes next, None at the end."""
        while self._at >= len(self._items):
            if self._next >= len(self.trace.blocks):
                return None
            block = self.trace.blocks[self._next]
            self._items = list(items(self.trace.checked(block, self._checks), block))
            self._next += 1
            self._at = 0
        return self._items[self._at]

    def step(self) -> Item | None:
        """Take in what comes next; None at the end."""
        item = self.peek()
        if item is not None:
            self._at += 1
            _take(self.state, item)
            self._passed(self._at - 1)
        return item

    def advance(self, until: int, budget_ns: int | None = None) -> bool:
        """Take in all that was known by the instant `until` (ns), for so long at most; whether that
        is done."""
        with collections_paused():
            return self._advance(until, budget_ns)

    def _advance(self, until: int, budget_ns: int | None) -> bool:
        deadline = None if budget_ns is None else time.perf_counter_ns() + budget_ns
        state = self.state
        count = 0
        in_time = True
        while self._whole_block(until):
            if deadline is not None and time.perf_counter_ns() > deadline:
                return False
        while (item := self.peek()) is not None and item.due <= until:
            # Within a block there is nothing to look up between two items.
            items, at = self._items, self._at
            while in_time and at < len(items) and items[at].due <= until:
                _take(state, items[at])
                at += 1
                count += 1
                in_time = deadline is None or count % 64 != 0 or time.perf_counter_ns() <= deadline
            begin, self._at = self._at, at
            self._passed(begin)
            if not in_time:
                return False
        return True

    def _whole_block(self, until: int) -> bool:
        """Take in the next block at one go, if all of it was known by the instant `until` (ns);
        whether it was."""
        if self._at < len(self._items) or self._next >= len(self.trace.blocks):
            return False
        block = self.trace.blocks[self._next]
        if block.last > until or block.events > AT_ONCE:
            return False
        deliveries = self.trace.checked(block, self._checks)
        self._next += 1
        for delivery in deliveries:
            self.state.feed(delivery)
        events = [event for delivery in deliveries for event in delivery.events]
        self.due = max(self.due, _known(events, block))
        while events and is_calm(events[-1]):
            events.pop()
        if events:
            self.active = max(self.active, _known(events, block))
        return True

    def _passed(self, begin: int) -> None:
        """The items of the block from `begin` on were taken in."""
        for item in reversed(self._items[begin : self._at]):
            self.due = max(self.due, item.due)
            if not _is_calm(item):
                self.active = max(self.active, item.due)
                return

    def jump(self, t: int) -> None:
        """Go to the nearest place at or before the instant `t` (ns) that is quick to reach:
        `advance` does the rest."""
        self.tidy(1)
        with collections_paused():
            self._jump(t)

    def _jump(self, t: int) -> None:
        ahead = self.due <= t
        nearest = -1 if self._snapshots is None else self._snapshots.last_before(t)
        if ahead and (t - self.due < NEAR_NS or nearest <= self.due):
            return  # there is nothing nearer than where we are
        place = None if self._snapshots is None else self._snapshots.before(t)
        state, block, checks = place or Place(TraceState(), 0, {})
        reached = self.trace.blocks[block - 1].last if block else self.trace.begin
        self._left_behind.append(self.state)
        self.state, self._next, self._checks = state, block, checks
        self._items, self._at = [], 0
        self.due = self.active = reached
        self.reseated += 1

    def tidy(self, keep: int = 0) -> None:
        """Let go of states of before a jump but for the last `keep`, which takes a moment that a
        jump need not wait for."""
        while len(self._left_behind) > keep:
            _take_apart(self._left_behind.pop(0))

    def next_activity(self) -> int | None:
        """When the next event comes that is more than a sign of life (ns); None when there is none
        any more."""
        for item in self._items[self._at :]:
            if not _is_calm(item):
                return item.due
        for block in self.trace.blocks[self._next :]:
            if not block.calm:
                found = (
                    item.due for item in items(self.trace.read(block), block) if not _is_calm(item)
                )
                return next(found, block.first)
        return None


def items(deliveries: list[Delivery], block: Block) -> Iterator[Item]:
    """What is to be taken in, one by one. An event is due when it was known, and not before what
    comes before it."""
    due = block.first
    for delivery in deliveries:
        if delivery.header is not None or delivery.unknown:
            yield Item(due, delivery.source, None, delivery.header, delivery.unknown)
        for event in delivery.events:
            at = known_at(event)
            if at > due:
                due = min(at, block.last)
            yield Item(due, delivery.source, event)


def _known(events: list[Event], block: Block) -> int:
    """When the last of a block's first `events` is due (ns); see `items`."""
    return max(block.first, min(max(map(known_at, events), default=block.first), block.last))


def _take_apart(state: TraceState) -> None:
    """Let go of a state that nobody shows any more. Its parts refer to each other: until the
    garbage collector finds that out, which takes it tenths of a second, a dozen of them would stay
    in memory."""
    for source in state.sources.values():
        vars(source.batch).clear()
        vars(source).clear()
    vars(state.requests).clear()
    vars(state).clear()


def _is_calm(item: Item) -> bool:
    """Whether it is no more than a sign of life."""
    return item.event is not None and is_calm(item.event)


def _take(state: TraceState, item: Item) -> None:
    event = item.event
    if event is not None:
        state.apply(item.source, event)
        return
    if item.header is not None:
        state.add_source(item.header)
    state.unknown += item.unknown


def load(
    path: Path | str,
    *,
    until: int | None = None,
    keep_finished: int | None = None,
    snapshots: bool = True,
) -> TraceState:
    """The state that a trace file tells, at its end or at the instant `until` (ns).

    `keep_finished`: how many finished requests are kept, where that is not the usual number; all
    events are folded then, as they are without `snapshots`. Raises TraceFileError.
    """
    with TraceFile(path) as trace:
        return load_open(trace, until=until, keep_finished=keep_finished, snapshots=snapshots)


def load_open(
    trace: TraceFile,
    *,
    until: int | None = None,
    keep_finished: int | None = None,
    snapshots: bool = True,
) -> TraceState:
    """As `load`, from a file that is open: its `problems` say afterwards what was wrong with it."""
    found = SnapshotFile.of(trace) if snapshots and keep_finished is None else None
    if found is not None and trace.events > MANY and not found.complete:
        with contextlib.closing(Folding(found)) as folding:
            folding.wait()
        found.refresh()
    cursor = Cursor(trace, found)
    if keep_finished is not None:
        cursor.state = TraceState(keep_finished=keep_finished)
    end = trace.end if until is None else until
    cursor.jump(end)
    cursor.advance(end)
    if found is not None:
        found.close()
    return cursor.state

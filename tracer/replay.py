"""The state at any place of a trace file: from the nearest keyframe before it, and the events from there on.

The state at an instant is the fold of all events that were known by then, in the order in which they were recorded:
what a live viewer had. A keyframe only saves folding: the state is the same without it. Where a file has none that this
version can use (an engine recorded it, another version did, it is damaged), a `KeyframeIndex` makes its own in memory.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tracer.block_maker import is_calm, known_at
from tracer.blocks import BASE, Block, TraceFileError
from tracer.clock import NS_PER_S
from tracer.events import Event, Header, Step
from tracer.frames import SequenceCheck
from tracer.intake import Delivery
from tracer.keyframes.keyframer import Keyframer
from tracer.keyframes.opened import KeyframeError, Opened, opened
from tracer.keyframes.restore import restore, usable, without_collections
from tracer.keyframes.sleeping_steps import StepsLostError
from tracer.state.trace_state import TraceState
from tracer.trace_file import TraceFile
from tracer.zstd_frames import pack, unpack

NEAR_NS: Final = 2 * NS_PER_S
"""So far ahead one folds on from where one is: a keyframe is not reached sooner."""


OWN_NS: Final = 10 * NS_PER_S
"""Time of the trace between two keyframes that are made here: fewer than a recorder makes, because someone waits."""

KEYFRAMES_KEPT: Final = 96 * 1024 * 1024
"""Bytes of keyframes that are remembered, with what was taken out of them: those of an hour of a busy engine."""

AT_ONCE: Final = 2_048
"""Events of a block that are taken in at one go, without looking at the clock: what a screen can wait for."""

STEPS_KEPT: Final = 512
"""Blocks whose steps are remembered: a player is mostly sent to somewhere near."""


class Place(NamedTuple):
    """Somewhere to go on from: a state, the place in `TraceFile.blocks` of the next block, and what numbers come."""

    state: TraceState
    block: int
    checks: dict[str, SequenceCheck]


class _Made(NamedTuple):
    """A keyframe in memory."""

    number: int
    packed: bytes
    size: int
    base: bool
    last: int
    block: int


class KeyframeIndex:
    """Where in a file one can start. Uses the file's own keyframes, or makes some, `keyframe_ns` of the trace apart,
    while it walks through the file."""

    def __init__(self, trace: TraceFile, *, keyframe_ns: int = OWN_NS) -> None:
        self.trace = trace
        self._keyframe_ns = keyframe_ns
        self._steps: OrderedDict[int, dict[str, list[Step]]] = OrderedDict()
        self._keyframes: OrderedDict[int, Opened] = OrderedDict()
        """By number of the block."""
        self._warmed = 0
        """Keyframes of the file that were read ahead."""
        self._numbers = [block.number for block in trace.blocks]
        self._by_number = {block.number: block for block in trace.blocks}
        self._own: list[_Made] = []
        self._keyframer: Keyframer | None = None
        self._checks: dict[str, SequenceCheck] = {}
        self._next = 0
        self._due = 0
        first = next((trace.content(block) for block in trace.keyframes), None)
        self._uses_file = first is not None and usable(first)
        if not self._uses_file:
            self._make_own()

    @property
    def made(self) -> float:
        """How much of the file has its keyframes: 1 when nothing is left to do."""
        if self._keyframer is None:
            return 1.0
        return self._next / len(self.trace.blocks)

    @property
    def reached(self) -> int:
        """Up to when seeking is quick (ns)."""
        if self.made >= 1.0:
            return self.trace.end
        return self.trace.blocks[self._next].first

    def extend(self, budget_ns: int, until: int | None = None) -> bool:
        """Make keyframes for so long, or up to the instant `until`; whether there is more to do."""
        keyframer = self._keyframer
        deadline = time.perf_counter_ns() + budget_ns
        blocks = self.trace.blocks
        while keyframer is not None and self._next < len(blocks):
            block = blocks[self._next]
            if until is not None and block.first > until:
                return False
            keyframer.take(block.number, self.trace.checked(block, self._checks))
            self._next += 1
            if block.last >= self._due and not block.calm:
                self._due = block.last + self._keyframe_ns
                seqs = {name: check.expected for name, check in self._checks.items() if check.expected is not None}
                try:
                    content, base = keyframer.make(block.number, seqs)
                except Exception:  # events that no engine tells: seeking takes longer from here on, nothing else
                    self._keyframer = None
                    break
                self._own.append(_Made(block.number, pack(content, 1), len(content), base, block.last, self._next))
            if time.perf_counter_ns() > deadline:
                break
        return self.made < 1.0

    def before(self, t: int) -> Place:
        """The nearest place at or before the instant `t` (ns); the begin of the file if there is none."""
        place = self._from_file(t) if self._uses_file else None
        place = self._from_memory(t) if place is None else place
        return Place(TraceState(), 0, {}) if place is None else place

    def _make_own(self) -> None:
        self._keyframer = Keyframer()
        self._due = self.trace.begin + self._keyframe_ns

    def _from_file(self, t: int) -> Place | None:
        keyframes = self.trace.keyframes
        place = bisect_right(keyframes, t, key=lambda block: block.last)
        while place > 0:
            begin = place - 1
            while begin > 0 and not keyframes[begin].flags & BASE:
                begin -= 1
            chain: list[bytes | Opened] = []
            try:
                for block in keyframes[begin:place]:
                    keyframe = self._opened(block)
                    if keyframe is None:
                        break
                    chain.append(keyframe)
                if not chain:
                    place = begin
                    continue
                last = keyframes[begin + len(chain) - 1]
                return self._restored(chain, self._earlier, bisect_right(self._numbers, last.number))
            except StepsLostError as error:  # those before the damage do not need what was lost there
                place = min(place - 1, bisect_right(keyframes, error.number, key=lambda block: block.number))
            except KeyframeError as error:
                # One that contradicts itself was not made by us: none of them is believed.
                self.trace.problems.append(f"has a keyframe that cannot be used ({error}); seeking takes longer")
                self._uses_file = False
                self._make_own()
                return None
        return None

    def _opened(self, block: Block) -> Opened | None:
        """The keyframe in a block, None when that is damaged. Raises KeyframeError when it is none."""
        known = self._keyframes.get(block.number)
        if known is None:
            content = self.trace.content(block)
            if content is None:
                return None
            known = self._keyframes[block.number] = opened(content)
        else:
            self._keyframes.move_to_end(block.number)
        return known

    @property
    def cold(self) -> bool:
        """Whether there are keyframes left to be read ahead."""
        return self._uses_file and self._warmed < len(self.trace.keyframes)

    def warm(self, budget_ns: int) -> None:
        """Read keyframes ahead for so long, while nobody waits: a seek is twice as quick then."""
        deadline = time.perf_counter_ns() + budget_ns
        keyframes = self.trace.keyframes
        size = sum(each.size for each in self._keyframes.values())
        try:
            while self.cold and time.perf_counter_ns() < deadline:
                opened = self._opened(keyframes[self._warmed])
                self._warmed += 1
                for block in self._before(self._warmed - 1):
                    self.trace.intact(block)
                if opened is not None:
                    opened.warm()
                    size += opened.size
                if size > KEYFRAMES_KEPT:
                    self._warmed = len(keyframes)
        except (ValueError, TypeError, LookupError):  # the seek that needs it says so
            self._warmed = len(keyframes)

    def _before(self, place: int) -> list[Block]:
        """The blocks of events between a keyframe and the one before it."""
        keyframes = self.trace.keyframes
        first = bisect_right(self._numbers, keyframes[place - 1].number) if place else 0
        return self.trace.blocks[first : bisect_right(self._numbers, keyframes[place].number)]

    def _forget(self) -> None:
        """Let go of the keyframes that nobody asked for lately."""
        size = sum(each.size for each in self._keyframes.values())
        while size > KEYFRAMES_KEPT and len(self._keyframes) > 1:
            size -= self._keyframes.popitem(last=False)[1].size

    def _from_memory(self, t: int) -> Place | None:
        place = bisect_right(self._own, t, key=lambda made: made.last)
        if place == 0:
            return None
        begin = place - 1
        while not self._own[begin].base:
            begin -= 1
        chain = [unpack(made.packed, made.size) for made in self._own[begin:place]]
        with contextlib.suppress(KeyframeError, StepsLostError):  # a defect of ours: slower, not wrong
            return self._restored(chain, self._own_earlier, self._own[place - 1].block)
        return None

    def _earlier(self, number: int) -> Opened:
        """The file's keyframe after the block `number`. Raises KeyframeError where there is none."""
        keyframes = self.trace.keyframes
        place = bisect_right(keyframes, number, key=lambda block: block.number)
        found = self._opened(keyframes[place]) if place < len(keyframes) else None
        if found is None or found.keyframe.number != number:
            raise KeyframeError("one that is needed is missing")
        return found

    def _own_earlier(self, number: int) -> bytes:
        place = bisect_left(self._own, number, key=lambda made: made.number)
        return unpack(self._own[place].packed, self._own[place].size)

    def _restored(
        self, chain: Sequence[bytes | Opened], earlier: Callable[[int], bytes | Opened], block: int
    ) -> Place:
        state, seqs = restore(chain, earlier, self._steps_in, self._intact)
        self._forget()
        checks: dict[str, SequenceCheck] = {}
        for name, seq in seqs.items():
            checks[name] = SequenceCheck()
            checks[name].expected = seq
        return Place(state, block, checks)

    def _intact(self, number: int) -> bool:
        """Whether the block with this number is there and undamaged; it is read when a step in it is wanted."""
        block = self._by_number.get(number)
        return block is not None and self.trace.intact(block)

    def _steps_in(self, number: int) -> dict[str, list[Step]]:
        known = self._steps.get(number)
        if known is not None:
            self._steps.move_to_end(number)
            return known
        block = self._by_number.get(number)
        if block is None:
            raise StepsLostError(number)
        steps: dict[str, list[Step]] = {}
        try:
            for delivery in self.trace.read_only(block, Step):
                steps.setdefault(delivery.source, []).extend(delivery.events)  # type: ignore[arg-type]
        except TraceFileError:  # the disk fails, or the file was closed: nobody who draws a step can do anything
            raise StepsLostError(number) from None
        if self.trace.damaged(block):
            raise StepsLostError(number)
        self._steps[number] = steps
        if len(self._steps) > STEPS_KEPT:
            self._steps.popitem(last=False)
        return steps


class Item(NamedTuple):
    """One thing to take in: an event of `source`, or what came with a delivery. `due`: when it was known (ns)."""

    due: int
    source: str
    event: Event | None
    header: Header | None = None
    unknown: int = 0


class Cursor:
    """A place in a trace file, and the state there: another object after a `jump`, when the one before is of no use."""

    def __init__(self, index: KeyframeIndex) -> None:
        self.index = index
        self.trace = index.trace
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
        """Take in all that was known by the instant `until` (ns), for so long at most; whether that is done."""
        with without_collections():
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
        """Take in the next block at one go, if all of it was known by the instant `until` (ns); whether it was."""
        if self._at < len(self._items) or self._next >= len(self.trace.blocks):
            return False
        block = self.trace.blocks[self._next]
        if block.last > until or block.events > AT_ONCE:
            return False
        deliveries = self.trace.checked(block, self._checks)
        self._next += 1
        _take_all(self.state, deliveries)
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
        """Go to the nearest place at or before the instant `t` (ns) that is quick to reach: `advance` does the rest."""
        self.tidy(1)
        with without_collections():
            self._jump(t)

    def _jump(self, t: int) -> None:
        ahead = self.due <= t
        if ahead and t - self.due < NEAR_NS:
            return
        state, block, checks = self.index.before(t)
        reached = self.trace.blocks[block - 1].last if block else self.trace.begin
        if ahead and reached <= self.due:
            return  # there is nothing nearer than where we are
        self._left_behind.append(self.state)
        self.state, self._next, self._checks = state, block, checks
        self._items, self._at = [], 0
        self.due = self.active = reached
        self.reseated += 1

    def tidy(self, keep: int = 0) -> None:
        """Let go of states of before a jump but for the last `keep`, which takes a moment that a jump need not wait
        for."""
        while len(self._left_behind) > keep:
            _take_apart(self._left_behind.pop(0))

    def next_activity(self) -> int | None:
        """When the next event comes that is more than a sign of life (ns); None when there is none any more."""
        for item in self._items[self._at :]:
            if not _is_calm(item):
                return item.due
        for block in self.trace.blocks[self._next :]:
            if not block.calm:
                found = (item.due for item in items(self.trace.read(block), block) if not _is_calm(item))
                return next(found, block.first)
        return None


def items(deliveries: list[Delivery], block: Block) -> Iterator[Item]:
    """What is to be taken in, one by one. An event is due when it was known, and not before what comes before it."""
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
    """Let go of a state that nobody shows any more. Its parts refer to each other: until the garbage collector finds
    that out, which takes it tenths of a second, a dozen of them would stay in memory."""
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


def _take_all(state: TraceState, deliveries: list[Delivery]) -> None:
    for delivery in deliveries:
        if delivery.header is not None:
            state.add_source(delivery.header)
        state.unknown += delivery.unknown
        apply, source = state.apply, delivery.source
        for event in delivery.events:
            apply(source, event)


def load(
    path: Path | str, *, until: int | None = None, keep_finished: int | None = None, keyframes: bool = True
) -> TraceState:
    """The state that a trace file tells, at its end or at the instant `until` (ns).

    `keep_finished`: how many finished requests are kept, where that is not the usual number; all events are folded
    then, as they are without `keyframes`. Raises TraceFileError.
    """
    with TraceFile(path) as trace:
        return load_open(trace, until=until, keep_finished=keep_finished, keyframes=keyframes)


def load_open(
    trace: TraceFile, *, until: int | None = None, keep_finished: int | None = None, keyframes: bool = True
) -> TraceState:
    """As `load`, from a file that is open: its `problems` say afterwards what was wrong with it."""
    with without_collections():
        if keep_finished is not None:
            place = Place(TraceState(keep_finished=keep_finished), 0, {})
        elif not keyframes:
            place = Place(TraceState(), 0, {})
        else:
            place = KeyframeIndex(trace).before(trace.end if until is None else until)
        _fold(trace, place, until)
        if place.block:  # the file is about to be closed
            _wake(place.state)
        return place.state


def _fold(trace: TraceFile, place: Place, until: int | None) -> None:
    """Take in all that comes behind `place`, up to the instant `until` (ns)."""
    state = place.state
    for block in trace.blocks[place.block :]:
        if until is not None and block.first > until:
            break
        deliveries = trace.checked(block, place.checks)
        if until is not None and block.last > until:
            for item in items(deliveries, block):
                if item.due > until:
                    return
                _take(state, item)
            continue
        _take_all(state, deliveries)


def _wake(state: TraceState) -> None:
    """Read all that a state from a keyframe leaves in the file until someone looks at it."""
    for source in state.sources.values():
        source.batch.history.steps = list(source.batch.history.steps)
    for request in state.requests.over.values():
        request.observed  # noqa: B018 - looked at

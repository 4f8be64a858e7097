"""Where in a trace file one can start: the state at the nearest keyframe before an instant.

Where a file has no keyframes that this version can use (an engine recorded it, another version did,
it is damaged), a `KeyframeIndex` makes its own in memory while it walks through the file.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from engine_hooks.protocol.blocks import BASE, Block, TraceFileError
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Step
from engine_hooks.protocol.frames import SequenceCheck
from engine_hooks.protocol.zstd_frames import pack, unpack
from tracer.recording.keyframes.keyframer import Keyframer
from tracer.recording.keyframes.opened import KeyframeError, Opened, opened
from tracer.recording.keyframes.restore import restore, usable
from tracer.recording.keyframes.sleeping_steps import StepsLostError
from tracer.recording.trace_file import TraceFile
from tracer.state.trace_state import TraceState

OWN_NS: Final = 10 * NS_PER_S
"""Time of the trace between two keyframes that are made here: fewer than a recorder makes, because
someone waits."""

KEYFRAMES_KEPT: Final = 192 * 1024 * 1024
"""Bytes of keyframes that are remembered, with what was taken out of them: those of an hour of a
busy engine."""

STEPS_KEPT: Final = 512
"""Blocks whose steps are remembered: a player is mostly sent to somewhere near."""


class Place(NamedTuple):
    """Somewhere to go on from: a state, the place in `TraceFile.blocks` of the next block, and what
    numbers come."""

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
    """Where in a file one can start. Uses the file's own keyframes, or makes some, `keyframe_ns` of
    the trace apart, while it walks through the file."""

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
                seqs = {
                    name: check.expected
                    for name, check in self._checks.items()
                    if check.expected is not None
                }
                try:
                    content, base = keyframer.make(block.number, seqs)
                except (
                    Exception
                ):  # events that no engine tells: seeking takes longer from here on, nothing else
                    self._keyframer = None
                    break
                self._own.append(
                    _Made(
                        block.number, pack(content, 1), len(content), base, block.last, self._next
                    )
                )
            if time.perf_counter_ns() > deadline:
                break
        return self.made < 1.0

    def before(self, t: int) -> Place:
        """The nearest place at or before the instant `t` (ns); the begin of the file if there is
        none."""
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
                return self._restored(
                    chain, self._earlier, bisect_right(self._numbers, last.number)
                )
            except (
                StepsLostError
            ) as error:  # those before the damage do not need what was lost there
                place = min(
                    place - 1, bisect_right(keyframes, error.number, key=lambda block: block.number)
                )
            except KeyframeError as error:
                # One that contradicts itself was not made by us: none of them is believed.
                self.trace.problems.append(
                    f"has a keyframe that cannot be used ({error}); seeking takes longer"
                )
                self._uses_file = False
                self._make_own()
                return None
        return None

    def _opened(self, block: Block) -> Opened | None:
        """The keyframe in a block, None when that is damaged. Raises KeyframeError when it is
        none."""
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
        # a defect of ours: slower, not wrong
        with contextlib.suppress(KeyframeError, StepsLostError):
            return self._restored(chain, self._own_earlier, self._own[place - 1].block)
        return None

    def _earlier(self, number: int) -> Opened:
        """The file's keyframe after the block `number`. Raises KeyframeError where there is
        none."""
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
        """Whether the block with this number is there and undamaged; it is read when a step in it
        is wanted."""
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
        except (
            TraceFileError
        ):  # the disk fails, or the file was closed: nobody who draws a step can do anything
            raise StepsLostError(number) from None
        if self.trace.damaged(block):
            raise StepsLostError(number)
        self._steps[number] = steps
        if len(self._steps) > STEPS_KEPT:
            self._steps.popitem(last=False)
        return steps

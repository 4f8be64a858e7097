"""Playing a trace file: the feed of a screen, with a playhead for a clock.

What is shown at the playhead is what a live viewer had at that instant. The time shown is always
the trace's own: a stretch in which nothing happens is jumped over, and that is said. Nothing here
takes longer at a time than a screen may wait; what does (a far seek in a file that was not folded
yet) goes on with every tick.
"""

from __future__ import annotations

import asyncio
import gc
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.block_maker import is_calm
from engine_hooks.protocol.blocks import Mark
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Event, Received, Step
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import Cursor, items
from tracer.replay.folding import Folding
from tracer.replay.pickled import collections_paused
from tracer.replay.snapshot_file import SnapshotFile
from tracer.replay.stops import NextEvent, NextStage, NextToken, Stop
from tracer.replay.timespec import clock_of
from tracer.state.trace_state import TraceState

SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Steps of `faster` and `slower`."""
SLOWEST: Final = SPEEDS[0]
FASTEST: Final = SPEEDS[-1]

IDLE_S: Final = 2.0
"""A stretch that is longer, in which nothing happens, is jumped over."""

LEAD_NS: Final = 500 * NS_PER_MS
"""How much of such a stretch is shown at either end."""

LOOK_BACK: Final = 120
"""Blocks, of a second each, in which a request that goes by several ids may have been told of under
another one."""

TICK_S: Final = 1 / 30
SLICE_NS: Final = 12 * NS_PER_MS
"""How long one tick may fold: a third of its time."""
SEEK_NS: Final = 40 * NS_PER_MS
"""How long a seek may take before it is left to the ticks."""
LOOK_NS: Final = NS_PER_S // 4
"""Time between two looks at what was folded."""
LATE_NS: Final = NS_PER_S
"""A tick that comes later than this after the last one (a stopped process) plays no more than
this."""
FAR_NS: Final = 20 * NS_PER_S
"""So far ahead of where a seek has come, a snapshot that was added is worth being read."""
SAID_NS: Final = 4 * NS_PER_S
"""How long the status says that a stretch was jumped over."""


class Player:
    """Plays `trace`. All instants are ns of the trace's clock; `now` is the viewer's own, from
    which playing takes its pace.

    `speed` is kept between 0.1 and 100; `at` is where to begin (default: at the begin); `idle_s` is
    the length of a stretch without events that is still shown, None for any. With `loop` it begins
    again at the end. `findings` are instants of interest for `next_finding`.
    """

    def __init__(
        self,
        trace: TraceFile,
        *,
        speed: float = 1.0,
        at: int | None = None,
        idle_s: float | None = IDLE_S,
        loop: bool = False,
        paused: bool = False,
        findings: Iterable[int] = (),
        now: Callable[[], int] = clock.now,
    ) -> None:
        self.trace = trace
        self.paused = paused
        self.loop = loop
        self.idle_s = idle_s
        self.findings = sorted(findings)
        self.bookmarks: list[Mark] = sorted(trace.marks(), key=_mark_time)
        """Marked places, those in the file included."""
        self.skipped = 0
        """ns of the trace that were jumped over so far because nothing happened in them."""
        self.ended = False
        self._now = now
        self._speed = 1.0
        self.speed = speed
        self._snapshots = SnapshotFile.of(trace)
        self._folding = Folding(self._snapshots) if self._snapshots is not None else None
        self._looked = now()
        self._cursor = Cursor(trace, self._snapshots)
        self.state: TraceState = self._cursor.state
        """The state at the playhead. Another object after a seek; the one before is of no use
        then."""
        self._playhead = trace.begin
        self._last_tick = now()
        self._said_until = 0
        self._last_skip = 0
        self._note = ""
        self._target: int | None = None
        self._jumped = False
        self._stop: Stop | None = None
        self._wake = asyncio.Event()
        self.seek(trace.begin if at is None else at)

    @classmethod
    def open(cls, path: Path | str, **options: object) -> Player:
        """A player of the file at `path`; `options` as in the constructor. Raises
        TraceFileError."""
        return cls(TraceFile(path), **options)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the file."""
        if self._folding is not None:
            self._folding.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self.trace.close()

    # --- a screen's feed --------------------------------------------------------------------------

    def now(self) -> int:
        """Return the instant that is shown (ns): the playhead; on the way to another place, how far
        that is."""
        return self._playhead if self._target is None else self._cursor.due

    @property
    def status(self) -> str:
        """A few words: what it is doing."""
        if self._note:
            return self._note
        if self._target is not None:
            return f"seeking {self._progress() * 100:.0f} %"
        if self._stop is not None:
            return "searching"
        if self.ended:
            return "replay ended"
        if self.paused:
            return "replay paused"
        said = f", skipped {clock_of(self._last_skip)}" if self._now() < self._said_until else ""
        return f"replay {self._speed:g}x{said}"

    @status.setter
    def status(self, text: str) -> None:
        """Say something else: it plays no more."""
        self._note = text

    async def run(self) -> None:
        """Play until cancelled: a replay that has ended can be sent back."""
        self._last_tick = self._now()
        while True:
            self.tick()
            if self._busy:
                await asyncio.sleep(TICK_S)
                continue
            self._wake.clear()
            await self._wake.wait()
            self._last_tick = self._now()

    @property
    def _busy(self) -> bool:
        """Whether time or work goes on."""
        playing = not self.paused and not self.ended
        return playing or self._target is not None or self._stop is not None or self.preparing

    @property
    def preparing(self) -> bool:
        """Whether the file is being folded, so that seeks are quicker later."""
        return self._folding is not None and self._folding.going

    @property
    def folded(self) -> int:
        """Up to when a seek is quick (ns)."""
        return self.trace.end if self._snapshots is None else self._snapshots.reached

    def tick(self) -> None:
        """Go on, by the time that has passed since the last tick."""
        now = self._now()
        elapsed, self._last_tick = min(now - self._last_tick, LATE_NS), now
        self._look(now)
        if self._target is not None:
            self._go_on_seeking(SLICE_NS)
        elif self._stop is not None:
            self._go_on_stepping(self._stop, SLICE_NS)
        elif self.paused or self.ended:
            self._cursor.tidy()
        else:
            self._cursor.tidy()
            self._play(int(elapsed * self._speed))

    def _look(self, now: int) -> None:
        """See which snapshots were added."""
        if self._snapshots is None or self._snapshots.complete or now - self._looked < LOOK_NS:
            return
        self._looked = now
        self._snapshots.refresh()

    # --- playing ----------------------------------------------------------------------------------

    @property
    def speed(self) -> float:
        """How much faster than it happened it is shown."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._speed = min(max(speed, SLOWEST), FASTEST) if speed == speed else 1.0

    def faster(self) -> None:
        """The next higher speed."""
        self.speed = SPEEDS[min(bisect_right(SPEEDS, self._speed), len(SPEEDS) - 1)]

    def slower(self) -> None:
        """The next lower speed."""
        self.speed = SPEEDS[max(bisect_left(SPEEDS, self._speed) - 1, 0)]

    def toggle(self) -> None:
        """Play or pause; at the end: play again from the begin."""
        if self.ended and not self.paused:
            self.seek(self.trace.begin)
            return
        self.paused = not self.paused
        self._last_tick = self._now()
        self._wake.set()

    def play(self) -> None:
        """Go on playing."""
        if self.paused:
            self.toggle()

    def pause(self) -> None:
        """Stand still."""
        if not self.paused:
            self.paused = True
            self._wake.set()

    def _play(self, duration: int) -> None:
        target = self._over_idle(self._playhead + duration)
        if self._cursor.advance(target, SLICE_NS):
            self._playhead = min(target, self.trace.end)
        else:
            # faster than can be folded: as fast as that is
            self._playhead = max(self._playhead, self._cursor.due)
        if self._cursor.peek() is None and self._playhead >= self.trace.end:
            self._end()

    def _over_idle(self, target: int) -> int:
        """Where to play on to: behind a stretch in which nothing happens, when it is long
        enough."""
        if self.idle_s is None:
            return target
        coming = self._cursor.next_activity()
        idle_ns = int(self.idle_s * NS_PER_S)
        end = self.trace.end if coming is None else coming
        leave = self._cursor.active + LEAD_NS
        arrive = end - LEAD_NS if coming is not None else end
        if (
            end - self._cursor.active <= idle_ns
            or target < leave
            or target >= arrive
            or arrive <= self._playhead
        ):
            return target
        self._last_skip = arrive - max(self._playhead, leave)
        self.skipped += self._last_skip
        self._said_until = self._now() + SAID_NS
        return arrive

    def _end(self) -> None:
        if self.loop:
            self.seek(self.trace.begin)
        else:
            self.ended = True

    # --- seeking ----------------------------------------------------------------------------------

    @property
    def target(self) -> int | None:
        """Where it is being sent (ns), None once it is there."""
        return self._target

    @property
    def fraction(self) -> float:
        """How far the playhead is: 0 at the begin, 1 at the end."""
        length = self.trace.end - self.trace.begin
        return (self.now() - self.trace.begin) / length if length > 0 else 1.0

    def seek(self, t: int) -> None:
        """Go to the instant `t` (ns). Done at once where a snapshot is near, else in the course of
        the next ticks."""
        self._stop = None
        self.ended = False
        self._jumped = False
        self._target = min(max(t, self.trace.begin), self.trace.end)
        self._go_on_seeking(SEEK_NS)
        self._wake.set()

    def seek_by(self, ns: int) -> None:
        """Go so much further, or back, from where it is or is being sent."""
        self.seek((self._playhead if self._target is None else self._target) + ns)

    def seek_fraction(self, fraction: float) -> None:
        """Go to a share of the trace, 0 to 1."""
        fraction = min(max(fraction, 0.0), 1.0) if fraction == fraction else 0.0
        self.seek(self.trace.begin + int(fraction * (self.trace.end - self.trace.begin)))

    def seek_request(self, request_id: str) -> bool:
        """Go to where a request was received, by the id that is shown, the full one or the
        client's; whether it is there."""
        request = self._cursor.state.requests.find(request_id)
        t = request.order[0] if request is not None else self._search(request_id)
        if t is None:
            return False
        self.seek(t)
        return True

    def next_finding(self) -> bool:
        """Go to the next instant of `findings`, the first one behind the last; whether there is
        any."""
        return self._seek_next(self.findings)

    def _go_on_seeking(self, budget_ns: int) -> None:
        with collections_paused():
            self._seek_for(budget_ns)
            if self._jumped:
                # A whole state is new, and none of it garbage: let it count as old without walking
                # through it once.
                gc.freeze()
                gc.unfreeze()

    def _seek_for(self, budget_ns: int) -> None:
        target, cursor = self._target, self._cursor
        assert target is not None
        ahead = self._snapshots.last_before(target) - cursor.due if self._snapshots else 0
        # Again only where a snapshot was added meanwhile that is far ahead of here.
        if not self._jumped or ahead > FAR_NS:
            self._jumped = True
            cursor.jump(target)
            self.state = cursor.state
        if cursor.advance(target, budget_ns):
            self._target = None
            self._playhead = target
            self._last_tick = self._now()

    def _progress(self) -> float:
        target, begin = self._target or self.trace.begin, self.trace.begin
        reached = self._cursor.due if self._cursor.due <= target else begin
        return (reached - begin) / (target - begin) if target > begin else 1.0

    def _search(self, request_id: str) -> int | None:
        """When a request was received, or first told of, anywhere in the file (ns)."""
        wanted = request_id.encode("utf-8", "replace")
        if not wanted:
            return None
        for place, block in enumerate(self.trace.blocks):
            content = self.trace.content(block)
            if content is None or wanted not in content:
                continue
            for item in items(self.trace.read(block), block):
                event: Any = item.event
                rid = getattr(event, "rid", "")
                if request_id in (rid, getattr(event, "client_id", "")) or (
                    rid and request_id in rid
                ):
                    return self._received(place, item.source, event.key, item.due)
        return None

    def _received(self, place: int, source: str, key: int, found: int) -> int:
        """When the request that `source` calls `key` was received, at or shortly before the block
        at `place`; else `found` (ns)."""
        for block in reversed(self.trace.blocks[max(0, place - LOOK_BACK) : place + 1]):
            for item in items(self.trace.read(block), block):
                if type(item.event) is Received and item.source == source and item.event.key == key:
                    return item.due
        return found

    def _seek_next(self, instants: list[int]) -> bool:
        if not instants:
            return False
        place = bisect_right(instants, self._playhead)
        self.seek(instants[place % len(instants)])
        return True

    # --- steps ------------------------------------------------------------------------------------

    def step_event(self) -> None:
        """Pause behind the next event; signs of life are no events."""
        self._step_to(NextEvent())

    def step_step(self) -> None:
        """Pause behind the next step of an engine."""
        self._step_to(NextEvent(Step))

    def step_token(self, request_id: str | None = None) -> None:
        """Pause where the next output token is known, of one request or of any."""
        self._step_to(NextToken(request_id))

    def step_stage(self, request_id: str | None = None) -> None:
        """Pause where a request enters or leaves its next stage, one request or any."""
        self._step_to(NextStage(request_id))

    def back_event(self) -> None:
        """Pause at the event before."""
        self._step_back(lambda event: not is_calm(event))

    def back_step(self) -> None:
        """Pause at the step before."""
        self._step_back(lambda event: type(event) is Step)

    def _step_to(self, stop: Stop) -> None:
        self.paused = True
        if self._target is not None:
            return
        self._stop = stop
        self._go_on_stepping(stop, SEEK_NS)
        self._wake.set()

    def _go_on_stepping(self, stop: Stop, budget_ns: int) -> None:
        deadline = time.perf_counter_ns() + budget_ns
        cursor = self._cursor
        while (item := cursor.peek()) is not None:
            stop.before(cursor.state, item)
            cursor.step()
            self._playhead = max(self._playhead, item.due)
            if stop.reached(cursor.state, item):
                self._stop = None
                return
            if time.perf_counter_ns() > deadline:
                return
        self._playhead = self.trace.end
        self._stop, self.ended = None, True

    def _step_back(self, wanted: Callable[[Event], bool]) -> None:
        self.paused = True
        for block in reversed(self.trace.blocks[: self.trace.block_at(self._playhead) + 1]):
            found = [
                item.due for item in items(self.trace.read(block), block)
                if item.event is not None and item.due < self._playhead and wanted(item.event)
            ]  # fmt: skip
            if found:
                self.seek(found[-1])
                return
        self.seek(self.trace.begin)

    # --- bookmarks --------------------------------------------------------------------------------

    def bookmark(self, text: str = "") -> bool:
        """Mark the playhead, or take the mark away that is there; whether there is one now."""
        there = [mark for mark in self.bookmarks if mark.t == self._playhead]
        if there:
            self.bookmarks.remove(there[0])
            return False
        insort(self.bookmarks, Mark(self._playhead, text), key=_mark_time)
        return True

    def next_bookmark(self) -> bool:
        """Go to the next bookmark, the first one behind the last; whether there is any."""
        return self._seek_next([mark.t for mark in self.bookmarks])


def _mark_time(mark: Mark) -> int:
    return mark.t

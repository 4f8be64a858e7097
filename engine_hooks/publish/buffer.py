"""Engine side: the buffer to which hooks append their events, without ever waiting.

`emit` is an append to a bounded deque: no lock, no allocation beyond the event, no I/O. The
publisher's thread drains it about 20 times a second. When the drain falls behind, the *oldest* bulk
events go first; lifecycle events have a queue of their own, so that a flood of steps cannot push
out the start or the end of a request. Whatever is lost is counted exactly and shows as a gap in the
sequence numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final

from engine_hooks.protocol.events import Event

BULK_ROOM: Final = 16_384
"""Bulk events (steps, sent counters, output text) kept: over a minute of steps of 5 ms. Beyond it
the oldest go."""

LIFECYCLE_ROOM: Final = 65_536
"""Lifecycle events kept: some 4,000 requests. Beyond it the oldest go."""

_time = attrgetter("t")


class EventBuffer:
    """A bounded, drop-oldest buffer of events. Any thread may emit; one thread drains.

    `emit` appends a bulk event (`Step`, `Sent`, `Output`, …), `emit_lifecycle` a lifecycle event,
    which has reserved room.
    """

    def __init__(self, bulk_room: int = BULK_ROOM, lifecycle_room: int = LIFECYCLE_ROOM) -> None:
        self._bulk = _Lane(bulk_room)
        self._lifecycle = _Lane(lifecycle_room)
        self.emit = self._bulk.append
        self.emit_lifecycle = self._lifecycle.append
        self._seq = 0
        self.dropped = 0

    def reset(self, on_first: Callable[[], None]) -> None:
        """Start over, empty and at sequence number 0, as in a forked child.

        `on_first` is called by the thread that emits the first event afterwards (by two, when they
        race). No other thread may emit or drain meanwhile.
        """
        self._seq = self.dropped = 0
        counts = {lane: lane.reset() for lane in (self._bulk, self._lifecycle)}

        def wake() -> None:
            for lane, count in counts.items():
                lane.count = count
            on_first()

        for lane, count in counts.items():
            lane.count = _WakingCount(count, wake)

    @property
    def emitted(self) -> int:
        """Events offered so far, dropped ones included."""
        return self._bulk.offered + self._lifecycle.offered

    @property
    def pending(self) -> bool:
        """True while something waits to be drained."""
        return bool(self._bulk.queue or self._lifecycle.queue)

    def drain(self, limit: int = 100_000) -> tuple[int, list[Event]]:
        """Remove what is there, ordered by time: (sequence number of the first event, events).

        Events that were dropped since the last drain have used up their numbers: the returned
        number jumps over them. `dropped` is the total so far.
        """
        life, lost_life = self._lifecycle.pop(limit)
        bulk, lost_bulk = self._bulk.pop(limit)
        self.dropped += lost_life + lost_bulk
        first = self._seq + lost_life + lost_bulk
        events = life + bulk
        self._seq = first + len(events)
        # a hook stamped something that is no time: a reader leaves that event out
        with contextlib.suppress(TypeError):
            events.sort(key=_time)  # two nearly sorted runs: linear
        return first, events


class _Lane:
    """A bounded queue, with counts of what was appended and popped.

    itertools.count is advanced in C under the GIL: an exact count of what was offered, from any
    thread.
    """

    __slots__ = ("_popped", "count", "queue")

    def __init__(self, room: int) -> None:
        self.queue: deque[Event] = deque(maxlen=room)
        self.count: Iterator[int] = self.reset()

    def reset(self) -> Iterator[int]:
        """Empty the queue; return a fresh count for it."""
        self.queue.clear()
        self._popped = 0
        return itertools.count(1)

    def append(self, event: Event) -> None:
        self.queue.append(event)
        next(self.count)

    @property
    def offered(self) -> int:
        """Events appended so far. Only the count's repr, ``count(7)``, shows it without advancing
        the count (pickling counts is deprecated from Python 3.12 on)."""
        return int(repr(self.count)[6:-1]) - 1

    def pop(self, limit: int) -> tuple[list[Event], int]:
        """Pop up to `limit` events: (events, how many vanished since the last time).

        An event is appended before it is counted, and the count is read before popping, so what is
        counted and neither popped nor waiting was really pushed out. A loss that races with the
        drain is found by the next one.
        """
        offered = self.offered
        events: list[Event] = []
        popleft = self.queue.popleft
        for _ in range(min(limit, len(self.queue))):
            try:
                events.append(popleft())
            except IndexError:  # pushed out between len() and here
                break
        lost = max(0, offered - self._popped - len(events) - len(self.queue))
        self._popped += len(events) + lost
        return events, lost


class _WakingCount:
    """A count that calls `wake` whenever it is advanced; stands in until the first event."""

    def __init__(self, count: Iterator[int], wake: Callable[[], None]) -> None:
        self._count = count
        self._wake = wake

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        value = next(self._count)
        self._wake()
        return value

    def __repr__(self) -> str:
        return repr(self._count)

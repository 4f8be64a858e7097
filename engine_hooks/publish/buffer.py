"""Engine side: where hooks leave their events, without ever waiting.

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
    """A bounded, drop-oldest buffer of events. Any thread may emit; one thread drains."""

    __slots__ = (
        "_bulk",
        "_bulk_count",
        "_life_count",
        "_lifecycle",
        "_seq",
        "_taken_bulk",
        "_taken_life",
        "dropped",
    )

    def __init__(self, bulk_room: int = BULK_ROOM, lifecycle_room: int = LIFECYCLE_ROOM) -> None:
        self._bulk: deque[Event] = deque(maxlen=bulk_room)
        self._lifecycle: deque[Event] = deque(maxlen=lifecycle_room)
        self.reset()

    def reset(self, on_first: Callable[[], None] | None = None) -> None:
        """Start over, empty and at sequence number 0: what a forked child does, whose events are
        not its parent's.

        `on_first` is called by the thread that emits the first event afterwards (by two, when they
        race). No other thread may emit or drain meanwhile.
        """
        self._bulk.clear()
        self._lifecycle.clear()
        # itertools.count is advanced in C under the GIL: an exact count of what was offered, from
        # any thread.
        bulk, life = itertools.count(1), itertools.count(1)
        self._bulk_count: Iterator[int] = bulk
        self._life_count: Iterator[int] = life
        self._taken_bulk = 0
        self._taken_life = 0
        self._seq = 0
        self.dropped = 0
        if on_first is not None:
            first = on_first

            def wake() -> None:
                self._bulk_count, self._life_count = bulk, life
                first()

            self._bulk_count, self._life_count = _WakingCount(bulk, wake), _WakingCount(life, wake)

    def emit(self, event: Event) -> None:
        """Leave a bulk event (`Step`, `Sent`, `Output`, …)."""
        self._bulk.append(event)
        next(self._bulk_count)

    def emit_lifecycle(self, event: Event) -> None:
        """Leave a lifecycle event, which has reserved room."""
        self._lifecycle.append(event)
        next(self._life_count)

    @property
    def emitted(self) -> int:
        """Events offered so far, dropped ones included."""
        return _offered(self._bulk_count) + _offered(self._life_count)

    @property
    def pending(self) -> bool:
        """Whether anything waits to be drained."""
        return bool(self._bulk or self._lifecycle)

    def drain(self, limit: int = 100_000) -> tuple[int, list[Event]]:
        """Take what is there, ordered by time: (sequence number of the first event, events).

        Events that were dropped since the last drain have used up their numbers: the returned
        number jumps over them. `dropped` is the total so far.
        """
        life, lost_life = _take(self._lifecycle, self._life_count, self._taken_life, limit)
        bulk, lost_bulk = _take(self._bulk, self._bulk_count, self._taken_bulk, limit)
        self._taken_life += len(life) + lost_life
        self._taken_bulk += len(bulk) + lost_bulk
        self.dropped += lost_life + lost_bulk
        self._seq += lost_life + lost_bulk
        first = self._seq
        events = life + bulk
        self._seq += len(events)
        # a hook stamped something that is no time: a reader leaves that event out
        with contextlib.suppress(TypeError):
            events.sort(key=_time)  # two nearly sorted runs: linear
        return first, events


class _WakingCount:
    """A counter that calls `wake` whenever it is advanced: put in place of a counter until the
    first event."""

    __slots__ = ("_counter", "_wake")

    def __init__(self, counter: itertools.count[int], wake: Callable[[], None]) -> None:
        self._counter = counter
        self._wake = wake

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        value = next(self._counter)
        self._wake()
        return value

    def __repr__(self) -> str:
        return repr(self._counter)


def _offered(counter: Iterator[int]) -> int:
    """Value that the counter has handed out last. Only its repr, ``count(7)``, tells it without
    advancing it (pickling counters is deprecated from Python 3.12 on)."""
    return int(repr(counter)[6:-1]) - 1


def _take(
    queue: deque[Event], counter: Iterator[int], taken: int, limit: int
) -> tuple[list[Event], int]:
    """Pop up to `limit` events; also say how many vanished since the last time.

    An event is appended before it is counted, and the count is read before popping, so what is
    counted and neither taken nor waiting was really pushed out. A loss that races with the drain is
    found by the next one.
    """
    offered = _offered(counter)
    events: list[Event] = []
    popleft = queue.popleft
    for _ in range(min(limit, len(queue))):
        try:
            events.append(popleft())
        except IndexError:  # pushed out between len() and here
            break
    return events, max(0, offered - taken - len(events) - len(queue))

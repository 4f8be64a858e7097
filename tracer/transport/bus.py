"""One stream out of many sources, fanned out to many readers.

Events of several processes are put in order of time within a short window; one that comes later
than that goes out at once, out of order. Time decides about order only: an event stamped in the
future does not wait, and the clock of another host is matched with ours by its shortest delay.
Every subscriber has a bounded queue of its own: one that does not keep up loses the oldest
deliveries and gets a `Gap` for them, while the others lose nothing.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.attach_state import AttachState
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Event, Gap, Header, SourceGone
from engine_hooks.protocol.stamps import LEAP, Believed
from engine_hooks.protocol.stream_decoder import Delivery

WINDOW: Final = 100 * NS_PER_MS
"""ns in which events of different sources are put in order: two drains of a publisher."""

ROOM: Final = 200_000
"""Events that wait for one subscriber: over a minute of a busy engine. Beyond it the oldest
deliveries go."""

MAX_PENDING: Final = 200_000
"""Events held back for their order at most; beyond it they go out early."""


class Bus:
    """Merges sources and fans them out. `add` sources, `subscribe` readers, then `run`."""

    def __init__(self, *, window: int = WINDOW, now: Callable[[], int] = clock.now) -> None:
        self._window = window
        self._now = now
        self._order = itertools.count()
        self._pending: list[tuple[int, int, str, Event]] = []
        self._headers: dict[str, Header] = {}
        self._retained: dict[str, AttachState] | None = None
        self._offsets: dict[str, int] = {}
        self._believed: dict[str, Believed] = {}
        self._speaking: set[str] = set()
        self._subscriptions: list[Subscription] = []
        self._readers: set[asyncio.Task[None]] = set()
        self._waiting: list[AsyncIterable[Delivery]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._running = False
        self._closed = False

    def add(self, source: AsyncIterable[Delivery]) -> None:
        """Read `source` too, once the bus runs."""
        if self._running:
            self._read(source)
        else:
            self._waiting.append(source)

    def retain(self) -> None:
        """Keep what is still true (`engine_hooks.protocol.attach_state`) from now on, for readers
        that come late."""
        self._retained = {} if self._retained is None else self._retained

    def subscribe(self, room: int = ROOM, *, from_before: bool = False) -> Subscription:
        """Return everything from now on, for one reader; at most `room` events wait for it.

        The reader learns at once which sources are there, and with `from_before` also what is still
        true of them, as far as the bus retains it.
        """
        subscription = Subscription(self, room)
        if self._closed:
            subscription.end()
            return subscription
        kept = (self._retained or {}) if from_before else {}
        for source, header in self._headers.items():
            events = kept[source].snapshot() if source in kept else []
            subscription.append(Delivery(source, header, events))
        self._subscriptions.append(subscription)
        return subscription

    async def run(self) -> None:
        """Carry events until `aclose` is called or every source has ended, of which there must have
        been one."""
        self._running = True
        for source in self._waiting:
            self._read(source)
        self._waiting.clear()
        had_one = False
        try:
            while not self._closed:
                had_one = had_one or bool(self._readers)
                if had_one and not self._readers:
                    break
                self._changed.clear()
                await self._changed.wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop reading, hand out what is held back, and end the subscriptions."""
        self._closed = True
        self._changed.set()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._release(everything=True)
        for subscription in self._subscriptions:
            subscription.end()
        self._subscriptions = []

    def _leave(self, subscription: Subscription) -> None:
        with contextlib.suppress(ValueError):
            self._subscriptions.remove(subscription)

    # --- in ---------------------------------------------------------------------------------------

    def _read(self, source: AsyncIterable[Delivery]) -> None:
        reader = asyncio.create_task(self._carry(source))
        self._readers.add(reader)
        reader.add_done_callback(self._forget)
        self._changed.set()

    def _forget(self, reader: asyncio.Task[None]) -> None:
        self._readers.discard(reader)
        self._changed.set()

    async def _carry(self, source: AsyncIterable[Delivery]) -> None:
        names: set[str] = set()
        iterator = aiter(source)
        try:
            async for delivery in iterator:
                names.add(delivery.source)
                self._arrive(delivery)
                # a source that always has something may not starve the readers
                await asyncio.sleep(0)
        except Exception as error:
            # a defect in a source: its processes are gone for us, the others are not
            reason = f"reading it failed: {error}"
            for name in names & self._speaking:
                self._arrive(Delivery(name, None, [SourceGone(self._now(), reason)]))
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    def _arrive(self, delivery: Delivery) -> None:
        arrival = self._now()
        source = delivery.source
        self._speaking.add(source)
        if delivery.header is not None:
            self._headers[source] = delivery.header
        if delivery.header is not None or delivery.unknown:
            self._hand_out(replace(delivery, events=[]))
        offset = self._offset(delivery, arrival)
        order = self._order
        self._pending += [
            (min(event.t + offset, arrival), next(order), source, event)
            for event in delivery.events
        ]
        if delivery.events and type(delivery.events[-1]) is SourceGone:
            # after all that it ever said
            self._pending[-1] = (arrival, next(order), source, delivery.events[-1])
            self._speaking.discard(source)
            self._headers.pop(source, None)
            self._offsets.pop(source, None)
        self._release()

    def _offset(self, delivery: Delivery, arrival: int) -> int:
        """Return the ns to add to a source's stamps so that they can be put in order among ours."""
        header = self._headers.get(delivery.source)
        if header is None or header.boot_id == clock.boot_id() or not delivery.events:
            return self._offsets.get(delivery.source, 0)
        delay = arrival - delivery.events[-1].t
        known = self._offsets.get(delivery.source, delay)
        # Nothing is under way for an hour: of two that are so far apart one is of a stray stamp,
        # which comes once.
        offset = delay if abs(delay - known) > LEAP else min(delay, known)
        self._offsets[delivery.source] = offset
        return offset

    # --- out --------------------------------------------------------------------------------------

    def _release(self, *, everything: bool = False) -> None:
        """Hand out what has waited for the window, in order; all of it when nobody is left who
        could say more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending = self._pending
        if not pending:
            return
        pending.sort()
        everything = everything or self._nobody_else() or len(pending) > MAX_PENDING
        horizon = self._now() - self._window
        ready = len(pending)
        if not everything:
            ready = bisect.bisect_right(pending, horizon, key=lambda entry: entry[0])
        for source, entries in itertools.groupby(pending[:ready], key=lambda entry: entry[2]):
            self._hand_out(Delivery(source, None, [entry[3] for entry in entries]))
        del pending[:ready]
        if pending:
            delay = max(pending[0][0] - horizon, NS_PER_MS) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(delay, self._release)

    def _nobody_else(self) -> bool:
        """Return True when no source can still send an event that belongs before what is pending:
        none is alive, or the one alone whose events these are."""
        if len(self._speaking) == 1:
            return self._speaking.issuperset(entry[2] for entry in self._pending)
        return not self._speaking

    def _hand_out(self, delivery: Delivery) -> None:
        if self._retained is not None and delivery.events:
            last = delivery.events[-1]
            believed = self._believed.setdefault(delivery.source, Believed())
            if delivery.source in self._headers:
                believed.meet(self._headers[delivery.source])
            for event in delivery.events:
                believed.observe(event)
            self._retained.setdefault(delivery.source, AttachState()).observe(
                delivery.events, believed.now
            )
            if type(last) is SourceGone:
                del self._retained[delivery.source], self._believed[delivery.source]
        for subscription in self._subscriptions:
            subscription.append(delivery)


@dataclass(slots=True)
class _Loss:
    """The loss of one subscriber, of one source."""

    t: int = 0
    missing: int = 0
    unknown: int = 0
    header: Header | None = None
    gone: SourceGone | None = None


class Subscription(AsyncIterator[Delivery]):
    """The bounded queue of one reader. Deliveries that do not fit are dropped, oldest first, and
    become a `Gap` before the next one of that source; headers, the ends of sources and earlier gaps
    are never lost."""

    def __init__(self, bus: Bus, room: int) -> None:
        self.lost = 0
        """Events dropped because this reader was too slow."""
        self._bus = bus
        self._room = room
        self._queue: deque[Delivery] = deque()
        self._held = 0
        self._losses: dict[str, _Loss] = {}
        self._ready = asyncio.Event()
        self._ended = False

    def append(self, delivery: Delivery) -> None:
        """Queue a delivery; never waits."""
        self._queue.append(delivery)
        self._held += len(delivery.events)
        while self._held > self._room and len(self._queue) > 1:
            self._lose(self._queue.popleft())
        self._ready.set()

    def end(self) -> None:
        """End the iteration after what is queued."""
        self._ended = True
        self._ready.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Delivery:
        while True:
            if self._queue:
                delivery = self._queue.popleft()
                self._held -= len(delivery.events)
                loss = self._losses.pop(delivery.source, None)
                return delivery if loss is None else _after(loss, delivery)
            if self._losses:
                source, loss = self._losses.popitem()
                return _after(loss, Delivery(source))
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()

    async def aclose(self) -> None:
        """Leave the bus; what waits is dropped."""
        self._bus._leave(self)
        self._queue.clear()
        self._losses.clear()
        self._held = 0
        self.end()

    def _lose(self, delivery: Delivery) -> None:
        self._held -= len(delivery.events)
        loss = self._losses.setdefault(delivery.source, _Loss())
        loss.header = delivery.header or loss.header
        loss.unknown += delivery.unknown
        for event in delivery.events:
            loss.t = event.t
            if type(event) is SourceGone:
                loss.gone = event
            elif type(event) is Gap:
                loss.missing += event.missing
            else:
                loss.missing += 1
                self.lost += 1


def _after(loss: _Loss, delivery: Delivery) -> Delivery:
    """Return `delivery` with the loss before it at its start."""
    events: list[Event] = []
    if loss.missing:
        events.append(Gap(loss.t, loss.missing, "this view fell behind"))
    if loss.gone is not None:
        events.append(loss.gone)
    events += delivery.events
    header = delivery.header or loss.header
    return Delivery(delivery.source, header, events, delivery.unknown + loss.unknown)

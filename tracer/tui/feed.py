"""The sources of an app: a live engine, a replayed file or a demonstration.

An app knows these protocols only, so that the same screens show any of them and tests inject their
own clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.events import SourceGone
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.state.trace_state import TraceState


class Feed(Protocol):
    """Where events come from and what time it is there.

    `state` is the fold that the screens read; `status` one or two words about the stream
    (``connecting…``, ``● LIVE``, ``ended``).
    """

    state: TraceState
    status: str

    def now(self) -> int:
        """Return the trace's clock in monotonic ns: the present for a live engine, the playhead for
        a replay."""

    async def run(self) -> None:
        """Pull events into the state until the stream ends. The app runs it as a worker and cancels
        it on exit."""


class EngineLog(Protocol):
    """Recent lines of the engine's own output, which must never be painted over the screen."""

    path: str

    @property
    def lines(self) -> Sequence[str]:
        """The latest lines, oldest first."""

    def add(self, line: str) -> None:
        """Append a line of our own."""


class Traffic(Protocol):
    """The load of a demonstration. `rate`: requests per second, unless `paused`."""

    rate: float
    paused: bool

    def faster(self) -> None:
        """Raise the arrival rate."""

    def slower(self) -> None:
        """Lower the arrival rate."""

    def burst(self) -> None:
        """Send a handful of requests at once."""

    def pause(self) -> None:
        """Stop or resume arrivals."""

    async def ask(self, prompt: str) -> str:
        """Send one prompt; the id under which its request will appear."""


class Tape(Protocol):
    """Records what is shown. Each action returns its outcome in one sentence."""

    @property
    def active(self) -> bool:
        """True while a file is written."""

    @property
    def flying(self) -> bool:
        """True while a flight recorder runs."""

    async def toggle(self) -> str:
        """Start or stop a recording."""

    def write_flight(self) -> str:
        """Save what the flight recorder holds."""


class Evidence(Protocol):
    """Keeps the events behind findings."""

    async def run(self) -> None:
        """Keep recent events. The app runs this as a worker and cancels it on exit."""

    async def write(self, rule: str, start: int, end: int | None) -> str:
        """Write a small recording around a finding of `rule` from `start` to `end` (ns; None: now);
        return the outcome in one sentence."""


LAG = 150 * NS_PER_MS
"""A publisher's drain and the bus's window for ordering sources."""
CHUNK = 2_000
"""Events applied before the screen gets a turn: some 10 ms. The snapshot that a late viewer gets
can be far longer."""


class Deliveries(Protocol):
    """A reader's deliveries, until every source has ended."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def aclose(self) -> None:
        """Unsubscribe."""


class Bus(Protocol):
    """Carries the events of engines; see `tracer.transport.bus`."""

    def subscribe(self) -> Deliveries:
        """Return all deliveries from now on."""


class LiveFeed:
    """Feeds a state from a bus: live engines."""

    def __init__(self, bus: Bus, state: TraceState | None = None) -> None:
        self.bus = bus
        self.state = state if state is not None else TraceState()
        self.status = "connecting…"

    def now(self) -> int:
        """Return the trace's clock in monotonic ns: the present for a live engine, the playhead for
        a replay."""
        return max(self.state.now, clock.now() - LAG)

    async def run(self) -> None:
        subscription = self.bus.subscribe()
        gone: set[str] = set()
        present: set[str] = set()
        try:
            async for delivery in subscription:
                if delivery.header is not None:
                    self.state.add_source(delivery.header)
                self.state.unknown += delivery.unknown
                present.add(delivery.source)
                gone.discard(delivery.source)
                if delivery.events and isinstance(delivery.events[-1], SourceGone):
                    gone.add(delivery.source)
                self.status = "ended" if present and gone == present else "● LIVE"
                for number, event in enumerate(delivery.events):
                    if number and number % CHUNK == 0:
                        await asyncio.sleep(0)
                    self.state.apply(delivery.source, event)
        finally:
            await subscription.aclose()
        self.status = "ended"

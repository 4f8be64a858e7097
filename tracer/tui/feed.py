"""What an app is fed with: the seams at which a live engine, a replayed file or a demonstration is
put in.

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
        """The trace's clock in monotonic ns: the present for a live engine, the playhead for a
        replay."""

    async def run(self) -> None:
        """Pull events into the state until the stream ends. The app runs it as a worker and cancels
        it on exit."""


class EngineLog(Protocol):
    """Recent lines of the engine's own output, which must never be painted over the screen."""

    path: str

    @property
    def lines(self) -> Sequence[str]:
        """The latest of them, oldest first."""

    def add(self, line: str) -> None:
        """Append a line of our own."""


class Traffic(Protocol):
    """The load of a demonstration. `rate`: requests per second."""

    rate: float

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
    """What can record what is shown. Each action gives what came of it, in one sentence."""

    @property
    def active(self) -> bool:
        """Whether a file is being written."""

    @property
    def flying(self) -> bool:
        """Whether a flight recorder runs beside."""

    async def toggle(self) -> str:
        """Start a recording, or end it."""

    def write_flight(self) -> str:
        """Have the flight recorder write what it holds."""


class Evidence(Protocol):
    """What can write down why something was found."""

    async def run(self) -> None:
        """Keep what may be asked for. The app runs it as a worker and cancels it on exit."""

    async def write(self, rule: str, start: int, end: int | None) -> str:
        """Write a small recording around a finding of `rule` that began at `start` and ended at
        `end` (ns; None: it goes on); what came of it, in one sentence."""


LAG = 150 * NS_PER_MS
"""A publisher's drain and the bus's window for putting sources in order."""
CHUNK = 2_000
"""Events applied before the screen gets a turn: some 10 ms. The snapshot that a late viewer gets
can be far longer."""


class Deliveries(Protocol):
    """What a reader of a bus gets, until every source has ended."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def aclose(self) -> None:
        """Get no more."""


class Bus(Protocol):
    """Carries what engines emit; `tracer.transport.bus` has the one in use."""

    def subscribe(self) -> Deliveries:
        """Everything from now on."""


class LiveFeed:
    """Feeds a state from a bus: engines of this host, as they run now."""

    def __init__(self, bus: Bus, state: TraceState | None = None) -> None:
        self.bus = bus
        self.state = state if state is not None else TraceState()
        self.status = "connecting…"

    def now(self) -> int:
        """The host's monotonic clock, which is that of its engines, less what an event takes to get
        here: a bar that ran ahead of the events would have to be taken back at its end."""
        return max(self.state.now, clock.now() - LAG)

    async def run(self) -> None:
        """Take deliveries until every source has ended."""
        subscription = self.bus.subscribe()
        gone: set[str] = set()
        present: set[str] = set()
        try:
            async for delivery in subscription:
                self.take(delivery)
                present.add(delivery.source)
                gone.discard(delivery.source)
                if delivery.events and isinstance(delivery.events[-1], SourceGone):
                    gone.add(delivery.source)
                self.status = "ended" if present and gone == present else "● LIVE"
                for begin in range(0, len(delivery.events), CHUNK):
                    for event in delivery.events[begin : begin + CHUNK]:
                        self.state.apply(delivery.source, event)
                    if begin + CHUNK < len(delivery.events):
                        await asyncio.sleep(0)
        finally:
            await subscription.aclose()
        self.status = "ended"

    def take(self, delivery: Delivery) -> None:
        """Make the source known and count what could not be understood."""
        if delivery.header is not None:
            self.state.add_source(delivery.header)
        self.state.unknown += delivery.unknown

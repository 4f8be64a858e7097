"""What an app is fed with: the seams at which a live engine, a replayed file or a demonstration is put in.

An app knows these protocols only, so that the same screens show any of them and tests inject their own clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol, runtime_checkable

from tracer import clock
from tracer.events import Event, Header
from tracer.state.trace_state import TraceState


class Feed(Protocol):
    """Where events come from and what time it is there.

    `state` is the fold that the screens read; `status` one or two words about the stream (``connecting…``,
    ``● LIVE``, ``ended``).
    """

    state: TraceState
    status: str

    def now(self) -> int:
        """The trace's clock in monotonic ns: the present for a live engine, the playhead for a replay."""

    async def run(self) -> None:
        """Pull events into the state until the stream ends. The app runs it as a worker and cancels it on exit."""


class EngineLog(Protocol):
    """Recent lines of the engine's own output, which must never be painted over the screen."""

    lines: Sequence[str]
    path: str


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


class _Delivery(Protocol):
    source: str
    header: Header | None
    events: Iterable[Event]


@runtime_checkable
class _Bus(Protocol):
    def subscribe(self) -> AsyncIterator[_Delivery]: ...

"""A feed over a timeline with a clock that stands still until a test moves it, and apps on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.tui.timeline import HEADER, SOURCE, Timeline
from tracer.events import Event
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.theme import DARK, UNICODE, Look


class FixedFeed:
    """Events up to an instant that only `advance` moves."""

    def __init__(self, events: Iterable[Event], at: int, *, status: str = "● LIVE", announce: bool = True) -> None:
        self.state = TraceState(keep_finished=10_000)
        if announce:
            self.state.add_source(HEADER)
        self.status = status
        self._events = iter(events)
        self._next: Event | None = next(self._events, None)
        self._at = 0
        self.advance(at)

    def now(self) -> int:
        """Where the clock stands."""
        return self._at

    def advance(self, to: int) -> None:
        """Move the clock to an instant, taking in what happened until then."""
        self._at = to
        while self._next is not None and self._next.t <= to:
            self.state.apply(SOURCE, self._next)
            self._next = next(self._events, None)

    async def run(self) -> None:
        """Nothing comes by itself."""
        await asyncio.Event().wait()


def app_at(timeline: Timeline, at: int, **options: object) -> TracerApp:
    """An app that shows a timeline at an instant, with a look that does not depend on the terminal of the test."""
    options.setdefault("look", Look(DARK, UNICODE))
    return TracerApp(FixedFeed(timeline.events, at), **options)  # type: ignore[arg-type]

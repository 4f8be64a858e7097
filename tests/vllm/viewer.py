"""A viewer of all traced processes of a folder, by the same path as the product: sources → bus →
state."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import Header
from tracer.state.request.request import Request
from tracer.state.trace_state import TraceState
from tracer.state.view import RequestView
from tracer.transport.bus import Bus
from tracer.transport.sources import DirectorySource

E = TypeVar("E", bound=events.Event)


class Viewer:
    """Follows a folder on a thread of its own. `told` holds (source, event) in the order in which
    they were folded."""

    def __init__(self, sockets: Path) -> None:
        self._sockets = sockets
        self.state = TraceState()
        self.headers: dict[str, Header] = {}
        self.told: list[tuple[str, events.Event]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Viewer:
        self._thread.start()
        assert self._ready.wait(20), "no traced process said anything"
        # every process is asked in turn, and its snapshot waits in the bus for the others
        time.sleep(0.6)
        self.told.clear()
        self._since = now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type so far."""
        return [event for _, event in self.told if isinstance(event, kind)]

    def settle(self) -> None:
        """Wait until every process has told what lies before this call (its heartbeat of afterwards
        is in), and nothing more comes but heartbeats. A process that has ended tells nothing more:
        ten seconds are enough then."""
        asked, deadline = now(), time.monotonic() + 10
        while time.monotonic() < deadline:
            beaten = {
                source
                for source, event in list(self.told)
                if isinstance(event, events.Heartbeat) and event.t > asked
            }
            if beaten >= set(self.headers):
                break
            time.sleep(0.1)
        count = -1
        while count != (
            count := sum(1 for _, event in self.told if not isinstance(event, events.Heartbeat))
        ):
            time.sleep(0.6)

    def request(self, rid: str) -> Request:
        """The request known to a client as `rid`."""
        found = self.state.requests.find(rid)
        assert found is not None, (rid, self.state.request_ids())
        return found

    def views(self) -> list[RequestView]:
        """What a screen shows of the requests that came since we look."""
        late = {
            request.id for request in self.state.requests.order if request.first_seen >= self._since
        }
        return [view for view in self.state.snapshot().requests if view.id in late]

    def roles(self) -> set[str]:
        """What the processes say they are."""
        return {header.role for header in self.headers.values()}

    def _run(self) -> None:
        self._task = self._loop.create_task(self._follow())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _follow(self) -> None:
        bus = Bus()
        bus.add(DirectorySource(self._sockets))
        async with contextlib.aclosing(bus.subscribe()) as deliveries:
            carrying = asyncio.create_task(bus.run())
            try:
                async for delivery in deliveries:
                    if delivery.header is not None:
                        self.headers[delivery.source] = delivery.header
                        self.state.add_source(delivery.header)
                    self.state.unknown += delivery.unknown
                    for event in delivery.events:
                        self.state.apply(delivery.source, event)
                        self.told.append((delivery.source, event))
                    self._ready.set()
            finally:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)

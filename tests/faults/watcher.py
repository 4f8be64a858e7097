"""A headless viewer that can be asked: ``python -m tests.faults.watcher FOLDER``.

It follows every traced process of a socket folder by the product's own path (sources, bus, state).
To each line on stdin it answers with one line of JSON: what it holds true, and its accounts of the
events of each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from engine_hooks.protocol import clock
from engine_hooks.protocol.events import Event, Gap, Heartbeat, SourceGone
from tracer.state.trace_state import TraceState
from tracer.transport.bus import Bus
from tracer.transport.sources import DirectorySource


class Accounts:
    """Events of one process: those that came and those known to be missing, and how many both were
    when the last heartbeat said how many were `emitted`."""

    def __init__(self) -> None:
        self.seen = 0
        self.missing = 0
        self.beat: tuple[int, int] | None = None

    def count(self, event: Event) -> None:
        """Take in one event of the stream."""
        match event:
            case SourceGone():
                return
            case Gap():
                self.missing += event.missing
                self.seen += event.missing
            case Heartbeat():
                self.seen += 1
                self.beat = event.emitted, self.seen
            case _:
                self.seen += 1


def told(state: TraceState, accounts: dict[str, Accounts]) -> dict[str, Any]:
    """What this viewer holds true now."""
    snapshot = state.snapshot(now=clock.now())
    losses = snapshot.losses
    return {
        "live": snapshot.live,
        "requests": {
            view.client_id or view.id: {
                "phase": str(view.phase),
                "tokens": view.output_tokens,
                "reason": view.finish_reason,
                "incomplete": view.incomplete,
                "closed": view.closed is not None,
                "error": view.error,
            }
            for view in snapshot.requests
        },
        "processes": {
            view.pid: {
                "role": view.role,
                "alive": view.alive,
                "status": view.status,
                "reason": view.reason,
            }
            for view in snapshot.engines
        },
        "unknown": losses.unknown,
        "lost": losses.events,
        "faults": list(losses.hook_faults),
        "accounts": {
            name: {"missing": one.missing, "beat": one.beat} for name, one in accounts.items()
        },
    }


async def main() -> None:
    """Follow until stdin ends."""
    state = TraceState(keep_finished=20_000)
    accounts: dict[str, Accounts] = {}
    bus = Bus()
    bus.add(DirectorySource(Path(sys.argv[1])))

    async def follow() -> None:
        async for delivery in bus.subscribe():
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            books = accounts.setdefault(delivery.source, Accounts())
            for event in delivery.events:
                state.apply(delivery.source, event)
                books.count(event)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    carrying = asyncio.create_task(bus.run())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.readline():
        print(json.dumps(told(state, accounts)), flush=True)
    for task in (following, carrying):
        task.cancel()
    await asyncio.gather(following, carrying, return_exceptions=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())

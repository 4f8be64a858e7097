"""Following a bus without a screen: what `show`, `--headless` and `doctor` see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Iterable

from engine_hooks.protocol.stream_decoder import Delivery
from tracer.state.trace_state import TraceState
from tracer.transport.bus import Bus


async def follow(bus: Bus, state: TraceState) -> None:
    """Run the bus and fold all that it carries into `state`, until every source has ended."""
    # before the bus runs: nothing is missed
    async with contextlib.aclosing(bus.subscribe()) as deliveries:
        carrying = asyncio.create_task(bus.run())
        try:
            async for delivery in deliveries:
                if delivery.header is not None:
                    state.add_source(delivery.header)
                state.unknown += delivery.unknown
                for event in delivery.events:
                    state.apply(delivery.source, event)
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)


async def watch_for(
    sources: Iterable[AsyncIterable[Delivery]], seconds: float, state: TraceState | None = None
) -> TraceState:
    """The state after following `sources` for so many seconds: what they told at once, and a little
    of what they do. `state` is one to begin with."""
    bus = Bus()
    for source in sources:
        bus.add(source)
    state = TraceState() if state is None else state
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await follow(bus, state)
    return state

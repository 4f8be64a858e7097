"""Following a bus without a screen: for `show`, `--headless` and `doctor`."""

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
                state.feed(delivery)
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)


async def watch_for(
    sources: Iterable[AsyncIterable[Delivery]], seconds: float | None, state: TraceState
) -> None:
    """Fold what `sources` send into `state` for so many seconds, None for ever."""
    bus = Bus()
    for source in sources:
        bus.add(source)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await follow(bus, state)

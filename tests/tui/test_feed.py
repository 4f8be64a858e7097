"""A live feed: what comes over the bus is in the state, and its words about the stream are true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import EngineStatus, SourceGone
from engine_hooks.protocol.stream_decoder import Delivery
from tests.tui.stage import app_on, flushed, text_of
from tests.tui.timeline import HEADER, SOURCE, Timeline
from tracer.transport.bus import Bus
from tracer.tui.feed import LAG, LiveFeed


async def deliveries(timeline: Timeline, *, end: bool) -> AsyncIterator[Delivery]:
    yield Delivery(SOURCE, HEADER)
    for begin in range(0, len(timeline.events), 500):
        yield Delivery(
            SOURCE, None, timeline.events[begin : begin + 500], unknown=1 if begin == 0 else 0
        )
    if end:
        yield Delivery(SOURCE, None, [SourceGone(timeline.end, "the process ended")])
    else:
        await asyncio.Event().wait()


async def test_everything_delivered_reaches_the_state() -> None:
    now = clock.now()
    timeline = Timeline(20, rate=8, start=now - 60 * NS_PER_S)
    bus = Bus()
    feed = LiveFeed(bus)
    assert feed.status == "connecting…"
    bus.add(deliveries(timeline, end=True))
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(0)
    await asyncio.wait_for(bus.run(), 20)
    await asyncio.wait_for(running, 20)
    assert feed.status == "ended"
    assert feed.state.received_total == 20
    assert feed.state.unknown == 1
    assert feed.state.snapshot().engines[0].name == "transformers"


async def test_it_is_live_while_a_source_speaks() -> None:
    now = clock.now()
    timeline = Timeline(5, rate=20, start=now - 60 * NS_PER_S)
    bus = Bus()
    feed = LiveFeed(bus)
    bus.add(deliveries(timeline, end=False))
    tasks = [asyncio.create_task(feed.run()), asyncio.create_task(bus.run())]
    for _ in range(3000):
        await asyncio.sleep(0.01)
        if feed.state.received_total == 5:
            break
    assert feed.state.received_total == 5
    assert feed.status == "● LIVE"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_its_clock_lags_by_what_events_take_and_never_behind_an_event() -> None:
    feed = LiveFeed(Bus())
    before = clock.now()
    assert feed.now() <= clock.now() - LAG
    assert feed.now() >= before - LAG
    feed.state.apply(SOURCE, EngineStatus(clock.now() + 500 * NS_PER_MS, "ready"))
    assert feed.now() == feed.state.now


async def test_a_feed_that_fails_is_told_and_the_screen_stays(busy: Timeline) -> None:
    class Broken(LiveFeed):
        async def run(self) -> None:
            raise OSError("the file [/red] is cut")

    app = app_on(Broken(Bus()))  # type: ignore[arg-type]
    async with app.run_test(size=(100, 30)) as pilot:
        await flushed(pilot)
        text = text_of(app)
        assert "reading the trace failed: the file [/red] is cut" in text
        assert "stopped" in text
        assert app.is_running

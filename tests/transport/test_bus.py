"""The bus: one stream in order of time, and a bounded queue for each reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import (
    SCHEMA_VERSION,
    Closed,
    Event,
    Gap,
    Header,
    Received,
    Sent,
    SourceGone,
)
from engine_hooks.protocol.stream_decoder import Delivery
from tests.effort import examples
from tracer.transport.bus import Bus, Subscription
from tracer.transport.sources import DirectorySource

from .processes import PATIENCE, Emitter, emitter


def header(source: str, boot_id: str | None = None) -> Header:
    """A header of this host, or of another one."""
    boot = clock.boot_id() if boot_id is None else boot_id
    return Header(SCHEMA_VERSION, source, 1, "engine", source, "host", boot, ClockAnchor.read())


def sent(t: int, key: int = 1) -> Sent:
    """A bulk event at `t`."""
    return Sent(t, key, 0, 0)


class Channel:
    """A source that says what it is told to, when it is told to."""

    def __init__(self, name: str, boot_id: str | None = None) -> None:
        self.name = name
        self._queue: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._queue.put_nowait(Delivery(name, header(name, boot_id)))

    def say(self, *events: Event, unknown: int = 0) -> None:
        """Deliver these."""
        self._queue.put_nowait(Delivery(self.name, None, list(events), unknown))

    def end(self, t: int) -> None:
        """End as sources do."""
        self.say(SourceGone(t, "over"))
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while (delivery := await self._queue.get()) is not None:
            yield delivery


async def collect(subscription: Subscription) -> list[Delivery]:
    """All that comes."""

    async def read() -> list[Delivery]:
        return [delivery async for delivery in subscription]

    return await asyncio.wait_for(read(), PATIENCE)


def times(got: Iterable[Delivery]) -> list[int]:
    """Stamps of the events, in the order told."""
    return [event.t for one in got for event in one.events if not isinstance(event, SourceGone)]


async def test_two_sources_are_merged_by_time_and_keep_their_names() -> None:
    bus = Bus(window=10 * NS_PER_S)
    subscription = bus.subscribe()
    one, two = Channel("one"), Channel("two")
    base = clock.now() - 10 * NS_PER_MS
    for channel, offsets in ((one, (1, 4, 5)), (two, (2, 3, 6))):
        channel.say(*(sent(base + offset) for offset in offsets))
        bus.add(channel)
    running = asyncio.create_task(bus.run())
    for _ in range(100):
        await asyncio.sleep(0)
    one.end(clock.now())
    two.end(clock.now())
    got = await collect(subscription)
    await running
    assert times(got) == [base + offset for offset in range(1, 7)]
    told = [(one.source, [event.t - base for event in one.events]) for one in got if times([one])]
    assert told == [("one", [1]), ("two", [2, 3]), ("one", [4, 5]), ("two", [6])]
    assert [one.header.source for one in got if one.header is not None] == ["one", "two"]
    assert [one.source for one in got if one.events and isinstance(one.events[-1], SourceGone)] == [
        "one",
        "two",
    ]


async def test_stamps_from_the_future_are_not_waited_for_nor_those_from_the_past() -> None:
    bus = Bus(window=50 * NS_PER_MS)
    subscription = bus.subscribe()
    honest, liar = Channel("honest"), Channel("liar")
    bus.add(honest)
    bus.add(liar)
    running = asyncio.create_task(bus.run())
    liar.say(sent(2**63 - 1), sent(0))
    await asyncio.sleep(0.2)
    base = clock.now()
    honest.say(sent(base), sent(base + 1))
    await asyncio.sleep(0.2)
    got: list[int] = []
    while len(got) < 4:
        got += times([await asyncio.wait_for(anext(subscription), PATIENCE)])
    assert got == [0, 2**63 - 1, base, base + 1]
    await bus.aclose()
    await running


async def test_a_stray_stamp_of_another_host_makes_it_forget_nobody() -> None:
    bus = Bus(window=50 * NS_PER_MS)
    bus.retain()
    subscription = bus.subscribe()
    near, far = Channel("near"), Channel("far", "another boot")
    bus.add(near)
    bus.add(far)
    running = asyncio.create_task(bus.run())
    away = 1800 * NS_PER_S  # so far ahead is the other clock
    began = clock.now()
    far.say(Received(began + away, 7, "lives"), Closed(began + away, 7), sent(2**62 - 1))
    await asyncio.sleep(0.05)
    far.say(sent(clock.now() + away, 2))
    await asyncio.sleep(0.2)
    # What was told first comes out first, though its stamp is the larger one.
    far.say(sent(clock.now() + away, 3))
    await asyncio.sleep(0.01)
    near.say(sent(clock.now(), 4))
    keys: list[int] = []
    while len(keys) < 6:
        delivery = await asyncio.wait_for(anext(subscription), PATIENCE)
        keys += [event.key for event in delivery.events]  # type: ignore[attr-defined]
    assert keys[-2:] == [3, 4]
    late = bus.subscribe(from_before=True)
    told: list[Event] = []
    for _ in range(2):
        told += (await asyncio.wait_for(anext(late), PATIENCE)).events
    assert [event.rid for event in told if type(event) is Received] == ["lives"]
    await bus.aclose()
    await running


async def test_one_source_alone_is_not_held_back() -> None:
    bus = Bus(window=3600 * NS_PER_S)
    subscription = bus.subscribe()
    only = Channel("only")
    bus.add(only)
    running = asyncio.create_task(bus.run())
    only.say(sent(clock.now()))
    first = await asyncio.wait_for(anext(subscription), PATIENCE)
    second = await asyncio.wait_for(anext(subscription), PATIENCE)
    assert first.header is not None and len(second.events) == 1
    await bus.aclose()
    await running


async def test_another_hosts_clock_is_laid_beside_ours() -> None:
    moment = [10 * NS_PER_S]
    bus = Bus(now=lambda: moment[0])
    subscription = bus.subscribe()
    here, there = Channel("here"), Channel("there", boot_id="elsewhere")
    bus.add(here)
    bus.add(there)
    running = asyncio.create_task(bus.run())
    for later, channel, stamp in (
        (0, there, 1_000),  # its clock has just started: 1,000 is about now
        (20 * NS_PER_MS, here, 10 * NS_PER_S + 20 * NS_PER_MS),
        (20 * NS_PER_MS, there, 1_000 + 40 * NS_PER_MS),
    ):
        moment[0] += later
        channel.say(sent(stamp))
        for _ in range(100):
            await asyncio.sleep(0)
    moment[0] += NS_PER_S
    got: list[str] = []
    while len(got) < 3:
        got += [
            one.source
            for one in [await asyncio.wait_for(anext(subscription), PATIENCE)]
            if one.events
        ]
    assert got == ["there", "here", "there"]
    await bus.aclose()
    await running


async def test_a_slow_subscriber_loses_the_oldest_and_is_told_and_others_lose_nothing() -> None:
    bus = Bus()
    slow, quick = bus.subscribe(room=10), bus.subscribe()
    only = Channel("only")
    bus.add(only)
    running = asyncio.create_task(bus.run())
    for t in range(100):
        only.say(sent(t))
    only.say(Gap(100, 1000, "earlier"))
    for t in range(101, 120):
        only.say(sent(t), unknown=1)
    only.end(clock.now())
    await running
    got_quick, got_slow = await collect(quick), await collect(slow)
    assert len(times(got_quick)) == 120 and quick.lost == 0
    events = [event for one in got_slow for event in one.events]
    gaps = [event for event in events if isinstance(event, Gap)]
    kept = [event.t for event in events if isinstance(event, Sent)]
    assert [gap.reason for gap in gaps] == ["this view fell behind"]
    assert gaps[0].missing == slow.lost + 1000
    assert slow.lost + len(kept) == 119 and kept == list(range(120 - len(kept), 120))
    assert events.index(gaps[0]) == 0 and isinstance(events[-1], SourceGone)
    assert got_slow[0].header is not None
    assert sum(one.unknown for one in got_slow) == sum(one.unknown for one in got_quick) == 19


async def test_the_end_of_a_source_reaches_even_the_slowest() -> None:
    bus = Bus()
    slow = bus.subscribe(room=5)
    one, two = Channel("one"), Channel("two")
    bus.add(one)
    one.say(sent(1))
    one.end(2)
    bus.add(two)
    for t in range(50):
        two.say(sent(t))
    two.end(60)
    await bus.run()
    got = await collect(slow)
    ended = {one.source for one in got for event in one.events if isinstance(event, SourceGone)}
    assert ended == {"one", "two"}
    assert {one.source for one in got if one.header is not None} == {"one", "two"}


async def test_a_late_subscriber_knows_the_sources() -> None:
    bus = Bus()
    only = Channel("only")
    bus.add(only)
    running = asyncio.create_task(bus.run())
    await asyncio.sleep(0.05)
    late = bus.subscribe()
    only.say(sent(5))
    only.end(6)
    got = await collect(late)
    assert got[0].header is not None and got[0].source == "only"
    assert times(got) == [5]
    await running
    assert await collect(bus.subscribe()) == []


async def test_a_source_that_breaks_ends_in_a_sentence_and_the_others_go_on() -> None:
    async def broken() -> AsyncIterator[Delivery]:
        yield Delivery("broken", header("broken"), [sent(1)])
        raise RuntimeError("a defect")

    bus = Bus()
    subscription = bus.subscribe()
    other = Channel("other")
    bus.add(broken())
    bus.add(other)
    running = asyncio.create_task(bus.run())
    await asyncio.sleep(0.05)
    other.say(sent(2))
    other.end(clock.now())
    got = await collect(subscription)
    await running
    reasons = {
        one.source: event.reason
        for one in got
        for event in one.events
        if isinstance(event, SourceGone)
    }
    assert reasons == {"broken": "reading it failed: a defect", "other": "over"}
    assert times(got) == [1, 2]


async def test_closing_hands_out_what_was_held_back_and_ends_subscriptions() -> None:
    bus = Bus(window=3600 * NS_PER_S)
    subscription = bus.subscribe()
    one, two = Channel("one"), Channel("two")
    bus.add(one)
    bus.add(two)
    running = asyncio.create_task(bus.run())
    await asyncio.sleep(0.02)
    one.say(sent(clock.now()))
    await asyncio.sleep(0.05)
    await bus.aclose()
    await running
    assert len(times(await collect(subscription))) == 1


async def test_a_subscriber_may_leave() -> None:
    bus = Bus()
    leaving, staying = bus.subscribe(), bus.subscribe()
    only = Channel("only")
    bus.add(only)
    await leaving.aclose()
    only.say(sent(1))
    only.end(2)
    await bus.run()
    assert await collect(leaving) == []
    assert times(await collect(staying)) == [1]


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2**63 - 1), max_size=5)), max_size=30
    ),
    st.integers(1, 30),
)
def test_nothing_is_lost_or_told_twice_and_losses_are_told(
    history: list[tuple[int, list[int]]], room: int
) -> None:
    async def scenario() -> None:
        bus = Bus(window=NS_PER_MS)
        full, small = bus.subscribe(), bus.subscribe(room)
        channels = [Channel(name) for name in ("a", "b", "c")]
        for channel in channels:
            bus.add(channel)
        expected: list[tuple[str, int]] = []
        for number, stamps in history:
            channels[number].say(*map(sent, stamps))
            expected += [(channels[number].name, t) for t in stamps]
        for channel in channels:
            channel.end(clock.now())
        await asyncio.wait_for(bus.run(), PATIENCE)
        got = await collect(full)
        assert sorted((one.source, t) for one in got for t in times([one])) == sorted(expected)
        for name in ("a", "b", "c"):
            assert isinstance(
                [event for one in got if one.source == name for event in one.events][-1], SourceGone
            )
        rest = await collect(small)
        told = sum(isinstance(event, Sent) for one in rest for event in one.events)
        gaps = sum(event.missing for one in rest for event in one.events if isinstance(event, Gap))
        assert told + gaps == len(expected) and gaps == small.lost

    asyncio.run(scenario())


async def test_processes_of_a_directory_arrive_merged(directory: Path) -> None:
    with emitter(directory) as first:
        second = await asyncio.to_thread(Emitter, directory)
        bus = Bus(window=10 * NS_PER_S)
        subscription = bus.subscribe()
        bus.add(DirectorySource(directory, poll_s=0.05))
        running = asyncio.create_task(bus.run())
        got: list[Delivery] = []

        async def read() -> None:
            async for delivery in subscription:
                got.append(delivery)  # noqa: PERF401 (looked at meanwhile)

        reading = asyncio.create_task(read())
        while sum(one.header is not None for one in got) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        for process in (first, second):
            await asyncio.to_thread(process.ask, "sent", 500)
        await asyncio.to_thread(second.close)
        await asyncio.to_thread(first.close)
        while sum(isinstance(event, SourceGone) for one in got for event in one.events) < 2:
            await asyncio.sleep(0.01)
        await bus.aclose()
        await running
        await reading
    bulk = [(one.source, event) for one in got for event in one.events if isinstance(event, Sent)]
    assert len(bulk) == 1000
    assert [event.t for _, event in bulk] == sorted(event.t for _, event in bulk)
    assert {source for source, _ in bulk} == {first.source, second.source}


async def test_a_late_reader_is_told_what_is_still_true_and_everything_from_then_on() -> None:
    """Nothing twice and nothing left out between the two: what is retained stands before what
    comes."""
    bus = Bus(window=0)
    bus.retain()
    early = bus.subscribe()
    channel = Channel("one")
    bus.add(channel)
    running = asyncio.create_task(bus.run())
    t = clock.now() - 10 * NS_PER_S
    channel.say(Received(t, 1, "over"), Closed(t + 1, 1))
    channel.say(Received(t + 8 * NS_PER_S, 2, "runs"), sent(t + 9 * NS_PER_S, 2))
    heard = 0
    while heard < 4:
        heard += len((await anext(early)).events)
    late, plain = bus.subscribe(from_before=True), bus.subscribe()
    channel.say(sent(t + 10 * NS_PER_S, 2))
    channel.end(t + 10 * NS_PER_S)
    told = [event for delivery in await collect(late) for event in delivery.events]
    assert [(type(event), event.t - t) for event in told[:-1]] == [
        (Received, 8 * NS_PER_S), (Sent, 9 * NS_PER_S), (Sent, 10 * NS_PER_S)
    ]  # fmt: skip
    assert times(await collect(plain)) == [t + 10 * NS_PER_S]
    await running

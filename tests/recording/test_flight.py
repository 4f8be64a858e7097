"""The flight recorder: what was before something happened is in the file, and a while of what came
after."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol import clock as real_clock
from engine_hooks.protocol.events import (
    Engine,
    EngineStatus,
    Event,
    Finished,
    Gap,
    Heartbeat,
    Output,
    Preempted,
    Prompt,
    Queued,
    Received,
    Roster,
    Scheduled,
    Sent,
    SourceGone,
    Step,
    pack_u32,
)
from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import MS, Clock, S, fold
from tests.state.traces import header
from tracer.recording.flight import MOST_FILES, FlightRecorder
from tracer.recording.trace_file import TraceFile
from tracer.recording.triggers import RuleError, parse
from tracer.replay.cursor import load
from tracer.transport.bus import Bus


class Engine1:
    """An engine that decodes one request for ever and starts a short one each second."""

    def __init__(self, flight: FlightRecorder, clock: Clock) -> None:
        self.flight, self.clock = flight, clock
        self.told: list[Delivery] = []
        self.n = 0
        self.say(
            Engine(clock.t, "toy", num_blocks=100),
            Received(clock.t, 1, "r1"),
            Queued(clock.t, 1, "r1", 10, 9_999),
            Prompt(clock.t, 1, "secret", 6, b"", 10),
            Scheduled(clock.t + 10, 1, clock.t + 5),
        )

    def say(self, *events: Event) -> None:
        delivery = Delivery("engine", header("engine") if not self.told else None, list(events))
        self.told.append(delivery)
        self.flight.feed(delivery)

    def run(self, seconds: int) -> None:
        """Live for a while; each second the recorder gets its tick."""
        for _ in range(seconds):
            for _ in range(4):
                joined = b"" if self.n else pack_u32([1])
                self.say(
                    Step(
                        self.clock.t,
                        self.n,
                        token=9 * MS,
                        end=10 * MS,
                        batch=1,
                        joined=joined,
                        used=40,
                        waiting=0,
                        running=1,
                    )
                )
                self.n += 1
                self.clock.t += S // 4
            t, n = self.clock.t, self.n
            self.say(Heartbeat(t), Output(t, 1, n, "words"), Sent(t, 1, n, n),
                     Roster(t, n - 1, pack_u32([1, 10 + n, n, 4, 10, 1])))  # fmt: skip
            self.flight.tick()


@pytest.fixture
def flown(tmp_path: Path) -> Iterator[tuple[FlightRecorder, Engine1, list[tuple[Path, str]]]]:
    """A flight recorder of one minute in which an engine has run for three."""
    clock, written = Clock(1_000 * S), list[tuple[Path, str]]()
    flight = FlightRecorder(tmp_path, 1.0, [parse("preemption")], now=clock, after_s=5,
                            on_written=lambda path, why: written.append((path, why)))  # fmt: skip
    engine = Engine1(flight, clock)
    engine.run(180)
    yield flight, engine, written
    flight.close()


def events_of(trace: TraceFile) -> list[Event]:
    return [event for delivery in trace.deliveries() for event in delivery.events]


def test_nothing_is_written_while_nothing_happens_and_only_the_last_minutes_are_kept(
    flown, tmp_path
) -> None:
    flight, _, written = flown
    assert (
        list(tmp_path.iterdir()) == []
        and written == []
        and flight.files == []
        and flight.error == ""
    )
    assert 0 < flight.size < 100_000
    flight.trigger("asked")
    flight.close()
    with TraceFile(flight.files[0]) as trace:
        assert 60 <= (trace.end - trace.begin) / S <= 72


def test_what_was_before_and_what_came_after_are_in_the_file(flown) -> None:
    flight, engine, written = flown
    happened = engine.clock.t
    engine.say(Preempted(happened, 1, "recompute", 100, engine.n, 1))
    engine.run(20)
    assert [why for _, why in written] == ["engine engine preempted a request (1 in all)"]
    (path,) = flight.files
    assert path == written[0][0] and path.name.startswith("flight-") and path.suffix == ".trace"
    with TraceFile(path) as trace:
        assert trace.problems == [] and not trace.with_text
        assert trace.end - happened >= 5 * S and trace.end - happened <= 8 * S
        (mark,) = trace.marks()
        assert happened <= mark.t <= happened + 2 * S and mark.text == written[0][1]
        kinds = [type(event) for event in events_of(trace)]
        assert Gap not in kinds and Output not in kinds
        after = [event for event in events_of(trace) if trace.begin < event.t < trace.end]
        told = [event for delivery in engine.told for event in delivery.events
                if trace.begin < event.t < trace.end and type(event) is not Output]  # fmt: skip
        assert after == told


def test_the_begin_of_the_file_tells_what_was_known_then(flown) -> None:
    """As to a viewer that attached at that moment: the request that began two minutes before is
    whole."""
    flight, engine, _ = flown
    flight.trigger("asked")
    engine.run(10)
    state = load(flight.files[0])
    live = fold(engine.told)
    view, whole = state.snapshot().requests[0], live.snapshot().requests[0]
    assert (view.id, view.received, view.prompt_tokens, view.queue_ms) == (
        "r1",
        whole.received,
        10,
        whole.queue_ms,
    )
    assert (
        state.sources["engine"].missing == 0
        and state.sources["engine"].header == live.sources["engine"].header
    )
    assert state.sources["engine"].engine == live.sources["engine"].engine
    with TraceFile(flight.files[0]) as trace:
        assert trace.begin > whole.received + 100 * S


def test_it_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    clock = Clock(1_000 * S)
    flight = FlightRecorder(tmp_path, 60.0, now=clock, max_bytes=20_000)
    engine = Engine1(flight, clock)
    engine.run(600)
    assert flight.size <= 22_000
    flight.trigger("asked")
    flight.close()
    with TraceFile(flight.files[0]) as trace:
        assert 10 < (trace.end - trace.begin) / S < 300
        assert Gap not in [type(event) for event in events_of(trace)]


@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize("stamp", [0, 1_790_000_000 * S, (1 << 62) - 1, 1_000 * S + 5 * 3_600 * S])
def test_a_stray_stamp_makes_it_forget_nothing(tmp_path: Path, stamp: int, rules: bool) -> None:
    """The last minute is the last minute, and those who ended before are told for as long as they
    were."""
    files = []
    for strays in (0, 1):
        clock = Clock(1_000 * S)
        flight = FlightRecorder(tmp_path, 1.0, [parse("preemption")] if rules else [], now=clock)
        engine = Engine1(flight, clock)
        engine.run(90)
        for _ in range(strays):
            engine.say(Heartbeat(stamp), Received(stamp, 99, "odd"))
        engine.run(30)
        flight.trigger("asked")
        flight.close()
        files.append(flight.files[0])
    with TraceFile(files[0]) as clean, TraceFile(files[1]) as odd:
        assert (odd.begin, odd.end) == (clean.begin, clean.end)
        assert len(events_of(odd)) == len(events_of(clean)) + 2
    assert load(files[1]).set_aside() == 2


def test_what_happens_while_a_file_is_written_makes_it_longer_and_is_marked_too(flown) -> None:
    flight, engine, written = flown
    engine.say(Preempted(engine.clock.t, 1, "recompute", 100, engine.n, 1))
    engine.run(4)
    engine.say(Preempted(engine.clock.t, 1, "recompute", 100, engine.n, 2))
    engine.run(4)
    assert written == []
    engine.run(4)
    assert len(written) == 1
    with TraceFile(flight.files[0]) as trace:
        assert len(trace.marks()) == 2
    engine.say(Preempted(engine.clock.t, 1, "recompute", 100, engine.n, 3))
    engine.run(8)
    assert len(written) == len(set(flight.files)) == 2


def test_a_rule_that_flaps_does_not_fill_the_disk(tmp_path: Path) -> None:
    clock = Clock(1_000 * S)
    flight = FlightRecorder(tmp_path, 0.2, [parse("preemption")], now=clock, after_s=1)
    engine = Engine1(flight, clock)
    for count in range(MOST_FILES + 10):
        engine.say(Preempted(clock.t, 1, "recompute", 1, 1, count + 1))
        engine.run(3)
    assert len(flight.files) == MOST_FILES
    flight.trigger("asked")
    flight.close()
    assert len(flight.files) == MOST_FILES + 1 == len(list(tmp_path.iterdir()))


def test_a_folder_that_cannot_be_written_to_is_said_and_recording_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    clock = Clock(1_000 * S)
    flight = FlightRecorder(tmp_path / "none" / "f.trace", now=clock, on_error=said.append)
    engine = Engine1(flight, clock)
    engine.run(3)
    flight.trigger("asked")
    engine.run(2)
    assert len(said) == 1 and "cannot record to" in said[0] and "\n" not in said[0]
    flight.path = tmp_path / "f.trace"
    flight.trigger("again")
    engine.run(2)
    flight.close()
    assert flight.files[-1].name.startswith("f-") and load(flight.files[-1]).snapshot().total == 1


def test_with_text_it_is_in_the_file(tmp_path: Path) -> None:
    clock = Clock(1_000 * S)
    flight = FlightRecorder(tmp_path, now=clock, with_text=True)
    engine = Engine1(flight, clock)
    engine.run(90)
    flight.trigger("asked")
    flight.close()
    detail = load(flight.files[0]).detail("r1")
    assert (
        detail is not None
        and detail.prompt_text == "secret"
        and "words" in (detail.output_text or "")
    )


async def test_a_bus_is_followed_and_a_signal_writes(tmp_path: Path) -> None:
    bus = Bus()
    flight = FlightRecorder(tmp_path, after_s=0)
    subscription = bus.subscribe()
    flight.watch_signal()
    running = asyncio.create_task(flight.run(subscription))
    subscription.append(Delivery("engine", header("engine"), [Received(real_clock.now(), 1, "r1")]))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(300):
        await asyncio.sleep(0.02)
        if flight.files:
            break
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (path,) = flight.files
    with TraceFile(path) as trace:
        assert trace.problems == [] and [mark.text for mark in trace.marks()] == ["SIGUSR1"]


# --- rules ----------------------------------------------------------------------------------------


def fires(text: str, *events: Event, at: int | None = None) -> str:
    """What a rule says after these events."""
    told: list[Event] = [Engine(S, "toy", num_blocks=100), *events]
    state = fold([Delivery("engine", header("engine"), told)])
    return parse(text, lambda state: ["the queue is too long"]).fires(
        state, state.snapshot(now=at, limit=0)
    )


def served(ttft_s: float, count: int = 6) -> list[Event]:
    """Requests whose first token was handed out after `ttft_s`."""
    events: list[Event] = []
    for key in range(1, count + 1):
        begin, token = key * S, key * S + int(ttft_s * S)
        events += [
            Received(begin, key, f"r{key}", offline=True), Queued(begin, key, f"r{key}", 4),
            Scheduled(begin + 2, key, begin + 1),
            Step(begin + 3, key, token=token - begin - 3, batch=1, joined=pack_u32([key]),
                 left=pack_u32([key - 1]) if key > 1 else b"", odd=pack_u32([key, 4, 1])),
            Finished(token, key, "stop", 1),
        ]  # fmt: skip
    return events


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ttft_p95>2s", "ttft p95 2.49 s, rule ttft_p95>2s"),
        ("ttft>2000ms", "ttft p95 2.49 s, rule ttft>2000ms"),
        (" TTFT_P50 >= 2.4 s ", "ttft p50 2.49 s"),
        ("ttft_p95@10s>2s", "ttft p95 2.49 s"),
        ("ttft_p95<3s", "ttft p95 2.49 s"),
        ("ttft_p95>2.6s", ""),
        ("queue_p95>1us", ""),
        ("queue_p95<=1us", "queue p95"),
        ("finding", "the queue is too long"),
        ("failed", ""),
        ("stall", ""),
        ("dead", ""),
        ("gap", ""),
    ],
)
def test_rules_hold_when_they_should(text: str, reason: str) -> None:
    said = fires(text, *served(2.5))
    assert said.startswith(reason) and bool(said) == bool(reason)


def test_too_few_samples_fire_nothing() -> None:
    assert fires("ttft_p95>2s", *served(2.5, count=4)) == ""


@pytest.mark.parametrize(
    ("text", "events", "reason"),
    [
        ("waiting>3", [Step(S, 0, waiting=4, running=1)], "waiting 4, rule waiting>3"),
        ("waiting>4", [Step(S, 0, waiting=4, running=1)], ""),
        ("kv>=95%", [Step(S, 0, used=95)], "kv 95 %, rule kv>=95%"),
        ("kv>0.5", [Step(S, 0, used=95)], "kv 95 %"),
        ("kv>95%", [Step(S, 0, used=95)], ""),
        ("live>1", [Received(S, 1, "a"), Received(S, 2, "b")], "live 2"),
        (
            "dead",
            [EngineStatus(S, "dead", "out of memory")],
            "engine engine is dead: out of memory",
        ),
        ("dead", [SourceGone(S, "process 7 ended")], "engine engine is dead: process 7 ended"),
        ("dead", [EngineStatus(S, "stopped"), SourceGone(S, "process 7 ended")], ""),
        ("gap", [Gap(S, 12)], "12 events were lost"),
        (
            "preemption",
            [Queued(S, 1, "a"), Preempted(S, 1, "offload", total=2)],
            "engine engine preempted a request",
        ),
        (
            "failed",
            [Queued(S, 1, "a"), Finished(S, 1, "failed", 0, "too long"), SourceGone(S)],
            "a failed: too long",
        ),
    ],
)
def test_gauges_and_words(text: str, events: list[Event], reason: str) -> None:
    said = fires(text, *events)
    assert said.startswith(reason) and bool(said) == bool(reason)


def test_a_stall_is_seen() -> None:
    events = [Received(S, 1, "a"), Queued(S, 1, "a"), Heartbeat(9 * S)]
    assert "admission blocked" in fires("stall", *events, at=9 * S)
    assert fires("stall", *events, at=2 * S) == ""


def test_a_rule_fires_once_until_it_has_ceased_to_hold() -> None:
    rule = parse("waiting>3")
    said = []
    for waiting in (1, 5, 6, 5, 2, 7, 1):
        state = fold(
            [
                Delivery(
                    "engine",
                    header("engine"),
                    [Engine(S, "toy"), Step(S, 0, waiting=waiting, running=0)],
                )
            ]
        )
        said.append(bool(rule.fires(state, state.snapshot(limit=0))))
    assert said == [False, True, False, False, False, True, False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no rule"),
        ("ttft", "is no rule"),
        ("ttft>fast", "is no rule"),
        ("speed>3", "no such figure as speed"),
        ("ttft>3", "in ms or s"),
        ("ttft>3%", "in ms or s"),
        ("waiting>3s", "not measured in s"),
        ("kv_p95>3", "has no percentiles"),
        ("ttft@1.2.3>2s", "is no window"),
        ("ttft_p99.9>1s", "is no rule"),
        ("finding", "no diagnosis"),
        ("\x1b[2J", "is no rule"),
        ("x" * 10_000, "is no rule"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_sentence(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=why) as refused:
        parse(text)
    assert "\n" not in str(refused.value)

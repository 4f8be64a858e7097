"""Device times, with a double for CUDA events: a clock that runs on its own and a stream that is late."""

from __future__ import annotations

from engine_hooks.devices import DeviceTimer, EventPool
from tracer import events
from tracer.clock import NS_PER_MS


class StreamClock:
    """A device stream: `at` is its time in ms; work moves it on."""

    def __init__(self) -> None:
        self.at = 0.0
        self.complete = True
        self.made = 0

    def event(self) -> StreamEvent:
        self.made += 1
        return StreamEvent(self)


class StreamEvent:
    """Behaves as torch.cuda.Event(enable_timing=True) does."""

    def __init__(self, clock: StreamClock) -> None:
        self.clock = clock
        self.at: float | None = None

    def record(self, stream: object = None) -> None:
        self.at = self.clock.at

    def query(self) -> bool:
        return self.clock.complete

    def elapsed_time(self, end: StreamEvent) -> float:
        assert self.at is not None and end.at is not None
        return end.at - self.at


def mark_step(timer: DeviceTimer, clock: StreamClock, parts: dict[str, float]) -> None:
    timer.mark("start")
    for part, milliseconds in parts.items():
        clock.at += milliseconds
        timer.mark(part)
    timer.mark("finish")


def step(t: int, launched: float, sampled: float, token: float) -> events.Step:
    return events.Step(
        t, 1, launched=int(launched * NS_PER_MS), sampled=int(sampled * NS_PER_MS), token=int(token * NS_PER_MS)
    )


def test_parts_lie_between_launch_and_token_with_the_devices_lengths() -> None:
    clock = StreamClock()
    timer = DeviceTimer(EventPool(clock.event), None)
    mark_step(timer, clock, {"embed": 0.0, "layers": 0.5, "head": 20.0, "logits": 2.0, "sampled": 1.0})
    told = step(0, launched=1.0, sampled=3.0, token=25.0)
    end = timer.fill(told, 0)
    assert told.timing == events.Timing.DEVICE
    assert [told.layers - told.embed, told.head - told.layers, told.logits - told.head] == [
        500_000, 20 * NS_PER_MS, 2 * NS_PER_MS,
    ]  # fmt: skip
    assert told.embed == 1 * NS_PER_MS
    assert told.sampled <= told.token
    assert told.wait == 22 * NS_PER_MS
    assert end == told.sampled


def test_a_span_that_would_end_after_the_tokens_is_moved_back() -> None:
    clock = StreamClock()
    timer = DeviceTimer(EventPool(clock.event), None)
    mark_step(timer, clock, {"embed": 0.0, "sampled": 10.0})
    told = step(0, launched=5.0, sampled=6.0, token=12.0)
    timer.fill(told, 0)
    assert told.embed == 2 * NS_PER_MS
    assert told.sampled == 12 * NS_PER_MS


def test_a_stream_runs_in_order_so_a_step_begins_after_the_one_before() -> None:
    clock = StreamClock()
    timer = DeviceTimer(EventPool(clock.event), None)
    mark_step(timer, clock, {"embed": 0.0, "sampled": 4.0})
    told = step(0, launched=1.0, sampled=1.5, token=20.0)
    timer.fill(told, previous_end=9 * NS_PER_MS)
    assert told.embed == 9 * NS_PER_MS
    assert told.sampled == 13 * NS_PER_MS


def test_what_is_not_complete_is_not_waited_for() -> None:
    clock = StreamClock()
    timer = DeviceTimer(EventPool(clock.event), None)
    mark_step(timer, clock, {"embed": 0.0, "sampled": 4.0})
    clock.complete = False
    told = step(0, launched=1.0, sampled=1.5, token=20.0)
    assert timer.fill(told, 77) == 77
    assert told.timing == events.Timing.LAUNCH
    assert told.sampled == int(1.5 * NS_PER_MS)


def test_events_are_reused() -> None:
    clock = StreamClock()
    pool = EventPool(clock.event)
    for _ in range(50):
        timer = DeviceTimer(pool, None)
        mark_step(timer, clock, {"embed": 0.1, "layers": 0.1, "head": 1.0, "logits": 0.2, "sampled": 0.1})
        timer.fill(step(0, 0.1, 0.2, 5.0), 0)
    assert clock.made == 7

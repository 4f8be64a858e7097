"""Device times: CUDA events around the parts of a step, laid beside the host's clock, without
waiting for the device.

Events are recorded on the engine's compute stream, where they cost a microsecond, and read when the
engine itself has already waited for the step's tokens. An event that is not complete by then is not
waited for: the step keeps its launch times and says so. Not yet run on a GPU;
`tests/gpu/device_times.py` does it where there is one.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, now

PARTS: Final = ("start", "embed", "layers", "head", "logits", "sampled", "finish")
"""Marks of one step, in order. `start` and `finish` enclose the launch; the others are those of
`events.Step`."""

WINDOW: Final = 32
"""Steps whose bounds tie the two clocks together. The quickest of so many wake-ups of the host is
within 0.1 ms."""

WINDOW_NS: Final = 2 * NS_PER_S
"""Older bounds are not used: the clocks of host and device drift apart by up to 0.1 ms a second."""

AT_ONCE_NS: Final = NS_PER_MS // 5
"""A device that reaches a mark this soon after it was recorded had nothing else to do."""


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class EventPool:
    """Reuses timing events that `make` returns: making one costs more than recording it."""

    def __init__(self, make: Callable[[], DeviceEvent]) -> None:
        self._make = make
        self._free: list[DeviceEvent] = []

    def acquire(self) -> DeviceEvent:
        return self._free.pop() if self._free else self._make()

    def release(self, used: list[DeviceEvent]) -> None:
        """Return events to the pool; they must not be read any more."""
        self._free += used


@functools.cache
def cuda_event_pool() -> EventPool | None:
    """Return a pool of `torch.cuda.Event(enable_timing=True)`; None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    return EventPool(lambda: torch.cuda.Event(enable_timing=True))


class DeviceTimer:
    """Marks of one step on the compute stream. Made by `DeviceClock.timer`."""

    def __init__(self, pool: EventPool, stream: Any) -> None:
        self._pool = pool
        self._stream = stream
        self.marks: dict[str, DeviceEvent] = {}
        self.starved = False
        """True when the device reached `start` as soon as it was recorded (within `AT_ONCE_NS`)."""
        self.waited = False
        """True when the host started to wait for the step before the device was through with it."""
        self.over = 0
        """When a host that had nothing to wait for saw that the device was through with it (ns),
        else 0."""
        self._recorded = 0

    def mark(self, part: str) -> None:
        """Record `part` (one of `PARTS`) on the stream; the last one counts."""
        start = self.marks.get("start")
        if start is None:
            self._recorded = now()
        elif not self.starved and now() - self._recorded < AT_ONCE_NS:
            self.starved = start.query()
        event = self.marks.get(part) or self._pool.acquire()
        event.record(self._stream)
        self.marks[part] = event

    def wait_begins(self) -> None:
        finish = self.marks.get("finish")
        if finish is not None:
            self.waited = not finish.query()
            self.over = 0 if self.waited else now()


class DeviceClock:
    """Lays the marks of a stream's steps beside the host's clock.

    The two clocks have no common zero. Each step bounds the distance between them: the device
    cannot reach `start` before the host has recorded it, and is past `finish` when the host has the
    tokens. The first bound is sharp when the device had nothing to do at the launch, the second
    when the host had to wait for the tokens; where neither was, the middle is taken. Between two
    steps the device's own clock is read, so that what runs there (input kernels, a drafter, copies)
    is neither lost nor taken for a part of a step.
    """

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self._last: DeviceEvent | None = None
        """`finish` of the step that was placed last."""
        self._last_at = 0
        """Its time by the device's clock, in ns since an arbitrary zero."""
        self._bounds: deque[tuple[int, int, int, bool, bool]] = deque(maxlen=WINDOW)
        """Of recent steps: when its tokens were seen; least and greatest distance of the clocks;
        whether each is sharp. All in ns."""

    def timer(self, stream: Any) -> DeviceTimer:
        return DeviceTimer(self._pool, stream)

    def fill(self, timer: DeviceTimer, step: events.Step) -> None:
        """Write the device times of `timer`'s marks into `step`, which is the stream's next one;
        its events are free afterwards. Where they are not complete, the step says that it has
        launch times only."""
        marks, timer.marks = timer.marks, {}
        start, finish = marks.get("start"), marks.get("finish")
        if start is None or finish is None or not finish.query():
            step.timing = events.Timing.LAUNCH
            self._pool.release(list(marks.values()))
            return
        started = 0 if self._last is None else self._last_at + _ns(self._last.elapsed_time(start))
        after = {part: _ns(start.elapsed_time(event)) for part, event in marks.items()}
        length = after["finish"]
        launched = step.t + max(step.launched, 0)
        token = step.t + step.token if step.token >= 0 else launched + length
        over = timer.over or token
        self._bounds.append(
            (token, launched - started, over - length - started, timer.starved, timer.waited)
        )
        at = max(started + self._distance(token), step.t) - step.t
        if step.wait < 0 and 0 <= step.sampled <= step.token:
            step.wait = step.token - step.sampled
        for part in ("embed", "layers", "head", "logits"):
            setattr(step, part, at + after[part] if part in after else -1)
        step.sampled = at + after.get("sampled", length)
        step.timing = events.Timing.DEVICE
        if self._last is not None:
            self._pool.release([self._last])
        self._last, self._last_at = marks.pop("finish"), started + length
        self._pool.release(list(marks.values()))

    def _distance(self, at: int) -> int:
        """Host's time less device's (ns), by the bounds that are recent at `at`."""
        bounds = self._bounds
        while bounds[0][0] < at - WINDOW_NS:
            bounds.popleft()
        least, greatest = max(bound[1] for bound in bounds), min(bound[2] for bound in bounds)
        if any(bound[3] for bound in bounds):
            return min(least, greatest)
        if any(bound[4] for bound in bounds):
            return greatest
        return (least + greatest) // 2


def _ns(milliseconds: float) -> int:
    return round(milliseconds * NS_PER_MS)

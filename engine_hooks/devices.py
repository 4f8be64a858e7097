"""Device clocks: CUDA events around the parts of a step, without ever waiting for the device.

Events are recorded on the engine's compute stream, where they cost a microsecond, and read when the engine itself has
already waited for the step's tokens. An event that is not complete by then is not waited for: the step keeps its launch
times and says so. Not yet run on a GPU; `tests/gpu/device_times.py` does it where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from tracer import events
from tracer.clock import NS_PER_MS

PARTS: Final = ("start", "embed", "layers", "head", "logits", "sampled", "finish")
"""Marks of one step, in order. `start` and `finish` enclose the launch; the others are those of `events.Step`."""


class DeviceEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class EventPool:
    """Reuses device events: making one costs more than recording it. `make` returns a timing event."""

    def __init__(self, make: Callable[[], DeviceEvent]) -> None:
        self._make = make
        self._free: list[DeviceEvent] = []

    def take(self) -> DeviceEvent:
        """A free event, or a new one."""
        return self._free.pop() if self._free else self._make()

    def give(self, used: list[DeviceEvent]) -> None:
        """Take events back; they must not be read any more."""
        self._free += used


def cuda_event_pool() -> EventPool | None:
    """A pool of `torch.cuda.Event(enable_timing=True)`; None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    return EventPool(lambda: torch.cuda.Event(enable_timing=True))


class DeviceTimer:
    """Marks of one step on the compute stream."""

    def __init__(self, pool: EventPool, stream: Any) -> None:
        self._pool = pool
        self._stream = stream
        self.marks: dict[str, DeviceEvent] = {}

    def mark(self, part: str) -> None:
        """Record `part` (one of `PARTS`) on the stream; the last one counts when a part comes twice."""
        event = self.marks.get(part) or self._pool.take()
        event.record(self._stream)
        self.marks[part] = event

    def fill(self, step: events.Step, previous_end: int) -> int:
        """Put device times into `step` and return the device's end of it in monotonic ns.

        `previous_end` is what the previous step's `fill` returned. The device clock has no common zero with the
        host's, so the span is laid as late as it can have started (after its launch and after the previous step, as a
        stream runs in order) and moved back when it would then end after the tokens were seen on the host.
        """
        marks, self.marks = self.marks, {}
        try:
            start, finish = marks.get("start"), marks.get("finish")
            if start is None or finish is None or not finish.query():
                step.timing = events.Timing.LAUNCH
                return previous_end
            length = _ns(start.elapsed_time(finish))
            at = max(step.t + max(step.launched, 0), previous_end)
            token = step.t + step.token if step.token >= 0 else at + length
            at = max(min(at, token - length), step.t)
            offsets = {part: at - step.t + _ns(start.elapsed_time(marks[part])) for part in PARTS if part in marks}
            host_waited = step.token - step.sampled if 0 <= step.sampled <= step.token else -1
            step.embed = offsets.get("embed", -1)
            step.layers = offsets.get("layers", -1)
            step.head = offsets.get("head", -1)
            step.logits = offsets.get("logits", -1)
            step.sampled = offsets.get("sampled", offsets["finish"])
            step.timing = events.Timing.DEVICE
            step.wait = host_waited
            return at + length
        finally:
            self._pool.give(list(marks.values()))


def _ns(milliseconds: float) -> int:
    return round(milliseconds * NS_PER_MS)

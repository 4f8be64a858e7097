"""A host and a device stream whose times are known: what a GPU does with an engine's launches,
without one.

The host runs ahead of the device as far as it is let; the device works off what is launched in
order, by a clock of its own. `DeviceEvent` behaves as ``torch.cuda.Event(enable_timing=True)``
does, down to the resolution of `elapsed_time`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine_hooks.base import device_timer
from engine_hooks.base.device_timer import DeviceClock, DeviceTimer, EventPool
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S

US = 1_000
RESOLUTION_MS = 0.5e-3
"""Of `torch.cuda.Event.elapsed_time`, by CUDA's documentation."""


@dataclass
class Costs:
    """What a step takes, in ms. `inputs` and `draft` run on the device outside of the marks."""

    inputs: float = 0.05
    embed: float = 0.01
    layers: float = 9.0
    head: float = 0.5
    sample: float = 0.5
    draft: float = 0.0
    schedule: float = 0.3
    """Host: before the launch."""
    launch: float = 0.4
    """Host: from the first kernel to the last."""
    collect: float = 0.2
    """Host: after the tokens."""
    wake: float = 0.03
    """From the device being through to the host knowing it, at least."""
    late: float = 0.12
    """How much longer that may be."""
    jitter: float = 0.2
    """By which share the host's own work varies."""


class Machine:
    """A host at `now` (monotonic ns) and its device, which is busy until `free`. `rate` device
    seconds pass in one of the host's."""

    def __init__(self, rate: float = 1.0, at: int = 1000 * NS_PER_S) -> None:
        self.now = at
        self.free = 0
        self.rate = rate
        self.events = 0

    def event(self) -> DeviceEvent:
        self.events += 1
        return DeviceEvent(self)

    def work(self, milliseconds: float) -> tuple[int, int]:
        """Launch work; (begin, end) of it on the device, by the host's clock."""
        begin = max(self.free, self.now)
        self.free = begin + round(milliseconds * NS_PER_MS)
        return begin, self.free


class DeviceEvent:
    """An event on the machine's stream."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at: int | None = None

    def record(self, stream: object = None) -> None:
        self.at = max(self.machine.free, self.machine.now)

    def query(self) -> bool:
        return self.at is None or self.machine.now >= self.at

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.at is not None and end.at is not None
        assert self.query() and end.query(), (
            "reading an event that is not complete is an error on a GPU"
        )
        exact = (end.at - self.at) * self.machine.rate / NS_PER_MS
        return round(exact / RESOLUTION_MS) * RESOLUTION_MS


@dataclass
class Told:
    """One step: what was told, and the truth as instants of the host's clock (ns)."""

    step: events.Step
    truth: dict[str, int] = field(default_factory=dict)

    def errors(self) -> dict[str, int]:
        """By how much each instant on the device is told too late (ns)."""
        told = self.step
        return {part: told.t + getattr(told, part) - at for part, at in self.truth.items()}

    @property
    def allowed(self) -> int:
        """1 % of the step, at least 0.2 ms (ns)."""
        return max((self.truth["sampled"] - self.truth["embed"]) // 100, NS_PER_MS // 5)


class Engine:
    """Runs steps on a machine as engines do. With `ahead` the next step is launched before this
    one's tokens are fetched (asynchronous scheduling)."""

    def __init__(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, *, ahead: bool, seed: int = 1
    ) -> None:
        monkeypatch.setattr(device_timer, "now", lambda: machine.now)
        self.machine = machine
        self.clock = DeviceClock(EventPool(machine.event))
        self.ahead = ahead
        self.random = random.Random(seed)
        self.open: list[tuple[DeviceTimer, Told]] = []
        self.count = 0

    def run(self, costs: Costs, steps: int) -> list[Told]:
        """`steps` steps, each of them told, in order."""
        told = []
        for _ in range(steps):
            self._launch(costs)
            if len(self.open) > self.ahead:
                told.append(self._collect(costs))
        while self.open:
            told.append(self._collect(costs))
        return told

    def start(self, costs: Costs) -> None:
        """Launch a step that nobody marks: the engine was at work before it was traced."""
        for part in (
            costs.inputs,
            costs.embed,
            costs.layers,
            costs.head,
            costs.sample,
            costs.draft,
        ):
            self.machine.work(part)

    def _host(self, milliseconds: float, jitter: float) -> None:
        self.machine.now += round(milliseconds * (1 + jitter * self.random.random()) * NS_PER_MS)

    def _launch(self, costs: Costs) -> None:
        machine, jitter = self.machine, costs.jitter
        self.count += 1
        told = Told(events.Step(machine.now, self.count))
        self._host(costs.schedule, jitter)
        machine.work(costs.inputs)
        timer = self.clock.timer(None)
        told.step.launched = machine.now - told.step.t
        timer.mark("start")
        for mark, part in (("embed", costs.embed), ("layers", costs.layers), ("head", costs.head),
                           ("logits", costs.sample)):  # fmt: skip
            self._host(costs.launch / 4, jitter)
            timer.mark(mark)
            told.truth[mark] = max(machine.free, machine.now)
            machine.work(part)
        timer.mark("sampled")
        told.step.sampled = machine.now - told.step.t
        timer.mark("finish")
        told.truth["sampled"] = machine.free
        machine.work(costs.draft)
        self.open.append((timer, told))

    def _collect(self, costs: Costs) -> Told:
        machine = self.machine
        timer, told = self.open.pop(0)
        timer.wait_begins()
        machine.now = max(machine.now, told.truth["sampled"])
        self._host(costs.wake, 0)
        machine.now += round(costs.late * self.random.random() * NS_PER_MS)
        told.step.token = machine.now - told.step.t
        self.clock.fill(timer, told.step)
        self._host(costs.collect, costs.jitter)
        return told

"""The machine beside the engine: asked once a second, read by the device strip and by the metrics.

What only this machine can tell (GPUs, control groups, the processor's own peaks) is asked for in a
thread, and only when the engine runs on this host; what the engine told (cores used, memory, steps)
is read from the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.beside.achieved import Achieved, achieved
from tracer.analysis.beside.observed import engine_device, engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.devices import Device, device_told
from tracer.analysis.model.shape import shape_of_engine
from tracer.export.jsondoc import main_engine
from tracer.export.metrics import GAUGE, Family, engine_labels
from tracer.monitor.hardware.cgroup import CgroupWatch, Throttling
from tracer.monitor.hardware.nvml import Gpu, Nvml, visible_devices
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView

PERIOD_S: Final = 1.0
SETTLING_STEPS: Final = 20
"""Steps after which this machine's processor is measured, if the engine runs on it: for half a
second, once."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The device of one engine at one instant. `cores` that all of the engine's processes use,
    `rss` bytes they hold; `peak` what the device can do at most, `dtype` in which it computes.
    None, or nothing in `gpus`: not known."""

    device: str
    gpus: tuple[Gpu, ...] = ()
    cores: float | None = None
    rss: int | None = None
    throttling: Throttling | None = None
    achieved: Achieved | None = None
    peak: Device | None = None
    dtype: str = "bf16"

    @property
    def flops_share(self) -> float | None:
        """FLOP/s while steps ran, over the device's peak in its dtype."""
        if self.achieved is None or self.peak is None:
            return None
        return self.achieved.flops / self.peak.peak(self.dtype)

    @property
    def bytes_share(self) -> float | None:
        """Bytes/s while steps ran, over the device's memory bandwidth."""
        if self.achieved is None or self.peak is None:
            return None
        return self.achieved.bytes / self.peak.bandwidth


class HardwareGauge:
    """See the module. Let `run` work beside the screen; `reading` never waits and never raises."""

    def __init__(self, load: Callable[[], Nvml] = Nvml) -> None:
        self._load = load
        self._nvml: Nvml | None = None
        self._watches: dict[int, CgroupWatch] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._throttling: Throttling | None = None
        self._peak: tuple[str, Device | None] | None = None
        self._last: tuple[int, Reading | None] = (-1, None)

    async def run(self, state: TraceState) -> None:
        """Ask the machine until cancelled."""
        try:
            while True:
                await self.look(state)
                await asyncio.sleep(PERIOD_S)
        finally:
            if self._nvml is not None:
                self._nvml.close()

    async def look(self, state: TraceState) -> None:
        """Ask the machine once, if an engine runs on it."""
        engine = main_engine(state.snapshot(limit=0))
        if engine is None or not engine.name:
            return
        pids = [
            pid
            for source in state.sources.values()
            if (pid := _local_pid(state, source.name)) is not None
        ]
        local = _local_pid(state, engine.source) is not None
        steps = engine.steps >= SETTLING_STEPS
        await asyncio.to_thread(self._ask, engine, pids if local else [], local and steps)

    def reading(self, state: TraceState, now: int) -> Reading | None:
        """What is known at `now` (ns); None while no engine has told of itself. Made at most once a
        second."""
        second, last = self._last
        if second != now // NS_PER_S or last is None:
            last = self._read(state, now)
            self._last = (now // NS_PER_S, last)
        return last

    def families(self, state: TraceState, now: int) -> list[Family]:
        """The reading as metrics."""
        engine = main_engine(state.snapshot(now=now, limit=0))
        reading = self.reading(state, now)
        return [] if engine is None or reading is None else families_of(reading, engine)

    # --- in the thread ----------------------------------------------------------------------------

    def _ask(self, engine: EngineView, pids: list[int], measure: bool) -> None:
        if not pids:
            self._gpus, self._throttling = (), None
        elif engine.device.strip().lower() == "cpu":
            samples = [self._watch(pid).sample(clock.now()) for pid in pids]
            self._throttling = max(
                (sample for sample in samples if sample is not None),
                key=lambda each: each.share or 0.0,
                default=None,
            )
        else:
            if self._nvml is None:
                self._nvml = self._load()
            visible = next(
                (told for pid in pids if (told := visible_devices(pid)) is not None), None
            )
            self._gpus = self._nvml.sample(pids, visible)
        self._measure(engine, measure)

    def _watch(self, pid: int) -> CgroupWatch:
        if len(self._watches) > 64:
            self._watches.clear()
        return self._watches.setdefault(pid, CgroupWatch(pid))

    def _measure(self, engine: EngineView, may: bool) -> None:
        """What the device can do at most: known by its name, or, for a processor, measured when it
        is this one."""
        on_cpu = engine.device.strip().lower() == "cpu"
        if on_cpu and not may:
            return
        named = self._gpus[0].name if self._gpus else engine.device
        if self._peak is not None and self._peak[0] == named:
            return
        try:
            peak = (
                engine_device(engine)
                if on_cpu
                else device_told(named) or device_told(engine.device)
            )
        except AnalysisError:
            peak = None
        self._peak = (named, peak)

    # --- from the state ---------------------------------------------------------------------------

    def _read(self, state: TraceState, now: int) -> Reading | None:
        snapshot = state.snapshot(now=now, limit=0)
        engine = main_engine(snapshot)
        if engine is None or not engine.name:
            return None
        alive = [view for view in snapshot.engines if view.alive]
        cores = [view.cpu_share for view in alive if view.cpu_share is not None]
        memory = [view.rss for view in alive if view.rss is not None]
        peak = None
        if engine.device.strip().lower() != "cpu":
            peak = device_told(engine.device)
        if self._peak is not None and self._peak[1] is not None:
            peak = self._peak[1]
        try:
            dtype = shape_of_engine(engine_facts(engine)).compute_dtype
        except AnalysisError:
            dtype = "bf16"
        return Reading(
            engine.device,
            self._gpus,
            sum(cores) if cores else None,
            sum(memory) if memory else None,
            self._throttling,
            achieved(state, engine, now),
            peak,
            dtype,
        )


def _local_pid(state: TraceState, name: str) -> int | None:
    """The process of a source that is there and runs on this host."""
    source = state.sources[name]
    header = source.header
    if (
        header is None
        or source.gone is not None
        or not header.boot_id
        or header.boot_id != clock.boot_id()
    ):
        return None
    return header.pid


def families_of(reading: Reading, engine: EngineView) -> list[Family]:
    """A reading as metrics, with the engine's labels."""
    labels = engine_labels(engine)
    made: list[Family] = []

    def gauge(name: str, unit: str, help_: str) -> Family:
        made.append(Family(name, GAUGE, unit, help_))
        return made[-1]

    done, throttling = reading.achieved, reading.throttling
    for name, unit, help_, value in (
        (
            "tracer.device.flops",
            "1/s",
            "FLOPs a second while steps ran.",
            None if done is None else done.flops,
        ),
        (
            "tracer.device.memory_traffic",
            "By/s",
            "Bytes a second while steps ran.",
            None if done is None else done.bytes,
        ),
        (
            "tracer.device.busy",
            "1",
            "Share of the time in which a step ran.",
            None if done is None else done.busy,
        ),
        ("tracer.device.flops_share", "1", "FLOPs a second over the peak.", reading.flops_share),
        (
            "tracer.device.memory_traffic_share",
            "1",
            "Bytes a second over the peak.",
            reading.bytes_share,
        ),
        (
            "tracer.device.throttled",
            "1",
            "Share of the time in which a control group was throttled.",
            None if throttling is None else throttling.share,
        ),
    ):
        gauge(name, unit, help_).add(value, **labels)
    for name, unit, help_, attribute in (
        ("tracer.gpu.utilisation", "1", "Share of the time in which a kernel ran.", "utilisation"),
        ("tracer.gpu.memory_used", "By", "Memory in use.", "memory_used"),
        ("tracer.gpu.memory_total", "By", "Memory there is.", "memory_total"),
        ("tracer.gpu.clock", "MHz", "Clock of the multiprocessors.", "clock"),
        ("tracer.gpu.power", "W", "Power drawn.", "power"),
        ("tracer.gpu.temperature", "Cel", "Temperature.", "temperature"),
    ):
        family = gauge(name, unit, help_)
        for gpu in reading.gpus:
            family.add(getattr(gpu, attribute), **labels, gpu=gpu.index)
    return made

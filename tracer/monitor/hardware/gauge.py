"""The machine beside the engine: polled once a second, read by the device strip and by the metrics.

GPUs, control groups and the processor's own peaks are polled in a thread, and only when the engine
runs on this host; cores used, memory and steps are the engine's own and read from the state.
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
    `rss` bytes they hold; `peak` of the device, `dtype` in which it computes. None, or nothing in
    `gpus`: not known."""

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
    """See the module. `run` works beside the screen; `reading` never waits and never raises."""

    def __init__(self, load: Callable[[], Nvml] = Nvml) -> None:
        self._load = load
        self._nvml: Nvml | None = None
        self._watches: dict[int, CgroupWatch] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._throttling: Throttling | None = None
        self._peak: tuple[str, Device | None] | None = None
        self._last: tuple[int, Reading | None] = (-1, None)

    async def run(self, state: TraceState) -> None:
        try:
            while True:
                await self.poll(state)
                await asyncio.sleep(PERIOD_S)
        finally:
            if self._nvml is not None:
                self._nvml.close()

    async def poll(self, state: TraceState) -> None:
        """Poll the machine once, if an engine runs on it."""
        engine = main_engine(state.snapshot(limit=0))
        if engine is None or not engine.name:
            return
        local = {name: pid for name in state.sources if (pid := _local_pid(state, name))}
        pids = list(local.values()) if engine.source in local else []
        await asyncio.to_thread(self._ask, engine, pids)

    def reading(self, state: TraceState, now: int) -> Reading | None:
        """Return the reading at `now` (ns), made at most once a second; None without an engine."""
        second, last = self._last
        if second != now // NS_PER_S or last is None:
            last = self._read(state, now)
            self._last = (now // NS_PER_S, last)
        return last

    def families(self, state: TraceState, now: int) -> list[Family]:
        engine = main_engine(state.snapshot(now=now, limit=0))
        reading = self.reading(state, now)
        return [] if engine is None or reading is None else families_of(reading, engine)

    # --- in the thread ----------------------------------------------------------------------------

    def _ask(self, engine: EngineView, pids: list[int]) -> None:
        if not pids:
            self._gpus, self._throttling = (), None
        elif _on_cpu(engine):
            samples = [self._watch(pid).sample(clock.now()) for pid in pids]
            known = [sample for sample in samples if sample is not None]
            self._throttling = max(known, key=lambda each: each.share or 0.0, default=None)
        else:
            if self._nvml is None:
                self._nvml = self._load()
            visible = [devices for devices in map(visible_devices, pids) if devices is not None]
            self._gpus = self._nvml.sample(pids, visible[0] if visible else None)
        self._measure(engine, bool(pids) and engine.steps >= SETTLING_STEPS)

    def _watch(self, pid: int) -> CgroupWatch:
        if len(self._watches) > 64:
            self._watches.clear()
        return self._watches.setdefault(pid, CgroupWatch(pid))

    def _measure(self, engine: EngineView, may: bool) -> None:
        """Find the device's peaks: by its name, or, for a processor, measured when it is ours."""
        on_cpu = _on_cpu(engine)
        named = self._gpus[0].name if self._gpus else engine.device
        if (on_cpu and not may) or (self._peak is not None and self._peak[0] == named):
            return
        peak: Device | None
        try:
            if on_cpu:
                peak = engine_device(engine)
            else:
                peak = device_told(named) or device_told(engine.device)
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
        peak = None if _on_cpu(engine) else device_told(engine.device)
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


def _on_cpu(engine: EngineView) -> bool:
    return engine.device.strip().lower() == "cpu"


def _local_pid(state: TraceState, name: str) -> int:
    """Return the pid of a source that is alive on this host, else 0."""
    source = state.sources[name]
    header = source.header
    if header is None or source.gone is not None or header.boot_id != clock.boot_id():
        return 0
    return header.pid if header.boot_id else 0


_OF_DEVICE: Final = (
    ("tracer.device.flops", "1/s", "FLOPs a second while steps ran."),
    ("tracer.device.memory_traffic", "By/s", "Bytes a second while steps ran."),
    ("tracer.device.busy", "1", "Share of the time in which a step ran."),
    ("tracer.device.flops_share", "1", "FLOPs a second over the peak."),
    ("tracer.device.memory_traffic_share", "1", "Bytes a second over the peak."),
    ("tracer.device.throttled", "1", "Share of the time in which a control group was throttled."),
)

_OF_GPU: Final = (
    ("tracer.gpu.utilisation", "1", "Share of the time in which a kernel ran.", "utilisation"),
    ("tracer.gpu.memory_used", "By", "Memory in use.", "memory_used"),
    ("tracer.gpu.memory_total", "By", "Memory there is.", "memory_total"),
    ("tracer.gpu.clock", "MHz", "Clock of the multiprocessors.", "clock"),
    ("tracer.gpu.power", "W", "Power drawn.", "power"),
    ("tracer.gpu.temperature", "Cel", "Temperature.", "temperature"),
)


def families_of(reading: Reading, engine: EngineView) -> list[Family]:
    """Return a reading as metrics, with the engine's labels."""
    labels = engine_labels(engine)
    done, throttling = reading.achieved, reading.throttling
    values = (
        done.flops if done else None,
        done.bytes if done else None,
        done.busy if done else None,
        reading.flops_share,
        reading.bytes_share,
        throttling.share if throttling else None,
    )
    made: list[Family] = []
    for (name, unit, help_), value in zip(_OF_DEVICE, values, strict=True):
        family = Family(name, GAUGE, unit, help_)
        family.add(value, **labels)
        made.append(family)
    for name, unit, help_, attribute in _OF_GPU:
        family = Family(name, GAUGE, unit, help_)
        for gpu in reading.gpus:
            family.add(getattr(gpu, attribute), **labels, gpu=gpu.index)
        made.append(family)
    return made

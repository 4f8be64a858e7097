"""The machine beside the engine: what is asked on this host, and that nothing of it is mixed into
another's trace."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Engine, Heartbeat, SourceGone
from tests.hardware.nvml_double import Library
from tests.hardware.test_achieved import decoding
from tests.metrics.exposed import scraped
from tests.tui.timeline import ENGINE, HEADER, SOURCE, START
from tracer.analysis.model.devices import DEVICES
from tracer.monitor.hardware import gauge as gauge_module
from tracer.monitor.hardware.gauge import HardwareGauge
from tracer.monitor.hardware.nvml import Nvml
from tracer.state.trace_state import TraceState

GPU = msgspec.structs.replace(ENGINE, device="cuda:0")


def traced(engine: Engine, *, local: bool = True) -> TraceState:
    """An engine that decodes and told how much CPU and memory it uses, in our own process or on
    another host."""
    state = TraceState()
    header = msgspec.structs.replace(
        HEADER, boot_id=clock.boot_id() if local else "another", pid=os.getpid()
    )
    state.add_source(header)
    for event in (engine, *decoding(100, 4, 20, 10, 8)):
        state.apply(SOURCE, event)
    for second in range(2):
        state.apply(
            SOURCE, Heartbeat(START + second * NS_PER_S, cpu_ns=second * 1_500_000_000, rss=1 << 30)
        )
    return state


@pytest.fixture
def library() -> Callable[[], Nvml]:
    """A management library with our process on its second GPU."""
    return lambda: Nvml(lambda: Library(gpus=2, pids={os.getpid(): 1}))


async def test_a_gpu_of_this_host_is_asked_and_its_peak_known_by_name(
    library: Callable[[], Nvml],
) -> None:
    state = traced(GPU)
    gauge = HardwareGauge(library)
    await gauge.poll(state)
    reading = gauge.reading(state, state.now)
    assert reading is not None
    assert [gpu.index for gpu in reading.gpus] == [1]
    assert reading.peak is not None and reading.peak.name == "h200"
    assert reading.cores == pytest.approx(1.5) and reading.rss == 1 << 30
    assert reading.achieved is not None and reading.flops_share == reading.achieved.flops / 989e12
    exposed = scraped(gauge.families(state, state.now))
    assert exposed.one("tracer_gpu_utilisation", gpu="1") == 0.93
    assert exposed.one("tracer_gpu_power_watts") == 612
    assert exposed.one("tracer_device_memory_traffic_share") == pytest.approx(reading.bytes_share)


async def test_without_a_library_the_rest_is_still_told() -> None:
    def missing() -> Nvml:
        return Nvml(lambda: Library(refuses=("nvmlInit",)))

    state = traced(GPU)
    gauge = HardwareGauge(missing)
    await gauge.poll(state)
    reading = gauge.reading(state, state.now)
    assert reading is not None and reading.gpus == () and reading.peak is None
    assert reading.achieved is not None and reading.flops_share is None
    assert not scraped(gauge.families(state, state.now)).all("tracer_gpu_utilisation")


async def test_a_processor_is_measured_once_and_only_if_it_is_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str] = []

    def measure(engine: object) -> object:
        measured.append("once")
        return DEVICES["a100-80"]

    monkeypatch.setattr(gauge_module, "engine_device", measure)
    state = traced(ENGINE)
    gauge = HardwareGauge()
    for _ in range(3):
        await gauge.poll(state)
    assert measured == ["once"]
    reading = gauge.reading(state, state.now)
    assert reading is not None and reading.peak is not None and reading.dtype == "bf16"
    elsewhere = HardwareGauge()
    other = traced(ENGINE, local=False)
    await elsewhere.poll(other)
    reading = elsewhere.reading(other, other.now)
    assert measured == ["once"] and reading is not None
    assert (
        reading.peak is None and reading.throttling is None and reading.cores == pytest.approx(1.5)
    )


async def test_an_engine_that_is_gone_is_asked_no_more(library: Callable[[], Nvml]) -> None:
    state = traced(GPU)
    gauge = HardwareGauge(library)
    await gauge.poll(state)
    state.apply(SOURCE, SourceGone(state.now, "ended"))
    await gauge.poll(state)
    reading = gauge.reading(state, state.now + 2 * NS_PER_S)
    assert reading is not None and reading.gpus == () and reading.cores is None


async def test_before_any_engine_there_is_nothing(library: Callable[[], Nvml]) -> None:
    state = TraceState()
    gauge = HardwareGauge(library)
    await gauge.poll(state)
    assert gauge.reading(state, START) is None and gauge.families(state, START) == []

"""FLOPs and bytes of the last steps, beside a reckoning by hand."""

from __future__ import annotations

import msgspec
import pytest

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Engine, Step, pack_u32
from tests.tui.timeline import ENGINE, HEADER, SOURCE, START
from tracer.analysis.beside.achieved import achieved
from tracer.state.trace_state import TraceState

HEAD = 49_152 * 576
LAYERS = 134_515_008 - HEAD


def engine_with(engine: Engine, steps: list[Step]) -> TraceState:
    state = TraceState()
    state.add_source(HEADER)
    for event in (engine, *steps):
        state.apply(SOURCE, event)
    return state


def decoding(count: int, batch: int, every_ms: int, ms: int, used: int) -> list[Step]:
    """Steps of `ms`, begun every `every_ms`, in which `batch` sequences take a token each."""
    first = pack_u32(range(1, batch + 1))
    return [
        Step(
            START + n * every_ms * NS_PER_MS,
            n,
            token=(ms - 1) * NS_PER_MS,
            end=ms * NS_PER_MS,
            batch=batch,
            tokens=batch,
            joined=b"" if n else first,
            used=used,
            cached=0,
            free=256 - used,
            waiting=0,
            running=batch,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("batch", [1, 8])
def test_decoding_reads_the_weights_and_the_cache_once_a_step(batch: int) -> None:
    used = 32
    state = engine_with(ENGINE, decoding(200, batch, 20, 10, used))
    now = START + 200 * 20 * NS_PER_MS
    (engine,) = state.snapshot(now=now).engines
    found = achieved(state, engine, now, window_s=2.0)
    assert found is not None and found.steps == 100
    assert found.busy == pytest.approx(0.5)
    per_step_bytes = 269_030_016 + used * 16 * 23_040 + batch * 23_040
    assert found.bytes == pytest.approx(per_step_bytes / 0.010, rel=0.001)
    context = used * 16 / batch
    flops = batch * (2 * LAYERS + 2 * HEAD + 4 * 30 * 9 * 64 * context)
    assert found.flops == pytest.approx(flops / 0.010, rel=0.001)


def test_steps_that_overlap_count_once() -> None:
    state = engine_with(ENGINE, decoding(100, 4, 10, 20, 8))
    now = START + 100 * 10 * NS_PER_MS
    (engine,) = state.snapshot(now=now).engines
    found = achieved(state, engine, now, window_s=0.5)
    assert found is not None and found.busy == pytest.approx(1.0, abs=0.03)


def test_an_engine_that_rests_or_does_not_say_what_it_runs_has_none() -> None:
    state = engine_with(ENGINE, decoding(20, 4, 10, 5, 8))
    (engine,) = state.snapshot().engines
    assert achieved(state, engine, START + 60 * NS_PER_S) is None
    unknown = msgspec.structs.replace(ENGINE, params=-1, layers=-1)
    state = engine_with(unknown, decoding(20, 4, 10, 5, 8))
    (engine,) = state.snapshot().engines
    assert achieved(state, engine, state.now) is None


def test_a_share_of_the_work_is_this_devices() -> None:
    steps = decoding(100, 4, 10, 5, 8)
    whole = engine_with(ENGINE, steps)
    half = engine_with(msgspec.structs.replace(ENGINE, tensor_parallel=2), steps)
    figures = [achieved(state, state.snapshot().engines[0], state.now) for state in (whole, half)]
    assert figures[0] is not None and figures[1] is not None
    assert figures[1].flops == pytest.approx(figures[0].flops / 2)

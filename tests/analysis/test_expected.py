"""The expected value beside the measured one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from engine_hooks.protocol.stages import Stage
from tests.tui.timeline import Timeline
from tracer.analysis.beside.expected import Expectation, expectation
from tracer.analysis.beside.observed import observe
from tracer.analysis.budget.budget import budget
from tracer.analysis.budget.workload import Workload
from tracer.analysis.fit.fit import fit_trace
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Counting
from tracer.analysis.model.devices import DEVICES
from tracer.state.view import ChunkView, EngineView, Phase, RequestView

H100 = DEVICES["h100-sxm"]
LLAMA = load_model("llama-3.1-8b")


def request(
    prompt: int | None, output: int, cached: int = 0, chunks: tuple[int, ...] = ()
) -> RequestView:
    """A request that went through."""
    passes = tuple(ChunkView(n, tokens, 0, 1) for n, tokens in enumerate(chunks))
    return RequestView(
        "r",
        ("e", 1),
        "e",
        Phase.DONE,
        0,
        1,
        (),
        (),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        chunks=passes,
    )


@pytest.mark.parametrize(
    "workload", [Workload(), Workload(cached=1900), Workload(prompt=30_000, output=50)]
)
def test_alone_it_expects_what_the_budget_says(workload: Workload) -> None:
    made = budget(LLAMA, H100, workload, counting=Counting.EXACT)
    expected = Expectation(LLAMA, H100).stages(
        request(workload.prompt, workload.output, workload.cached)
    )
    assert set(expected) == set(Stage)
    for stage in (
        Stage.RECEIVE,
        Stage.TOKENISE,
        Stage.PREFILL,
        Stage.LM_HEAD,
        Stage.DECODE,
        Stage.TEARDOWN,
    ):
        assert expected[stage] == pytest.approx(made.stage(stage).ms, rel=0.06, abs=0.02), stage


def test_chunks_and_neighbours_lengthen_it() -> None:
    engine = Expectation(LLAMA, H100, budget_tokens=512)
    whole = engine.stages(request(4096, 10, chunks=(4096,)))
    cut = engine.stages(request(4096, 10, chunks=(512,) * 8))
    planned = engine.stages(request(4096, 10))
    assert cut[Stage.PREFILL] > whole[Stage.PREFILL]
    assert planned[Stage.PREFILL] == pytest.approx(cut[Stage.PREFILL], rel=1e-9)
    crowded = engine.stages(
        request(4096, 10, chunks=(512,) * 8), batch=64, context_tokens=64 * 3000
    )
    for stage in (Stage.ADMISSION, Stage.PREFILL, Stage.DECODE):
        assert crowded[stage] > cut[stage]


def test_of_a_live_request_only_the_tokens_so_far_are_expected() -> None:
    engine = Expectation(LLAMA, H100)
    ten, twenty = (engine.stages(request(1000, n))[Stage.DECODE] for n in (11, 21))
    assert twenty == pytest.approx(2 * ten, rel=0.01)
    assert engine.stages(request(1000, 0))[Stage.DECODE] == 0


def test_a_long_prefill_is_reckoned_by_its_average_chunk() -> None:
    engine = Expectation(LLAMA, H100)
    few = engine.stages(request(12 * 256, 1, chunks=(256,) * 12))[Stage.PREFILL]
    many = engine.stages(request(48 * 256, 1, chunks=(256,) * 48))[Stage.PREFILL]
    assert many == pytest.approx(4 * few, rel=0.15)


def test_nothing_is_expected_of_what_is_not_known() -> None:
    assert Expectation(LLAMA, H100).stages(request(None, 5)) == {}
    assert expectation(EngineView("e", "e", "engine", 1, name="vllm"), H100) is None


def test_an_engines_own_words_are_enough() -> None:
    timeline = Timeline(40, rate=4.0)
    snapshot = timeline.state().snapshot()
    engine, view = snapshot.engines[0], snapshot.requests[5]
    found = expectation(engine, H100)
    assert found is not None
    assert set(found.stages(view, view.batch or 1, 2000)) == set(Stage)


def test_with_a_fit_the_expected_is_close_to_the_measured() -> None:
    state = Timeline(120, rate=6.0, seed=5).state()
    seen = observe(state)
    step = fit_trace(seen, device=DEVICES["l4"]).step
    snapshot = state.snapshot()
    expectation_of = expectation(snapshot.engines[0], DEVICES["l4"], step)
    assert expectation_of is not None
    ratios = []
    places = {each.n: number for number, each in enumerate(seen.steps)}
    for view in snapshot.requests:
        row = view.stages[Stage.DECODE - 1]
        if (
            row.ms is None
            or row.begin is None
            or row.end is None
            or view.output_tokens < 10
            or not view.chunks
        ):
            continue
        first = places[view.chunks[-1].step] + 1
        steps = seen.steps[first : first + view.output_tokens - 1]
        batch = round(sum(each.batch for each in steps) / len(steps))
        context = float(seen.context[first : first + len(steps)].mean())
        expected = expectation_of.stages(view, batch, context)
        ratios.append(expected[Stage.DECODE] / (row.ms - (row.wait_ms or 0.0)))
    ratios.sort()
    assert len(ratios) > 60
    assert ratios[len(ratios) // 2] == pytest.approx(1.0, abs=0.15)


def test_it_is_cheap_enough_for_every_request_on_a_screen() -> None:
    timeline = Timeline(40, rate=4.0)
    snapshot = timeline.state().snapshot()
    engine, views = snapshot.engines[0], snapshot.requests
    found = expectation(engine, H100)
    assert found is not None
    times = []
    for _ in range(30):
        begin = time.process_time_ns()
        for view in views:
            found.stages(view, 4, 3000)
        times.append((time.process_time_ns() - begin) / len(views))
    assert sorted(times)[len(times) // 2] < 50_000


def test_a_core_reads_and_computes_in_turns() -> None:
    core = replace(H100, name="cpu")
    apart = Expectation(LLAMA, core).stages(request(100, 10))
    together = Expectation(LLAMA, H100).stages(request(100, 10))
    assert apart[Stage.PREFILL] > together[Stage.PREFILL]

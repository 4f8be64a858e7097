"""The discrete-event model: small cases by hand, and what must hold for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tracer.analysis.beside.observed import Arrival, Settings
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.step_model import StepModel
from tracer.analysis.whatif import simulate as module
from tracer.analysis.whatif.simulate import Outcome, simulate

STEP = StepModel(10.0, 1.0, 0.0, 0.0, roofline=Roofline.SUM)
"""10 ms a step and 1 ms a token."""
ROOM = Settings(slots=8, budget=64, blocks=1000, block_size=16, prefix_cache=False)


def arrivals(*told: tuple[float, int, int], **more: object) -> list[Arrival]:
    """(at, prompt, output) each."""
    return [
        Arrival(str(n), at, prompt, output, **more) for n, (at, prompt, output) in enumerate(told)
    ]  # type: ignore[arg-type]


def test_a_request_alone_is_prefilled_in_chunks_then_decodes() -> None:
    done = simulate(arrivals((5.0, 100, 3)), ROOM, STEP)
    # Chunks of 64 and 36 tokens, then two steps of one.
    assert done.scheduled.tolist() == [5.0]
    assert done.first.tolist() == [5.0 + 74 + 46]
    assert done.last.tolist() == [125.0 + 2 * 11]
    assert done.gaps.tolist() == [11.0, 11.0]
    assert done.steps == 4


def test_a_prompt_is_prefilled_beside_those_that_decode() -> None:
    done = simulate(arrivals((0.0, 10, 4), (1.0, 100, 1)), ROOM, STEP)
    # 20 ms for the first prompt; then 1 + 63 tokens, then 1 + 37, then the last one alone.
    assert done.first.tolist() == [20.0, 20.0 + 74 + 48]
    assert done.last.tolist() == [20.0 + 74 + 48 + 11, 142.0]
    assert done.gaps.tolist() == [74.0, 48.0, 11.0]


def test_without_chunks_a_prompt_stops_everyones_stream() -> None:
    done = simulate(arrivals((0.0, 10, 4), (1.0, 100, 1)), replace(ROOM, chunked=False), STEP)
    assert done.first.tolist() == [20.0, 20.0 + 110]
    assert done.gaps.tolist()[0] == 110.0 + 11.0


def test_slots_bound_who_runs_and_the_rest_waits_in_order() -> None:
    done = simulate(arrivals(*[(0.0, 8, 2)] * 5), replace(ROOM, slots=2), STEP)
    assert done.scheduled.tolist() == [0.0, 0.0, 38.0, 38.0, 76.0]
    assert sorted(done.first.tolist()) == done.first.tolist()


def test_idle_time_is_skipped() -> None:
    done = simulate(arrivals((0.0, 8, 1), (10_000.0, 8, 1)), ROOM, STEP)
    assert done.first.tolist() == [18.0, 10_018.0]
    assert done.steps == 2


def test_the_host_and_the_gap_come_between_steps() -> None:
    slow = replace(STEP, host_ms=3.0, host_sequence_ms=1.0, after_ms=2.0, gap_ms=0.5)
    done = simulate(arrivals((0.0, 8, 3)), ROOM, slow)
    assert done.first.tolist() == [3.0 + 1 + 18]
    assert done.gaps.tolist() == [2.5 + 4 + 11] * 2


def test_a_prefix_is_computed_once_and_its_blocks_are_shared() -> None:
    cached = replace(ROOM, prefix_cache=True)
    names = tuple(range(4))  # 64 tokens in four full blocks
    asked = (("a", 0.0, 70), ("b", 1000.0, 70), ("c", 2000.0, 64))
    told = [Arrival(name, at, prompt, 1, 0, names) for name, at, prompt in asked]
    done = simulate(told, cached, STEP)
    assert done.cached.tolist() == [0.0, 64.0, 48.0]  # at least one token is always computed
    assert (done.first - [0.0, 1000.0, 2000.0]).tolist() == [74.0 + 16.0, 16.0, 26.0]
    together = simulate(
        [replace(each, at=0.0) for each in told], replace(cached, budget=1000), STEP
    )
    assert together.cached.tolist() == [0.0, 0.0, 0.0]  # in the same step nobody shares


def test_hits_that_were_recorded_are_taken_again_when_ids_are_not_known() -> None:
    told = [Arrival("a", 0.0, 70, 1, 48, None)]
    assert simulate(told, replace(ROOM, prefix_cache=True), STEP).first.tolist() == [32.0]
    assert simulate(told, ROOM, STEP).first.tolist() == [74.0 + 16.0]


def test_the_oldest_cached_blocks_make_room() -> None:
    cached = replace(ROOM, prefix_cache=True, blocks=6)
    told = [
        Arrival("a", 0.0, 64, 1, 0, (1, 2, 3, 4)), Arrival("b", 1000.0, 80, 1, 0, (5, 6, 7, 8, 9)),
        Arrival("c", 2000.0, 64, 1, 0, (1, 2, 3, 4)),
    ]  # fmt: skip
    done = simulate(told, cached, STEP)
    assert done.cached.tolist() == [0.0, 0.0, 0.0]
    assert simulate(told, replace(cached, blocks=20), STEP).cached.tolist() == [0.0, 0.0, 48.0]


def test_a_pool_that_runs_out_sends_the_newest_back() -> None:
    told = arrivals((0.0, 30, 40), (0.0, 30, 40))
    tight = simulate(told, replace(ROOM, blocks=6), STEP)
    roomy = simulate(told, ROOM, STEP)
    assert tight.preemptions > 0
    assert roomy.preemptions == 0
    assert tight.last[0] <= tight.last[1]
    assert tight.last[1] > roomy.last[1]
    assert tight.weights.sum() == roomy.weights.sum() == 78  # no token is lost


def test_a_request_that_never_fits_is_named() -> None:
    with pytest.raises(
        AnalysisError, match=r"request 1 of 500 \+ 2 tokens does not fit into 10 blocks"
    ):
        simulate(arrivals((0.0, 10, 2), (0.0, 500, 2)), replace(ROOM, blocks=10), STEP)
    with pytest.raises(AnalysisError, match="does not fit into"):
        simulate(arrivals((0.0, 10, 500)), replace(ROOM, blocks=10), STEP)
    with pytest.raises(AnalysisError, match="at least 1"):
        simulate(arrivals((0.0, 10, 2)), replace(ROOM, slots=0), STEP)


def test_dense_attention_makes_a_prompt_slower_by_its_neighbours_caches() -> None:
    dense = replace(STEP, pair_ms=0.01, dense=True)
    told = arrivals((0.0, 64, 30), (100.0, 32, 1))
    alone = simulate(told[1:], ROOM, dense).first[0] - 100.0
    beside = simulate(told, ROOM, dense)
    assert beside.first[1] - beside.scheduled[1] > 1.3 * alone


plans = st.lists(
    st.tuples(st.floats(0, 3000), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25
)
rooms = st.builds(
    Settings,
    slots=st.integers(1, 10),
    budget=st.integers(1, 200),
    blocks=st.integers(40, 200),
    block_size=st.just(16),
    prefix_cache=st.booleans(),
    chunked=st.booleans(),
    margin=st.sampled_from([0.0, 0.15]),
    evict_all=st.booleans(),
)


def run(told: list[tuple[float, int, int]], room: Settings) -> tuple[list[Arrival], Outcome]:
    """A replay in which every third request shares a prefix."""
    asked = [
        Arrival(str(n), at, prompt, output, 0, tuple(range(prompt // 16)) if n % 3 == 0 else None)
        for n, (at, prompt, output) in enumerate(sorted(told))
    ]
    return asked, simulate(asked, room, replace(STEP, host_ms=1.0, context_ms=0.001))


@settings(max_examples=examples(60), deadline=None)
@given(told=plans, room=rooms)
def test_every_token_comes_out_in_order_whatever_is_asked(
    told: list[tuple[float, int, int]], room: Settings
) -> None:
    asked, done = run(told, room)
    at = np.array([each.at for each in asked])
    assert not np.isnan(done.first).any()
    assert (done.scheduled >= at).all()
    assert (done.first > done.scheduled).all()
    assert (done.last >= done.first).all()
    assert (done.gaps > 0).all()
    assert done.weights.sum() == sum(each.output - 1 for each in asked)
    # The gaps of all requests add up to the time that they decoded.
    assert float((done.gaps * done.weights).sum()) == pytest.approx(
        float((done.last - done.first).sum()), abs=1e-6
    )
    assert (done.cached <= [each.prompt - 1 for each in asked]).all()


@settings(max_examples=examples(40), deadline=None)
@given(told=plans, room=rooms)
def test_reckoning_stretches_at_once_changes_nothing(
    told: list[tuple[float, int, int]], room: Settings
) -> None:
    _, quick = run(told, room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LONGEST_STRETCH", 1)
        _, plain = run(told, room)
    for name in ("scheduled", "first", "last", "cached"):
        assert getattr(quick, name) == pytest.approx(getattr(plain, name), nan_ok=True)
    assert (quick.steps, quick.preemptions) == (plain.steps, plain.preemptions)


def test_noise_is_the_same_for_the_same_seed() -> None:
    told = arrivals(*[(n * 20.0, 30, 10) for n in range(8)])
    one, same, other = (simulate(told, ROOM, STEP, noise=0.2, seed=seed) for seed in (1, 1, 2))
    assert one.last.tolist() == same.last.tolist() != other.last.tolist()

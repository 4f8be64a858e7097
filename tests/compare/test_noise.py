"""Two runs of the same traffic are called equal; a fault of ten per cent is found in its stage."""

from __future__ import annotations

import numpy as np
import pytest

from engine_hooks.protocol.stages import Stage
from tests.compare.traffic import Traffic
from tests.effort import thinned
from tracer.analysis.compare import Comparison, compare, trace_of_views
from tracer.analysis.compare import resampling as noise
from tracer.state.metrics.quantiles import weighted_quantiles

CALM = Traffic(drift=0.02)


def between(before: Traffic, after: Traffic, seed: int = 0, **options: object) -> Comparison:
    """Two runs, drawn apart."""
    traces = [
        trace_of_views("before", before.views(2 * seed + 1)),
        trace_of_views("after", after.views(2 * seed + 2)),
    ]
    return compare(traces, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other", thinned([0, 1000], 2), ids=["the same requests", "requests drawn anew"]
)
def test_equal_runs_are_called_different_in_at_most_one_of_twenty(other: int) -> None:
    """Requests wait for each other and the engine's speed drifts: neighbours are alike."""
    runs, alarms = 40, 0
    for seed in range(runs):
        before, after = (
            Traffic(requests=40, lengths=seed),
            Traffic(requests=40, lengths=other + seed),
        )
        alarms += bool(between(before, after, seed, rounds=300).pairs[0].differs)
    assert alarms <= runs // 20


def test_a_verdict_of_no_difference_says_so_with_its_noise() -> None:
    (pair,) = between(Traffic(), Traffic()).pairs
    assert pair.differs is False
    assert pair.explained_by is None
    assert pair.verdict.startswith("No difference beyond noise: E2E p50 ")
    assert "noise ±" in pair.verdict
    assert all(not change.differs for found in pair.changes.values() for change in found.values())


@pytest.mark.parametrize("seed", thinned(range(5), 3))
def test_decode_slowed_by_a_tenth_is_found_in_decode_and_told_per_token(seed: int) -> None:
    slowed = Traffic(drift=0.02, token_ms=22.0, lengths=seed)
    (pair,) = between(Traffic(drift=0.02, lengths=seed), slowed, seed).pairs
    assert pair.differs
    assert pair.explained_by == "decode"
    assert pair.change("tpot", "mean").relative == pytest.approx(0.1, abs=0.03)
    (rate,) = [rate for rate in pair.rates if rate.stage == "decode"]
    assert rate.before == pytest.approx(20, rel=0.03)
    assert rate.after == pytest.approx(22, rel=0.03)
    if pair.beyond_noise("e2e"):
        assert f"{rate.before:.1f} → {rate.after:.1f} ms an output token" in pair.verdict


@pytest.mark.parametrize(
    ("fault", "stage"),
    thinned([(Traffic(drift=0.02, wait_ms=50.0), "admission"),
     (Traffic(drift=0.02, slots=1), "admission"),
     (Traffic(drift=0.02, prompt_ms=0.4), "prefill"),
     (Traffic(drift=0.02, stage_ms=((Stage.SAMPLE, 20.0),)), "sample"),
     (Traffic(drift=0.02, stage_ms=((Stage.TOKENISE, 30.0),)), "tokenise"),
     (Traffic(drift=0.02, stage_ms=((Stage.TEARDOWN, 90.0),)), "teardown")], 3),
)  # fmt: skip
def test_the_stage_that_got_slower_is_named(fault: Traffic, stage: str) -> None:
    for seed in range(3):
        (pair,) = between(CALM, fault, seed).pairs
        assert pair.explained_by == stage, pair.verdict
        label = next(
            part.row.label for part in (*pair.e2e_parts, *pair.ttft_parts) if part.row.key == stage
        )
        assert label in pair.verdict


def test_what_got_faster_is_told_as_well() -> None:
    (pair,) = between(Traffic(drift=0.02, wait_ms=80.0), CALM).pairs
    assert "TTFT p50 fell" in pair.verdict
    assert pair.explained_by == "admission"
    assert (pair.change("ttft", "p50").difference or 0) < 0


def test_longer_answers_are_no_slower_decode_once_they_are_matched() -> None:
    longer = Traffic(requests=120, drift=0.02, lengths=5, output_scale=1.6, prompt_scale=1.4)
    base = Traffic(requests=120, drift=0.02)
    matched, plain = between(base, longer), between(base, longer, match="none")
    assert matched.pairs[0].differs is False, matched.pairs[0].verdict
    assert plain.pairs[0].explained_by == "decode"
    assert any("output length" in warning for warning in plain.pairs[0].warnings)
    assert matched.late.counts[0] < matched.late.eligible[0]
    assert matched.late.factor > 0


def test_reuse_that_stopped_is_a_difference_unless_work_is_matched() -> None:
    """By default what a prefix cache no longer saves shows; matched by computed tokens the engine
    is as fast."""
    warm, cold = Traffic(requests=120, drift=0.02, cached=0.8), Traffic(requests=120, drift=0.02)
    by_length, by_work = between(warm, cold), between(warm, cold, match="work")
    assert by_length.pairs[0].explained_by == "prefill"
    assert any("prefix cache hits differ" in warning for warning in by_length.pairs[0].warnings)
    assert not by_work.pairs[0].change("prefill", "p50").differs


def test_the_same_input_gives_the_same_answer() -> None:
    assert between(CALM, Traffic()) == between(CALM, Traffic())


def test_parts_add_up_to_the_change_of_the_mean() -> None:
    made = between(CALM, Traffic(token_ms=25.0, wait_ms=12.0))
    (pair,) = made.pairs
    for key, parts in (("e2e", pair.e2e_parts), ("ttft", pair.ttft_parts)):
        values = made.figures[key]["mean"].values
        assert sum(part.before for part in parts) == pytest.approx(values[0], rel=1e-4)
        assert sum(part.change for part in parts) == pytest.approx(
            (values[1] or 0) - (values[0] or 0), abs=0.05
        )


# --- the arithmetic -------------------------------------------------------------------------------


def test_weighted_quantiles_are_those_of_repeated_values() -> None:
    random = np.random.default_rng(3)
    values = random.lognormal(3, 1, 400)
    repeats = random.integers(1, 5, (3, 400))
    found = weighted_quantiles(values, repeats.astype(np.float64), (0.5, 0.95))
    for line, counts in enumerate(repeats):
        plain = np.quantile(np.repeat(values, counts), (0.5, 0.95))
        assert found[:, line] == pytest.approx(plain, rel=0.01)
    assert np.isnan(weighted_quantiles(values, np.zeros((1, 400)), (0.5,))).all()


def series(alike: float, length: int, rows: int = 9) -> list[np.ndarray]:
    """First-order autoregressive rows: each value is `alike` times the one before, plus noise."""
    random = np.random.default_rng(1)
    made = random.standard_normal((rows, length))
    for place in range(1, length):
        made[:, place] += alike * made[:, place - 1]
    return list(made)


@pytest.mark.parametrize("alike", [0.3, 0.5, 0.7])
def test_the_memory_of_an_autoregressive_series_is_its_coefficient(alike: float) -> None:
    assert noise.memory(series(alike, 400)) == pytest.approx(alike, abs=0.05)
    # Of few requests too, thanks to the correction: the plain correlation is a fifth too low here.
    assert noise.memory(series(alike, 40, rows=99)) == pytest.approx(alike, abs=0.06)


def test_memory_is_bounded_and_needs_four_values() -> None:
    assert noise.memory(series(0.0, 400)) < 0.05
    assert noise.memory(series(-0.7, 400)) == 0.0
    assert noise.memory([np.arange(400.0)]) == 0.9
    assert noise.memory([]) == 0.0
    rising = np.array([1.0, 2.0, 3.0, np.nan])
    assert noise.memory([rising]) == 0.0
    assert noise.memory([np.append(rising, 4.0)]) > 0.0


def test_what_stretches_do_not_see_by_hand() -> None:
    assert noise.hidden(0.0, 7) == 1.0
    assert noise.hidden(0.5, 1) == pytest.approx(3**0.5)  # the variance of a mean: (1+a)/(1-a)
    assert noise.hidden(0.5, 2) == pytest.approx((3 / 1.5) ** 0.5)  # a pair sees 1 + a of it
    assert noise.hidden(0.5, 1000) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("requests", "company", "length"),
    [
        (36, 1.0, 6),  # √36 stretches
        (100, 1.0, 10),
        (2500, 1.0, 62),  # 40 stretches at most, not 50
        (100, 14.0, 14),  # as many as were open together
        (100, 90.0, 16),  # but never fewer than six stretches
        (5, 1.0, 1),
        (0, 0.0, 1),
    ],
)
def test_stretches_are_as_long_as_requests_and_company_ask(
    requests: int, company: float, length: int
) -> None:
    assert noise.block_length(requests, company) == length


def test_rounds_become_fewer_with_many_requests() -> None:
    assert noise.rounds_for(6_000) == 1000
    assert noise.rounds_for(12_000) == 500
    assert noise.rounds_for(100_000) == noise.FEWEST_ROUNDS
    assert noise.rounds_for(100_000, wanted=40) == 40


def test_a_band_is_as_wide_as_what_the_rounds_and_the_stretches_say() -> None:
    """One figure, normal rounds: 1.96 spreads, times √(n/(n-1)) and Student's t for the stretches,
    times what stretches do not see."""
    drawn = np.random.default_rng(5).standard_normal((20_000, 1)) * 3.0
    reach = 3.0 * 1.96
    (plain,) = noise.bands(np.zeros(1), drawn, (1000, 1000), 1.0)
    assert plain == pytest.approx(reach, rel=0.02)
    (hidden,) = noise.bands(np.zeros(1), drawn, (1000, 1000), 2.0)
    assert hidden == pytest.approx(2 * plain)
    (few,) = noise.bands(np.zeros(1), drawn, (6, 40), 1.0)
    assert few == pytest.approx(reach * (6 / 5) ** 0.5 * noise.student(1.96, 44) / 1.96, rel=0.02)


@pytest.mark.parametrize(("missing", "told"), [(29, True), (31, False)])
def test_a_figure_that_three_in_ten_rounds_lack_has_no_band(missing: int, told: bool) -> None:
    rounds = np.random.default_rng(0).standard_normal((100, 2))
    rounds[:missing, 1] = np.nan
    half = noise.bands(np.zeros(2), rounds, (20, 20), 1.0)
    assert np.isfinite(half[0])
    assert bool(np.isfinite(half[1])) is told


def test_quantiles_of_bins_lie_where_their_counts_say() -> None:
    """Four gaps in bin 10, four in bin 20: the median is where the first bin ends."""
    counts, once = np.array([[4.0, 0.0], [0.0, 4.0]]), np.ones((1, 2))
    bins = np.array([10, 20])
    places, total = noise.binned_quantiles(bins, counts, once, (0.25, 0.5, 0.75))
    assert places[:, 0].tolist() == [10.5, 11.0, 20.5]
    assert total.tolist() == [8.0]
    places, total = noise.binned_quantiles(bins, counts, np.zeros((1, 2)), (0.5,))
    assert np.isnan(places).all() and total.tolist() == [0.0]


def test_every_request_is_drawn_as_often_as_any_other() -> None:
    drawn = noise.draws(np.random.default_rng(1), 30, 7, 4000)
    assert drawn.min() >= 0
    assert drawn.sum(axis=1) == pytest.approx(35)
    assert drawn.mean(axis=0) == pytest.approx(35 / 30, rel=0.1)


def test_students_t_is_that_of_the_tables() -> None:
    for freedom, wanted in ((10, 3.169), (20, 2.845), (60, 2.660)):
        assert noise.student(2.5758, freedom) == pytest.approx(wanted, rel=0.001)

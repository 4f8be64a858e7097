"""What is compared with what: which requests, which columns, which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tests.compare.traffic import Traffic, view
from tests.diagnosis.scenario import Ask, Lab
from tests.effort import examples
from tests.state.test_properties import fold
from tests.state.traces import simulate
from tracer.analysis.compare import Comparison, compare, trace_of_state, trace_of_views
from tracer.analysis.compare.result import NONE_ALIKE
from tracer.analysis.compare.rows import row_of
from tracer.analysis.errors import AnalysisError
from tracer.state.view import Phase, RequestView, StageView, Status

VIEWS = Traffic(drift=0.02).views(1)


def asks(count: int = 60, every: float = 0.5) -> list[Ask]:
    """Requests of a few lengths."""
    return [
        Ask(at=every * n, prompt=100 + 40 * (n % 5), output=30 + 10 * (n % 3)) for n in range(count)
    ]


def of(*columns: list[RequestView], **options: str) -> Comparison:
    """A comparison of views, called A, B, C."""
    return compare([trace_of_views("ABC"[k], views) for k, views in enumerate(columns)], **options)  # type: ignore[arg-type]


def test_an_engine_whose_steps_take_a_tenth_longer_is_found_in_decode_with_its_gaps() -> None:
    """Through events, the fold and the gaps between tokens."""
    one = Lab(seed=1).play(asks())
    two = Lab(seed=2, decode_ms=lambda batch, context: 22 + 0.055 * batch).play(asks())
    made = compare([trace_of_state("before", one), trace_of_state("after", two)])
    (pair,) = made.pairs
    assert pair.explained_by == "decode", pair.verdict
    assert pair.change("itl", "p50").differs
    assert pair.change("itl", "p50").relative == pytest.approx(0.1, abs=0.02)
    assert made.columns[0].prefix_caching is True
    equal = compare([trace_of_state("a", one), trace_of_state("b", Lab(seed=3).play(asks()))])
    assert equal.pairs[0].differs is False, equal.pairs[0].verdict


def test_too_few_requests_are_told_never_guessed_about() -> None:
    (pair,) = of(VIEWS, VIEWS[:5]).pairs
    assert pair.differs is None
    assert pair.verdict.startswith(
        "Too few requests to compare: A has 60 with a first token, B has 5; each"
    )
    assert of([], []).pairs[0].differs is None
    assert of(VIEWS, [], match="none").pairs[0].differs is None


def test_traffic_that_has_nothing_in_common_is_told_and_compared_when_asked_to() -> None:
    short = [replace(one, prompt_tokens=8) for one in VIEWS]
    long = [replace(one, prompt_tokens=9000) for one in VIEWS]
    (pair,) = of(short, long).pairs
    assert pair.differs is None
    assert pair.verdict.startswith("No requests of A and B match in length")
    assert "Match none to compare them as they are." in pair.verdict
    assert pair.change("ttft", "p50").why == NONE_ALIKE
    assert of(short, long, match="none").pairs[0].differs is not None


def test_a_high_percentile_needs_more_requests_than_a_median() -> None:
    (pair,) = of(VIEWS[:30], VIEWS[30:]).pairs
    assert pair.change("ttft", "p50").differs is not None
    assert pair.change("ttft", "p95").differs is None
    assert "40 requests needed; A has 23, B has 19" in pair.change("ttft", "p95").why


def test_who_takes_part_in_what() -> None:
    """One that runs counts up to its first token, one that waits, failed or was half lost does not
    count."""
    running = [replace(one, phase=Phase.DECODE, closed=None, e2e_ms=None) for one in VIEWS[:10]]
    left = [replace(one, disconnected=True, finish_reason="cancelled") for one in VIEWS[10:20]]
    waiting = [
        replace(one, phase=Phase.WAITING, closed=None, ttft_ms=None, e2e_ms=None)
        for one in VIEWS[20:23]
    ]
    failed = [replace(one, error="out of memory") for one in VIEWS[23:25]]
    lost = [replace(one, incomplete=True) for one in VIEWS[25:26]]
    made = of(running + left + waiting + failed + lost + VIEWS[26:], VIEWS)
    assert made.early.eligible[0] == 10 + 10 + 34
    assert made.late.eligible[0] == 34
    assert made.left_out[0] == {
        "still waited for their first token": 3, "failed": 2, "lost some of their events": 1,
    }  # fmt: skip
    assert made.left_out[1] == {}


def test_three_contexts_stand_side_by_side_each_with_its_kind() -> None:
    cold = Traffic(rate=0.2, drift=0.02, requests=40).views(1)
    warm = Traffic(rate=4.0, drift=0.02, requests=80, cached=0.5, slots=40).views(2)
    loaded = Traffic(rate=8.0, drift=0.02, requests=80, slots=3).views(3)
    made = of(cold, warm, loaded)
    assert [column.kind for column in made.columns] == [
        "cold and idle",
        "warm and shared",
        "loaded",
    ]
    assert [(pair.before, pair.after) for pair in made.pairs] == [(0, 1), (0, 2)]
    assert made.pairs[1].explained_by == "admission"
    for pair in made.pairs:
        assert any(
            warning.startswith("contexts differ: A is cold and idle") for warning in pair.warnings
        )
    assert made.columns[0].concurrency < made.columns[1].concurrency
    for column, views in zip(made.columns, (cold, warm, loaded), strict=True):
        window = max(one.closed or 0 for one in views) - views[0].received
        assert column.window_s == pytest.approx(window / NS_PER_S)
        assert column.request_rate == pytest.approx(len(views) * NS_PER_S / window)


def test_concurrency_is_that_of_littles_law() -> None:
    (column, _) = of(VIEWS, VIEWS).columns
    total = sum(one.e2e_ms or 0 for one in VIEWS) / 1e3
    assert column.concurrency == pytest.approx(total / column.window_s, rel=0.02)


def test_what_makes_a_comparison_unfair_is_told() -> None:
    one = Lab(seed=1, max_batch=8).play(asks(20))
    two = Lab(seed=1, max_batch=16, model="other", device="cpu", cache="off").play(asks(20))
    (pair,) = compare([trace_of_state("a", one), trace_of_state("b", two)]).pairs
    told = "\n".join(pair.warnings)
    for wanted in (
        "model differs: SmolLM2-135M-Instruct in A, other in B",
        "device differs: cuda:0 in A, cpu in B",
        "largest batch differs: 8 in A, 16 in B",
        "prefix caching is on in A, off in B",
    ):
        assert wanted in told
    assert compare([trace_of_state("a", one), trace_of_state("b", one)]).pairs[0].warnings == ()


def test_a_stage_that_one_side_does_not_measure_is_not_compared() -> None:
    def without(one: RequestView) -> RequestView:
        rows = list(one.stages)
        rows[Stage.EMBED - 1] = StageView(Stage.EMBED, Status.UNAVAILABLE, reason="CUDA graph")
        return replace(one, stages=tuple(rows))

    made = of(VIEWS, [without(one) for one in VIEWS])
    (pair,) = made.pairs
    assert pair.change("embed", "p50").differs is None
    assert pair.change("embed", "p50").why == "not measured in B"
    assert any(
        "embed is measured differently: by the clock in A, unavailable: CUDA graph in B" in warning
        for warning in pair.warnings
    )


def test_parts_of_a_trace_can_be_compared() -> None:
    state = Lab(seed=1).play(asks())
    middle = state.began + 15 * NS_PER_S
    made = compare(
        [trace_of_state("first", state, end=middle), trace_of_state("second", state, begin=middle)]
    )
    assert [column.requests for column in made.columns] == [30, 30]
    assert made.pairs[0].differs is False, made.pairs[0].verdict


def test_rows_are_found_by_id_number_and_name() -> None:
    assert row_of("11").key == row_of("DECODE").key == "decode"
    assert row_of("prefill").stage is Stage.PREFILL
    assert row_of("prefill-time").stage is None
    with pytest.raises(AnalysisError, match="no stage or timer called 'gpu'"):
        row_of("gpu")


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(AnalysisError):
        of(VIEWS)
    with pytest.raises(AnalysisError):
        of(VIEWS, VIEWS, percentile="p42")


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["length", "work", "none"]), st.integers(2, 4))
def test_any_trace_can_be_compared_and_its_figures_lie_within_its_requests(
    seed: int, match: str, share: int
) -> None:
    """Whatever was cut off, lost or preempted; parts without overlaps add up to E2E and TTFT."""
    trace = simulate(seed, requests=14, blocks=60)
    whole, cut = (
        fold(trace.headers, trace.events),
        fold(trace.headers, trace.events[: len(trace.events) // share]),
    )
    traces = [trace_of_state("whole", whole), trace_of_state("cut", cut)]
    made = compare(traces, match=match, rounds=40, seed=seed)
    for row in made.rows:
        for k, one in enumerate(traces):
            known = [value for value in one.samples.values.get(row.key, ()) if value == value]
            middle = made.figures[row.key]["p50"].values[k]
            if middle is not None and row.key != "itl":
                assert min(known) - 1e-6 <= middle <= max(known) + 1e-6
    for one in traces:
        samples = one.samples
        for parts, key in ((samples.parts, "e2e"), (samples.first_parts, "ttft")):
            for line, total in zip(parts, samples.values[key], strict=True):
                if total == total and line[0] == line[0]:
                    assert line.sum() == pytest.approx(total, abs=0.01)


def test_requests_that_were_joined_late_are_matched_though_nobody_told_that_they_stream() -> None:
    late = [replace(one, streaming=None) for one in VIEWS]
    at_once = [replace(one, streaming=None, sent_chunks=1, output_tokens=20) for one in VIEWS]
    assert of(VIEWS, late).early.counts == (60, 60)
    unlike = of(VIEWS, at_once)
    assert unlike.early.factor == 0
    assert all(
        change.differs is None
        for found in unlike.pairs[0].changes.values()
        for change in found.values()
    )


def test_a_view_without_lengths_is_compared_unmatched_only() -> None:
    unknown = [view(n, n * NS_PER_S, [1.0] * 12, None, 0, 5) for n in range(1, 12)]
    assert of(unknown, unknown).pairs[0].differs is None
    assert of(unknown, unknown, match="none").pairs[0].differs is False

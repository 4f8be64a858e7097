"""Each threshold of a comparison with a case on either side, and its figures by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine_hooks.protocol.clock import NS_PER_S
from tests.compare.traffic import Traffic, view
from tests.diagnosis.scenario import Ask, Lab
from tracer.analysis.compare import Comparison, compare, trace_of_state, trace_of_views
from tracer.analysis.compare.cells import group
from tracer.analysis.compare.context import Context, of_views, warnings
from tracer.analysis.compare.explain import Case
from tracer.analysis.compare.result import Change, Part
from tracer.analysis.compare.rows import BY_KEY
from tracer.analysis.compare.samples import Reader, Samples
from tracer.state.view import RequestView

VIEWS = Traffic(drift=0.02, requests=200).views(1)


# --- the context of a column ----------------------------------------------------------------------


def context(**figures: float | None) -> Context:
    """A column without anything remarkable, but for `figures`."""
    usual = {"request_rate": 1.0, "concurrency": 1.0, "peak": 2, "company": 1.0,
             "queue_share": 0.0, "hit_share": 0.0, "preempted_share": 0.0}  # fmt: skip
    return Context("x", 10.0, 10, **(usual | figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        ({}, "cold and idle"),
        ({"company": 1.49}, "cold and idle"),
        ({"company": 1.5}, "cold and shared"),
        ({"hit_share": 0.099}, "cold and idle"),
        ({"hit_share": 0.1}, "warm and idle"),
        ({"hit_share": None}, "cold and idle"),
        ({"queue_share": 0.25, "company": 1.5}, "loaded"),
        ({"queue_share": 0.249, "company": 1.5}, "cold and shared"),
        ({"queue_share": 0.9, "company": 1.49}, "cold and idle"),  # a lone request that waits
        ({"preempted_share": 0.1}, "loaded"),
        ({"preempted_share": 0.099}, "cold and idle"),
    ],
)
def test_a_context_has_its_name_from_its_thresholds(
    figures: dict[str, float | None], kind: str
) -> None:
    assert context(**figures).kind == kind


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {}, []),
        ({}, {"request_rate": 1.49}, []),
        ({}, {"request_rate": 1.5}, ["request rates differ: 1 req/s in A, 1.5 req/s in B"]),
        ({"request_rate": 1.5}, {}, ["request rates differ: 1.5 req/s in A, 1 req/s in B"]),
        ({}, {"concurrency": 1.49}, []),
        ({}, {"concurrency": 1.5}, ["concurrencies differ: 1 in A, 1.5 in B"]),
        ({"request_rate": 0.0}, {}, []),
        ({"hit_share": 0.0}, {"hit_share": 0.09}, []),
        ({"hit_share": 0.5}, {"hit_share": 0.625},
         ["prefix cache hits differ: 50 % of prompt tokens in A, 62 % in B; "
          "prefill differs by reuse too"]),
        ({"hit_share": 0.0}, {"hit_share": None}, []),
        ({"prefix_caching": True}, {"prefix_caching": False},
         ["prefix caching is on in A, off in B"]),
        ({"prefix_caching": False}, {"prefix_caching": True},
         ["prefix caching is on in B, off in A"]),
        ({"prefix_caching": None}, {"prefix_caching": True},
         ["prefix caching is not known for A"]),
        ({"lost_events": 1200}, {}, ["A lost 1,200 events: its figures may be too low"]),
    ],
)  # fmt: skip
def test_what_differs_by_its_threshold_is_reported(
    before: dict[str, float | None], after: dict[str, float | None], said: list[str]
) -> None:
    assert warnings((context(**before), context(**after)), ("A", "B")) == said


def test_load_by_hand() -> None:
    """Two requests of 10 s, the second 5 s after the first, in a window of 20 s."""
    one, two = (
        replace(VIEWS[0], received=at * NS_PER_S, closed=(at + 10) * NS_PER_S, queue_ms=queue,
                ttft_ms=100.0, prompt_tokens=200, cached_tokens=cached, preemptions=preempted)
        for at, queue, cached, preempted in ((0, 10.0, 50, 0), (5, 30.0, 150, 2))
    )  # fmt: skip
    made = of_views("x", [one, two], begin=0, until=20 * NS_PER_S)
    assert (made.window_s, made.requests, made.request_rate) == (20.0, 2, 0.1)
    assert (made.concurrency, made.peak) == (1.0, 2)
    assert made.company == pytest.approx((5 * 1 + 5 * 4 + 5 * 1) / 20)
    assert made.queue_share == pytest.approx(40 / 200)
    assert made.hit_share == pytest.approx(200 / 400)
    assert made.preempted_share == 0.5


# --- which requests are matched -------------------------------------------------------------------


def lengths(prompts: Sequence[int]) -> Samples:
    """Requests of these prompts and equal outputs."""
    views = [view(n, n * NS_PER_S, [1.0] * 12, prompt, 0, 5) for n, prompt in enumerate(prompts, 1)]
    return Reader().read(views, lambda view: (np.empty(0), np.empty(0), 0.0))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("count", "equal", "factor"),
    [
        (11, 8, 1.0),  # 73 % of them, and eight
        (12, 8, 1.1),  # 67 %
        (10, 7, 1.1),  # 70 %, but seven
        (12, 9, 1.0),
    ],
)
def test_cells_are_as_fine_as_enough_requests_allow(count: int, equal: int, factor: float) -> None:
    """The others are 2 % longer in one trace: within 10 %, but not equal."""
    same, rest = [100] * equal, count - equal
    found = group(
        [lengths(same + [1000] * rest), lengths(same + [1020] * rest)], "length", late=False
    )
    assert found.factor == factor
    assert found.counts == ((equal, equal) if factor == 1.0 else (count, count))


def test_a_cell_weighs_the_harmonic_mean_of_its_requests_in_every_trace() -> None:
    """Two requests against four: 1 / (1/2 + 1/4) in all."""
    found = group([lengths([100] * 2), lengths([100] * 4)], "length", late=False)
    one, two = found.weights([np.ones((1, 2)), np.ones((1, 4))])
    assert one.tolist() == [pytest.approx([2 / 3] * 2)]
    assert two.tolist() == [pytest.approx([1 / 3] * 4)]
    absent, _ = found.weights([np.zeros((1, 2)), np.ones((1, 4))])
    assert absent.tolist() == [[0.0, 0.0]]


# --- how many requests a figure needs -------------------------------------------------------------


def between(views: Sequence[RequestView], **options: object) -> Comparison:
    """The requests against themselves."""
    traces = [trace_of_views("a", views), trace_of_views("b", views)]
    return compare(traces, match="none", rounds=20, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statistic", "needed"), [("mean", 8), ("p50", 8), ("p95", 40), ("p99", 200)]
)
def test_a_figure_is_compared_from_so_many_requests_on(statistic: str, needed: int) -> None:
    enough, fewer = between(VIEWS[:needed]), between(VIEWS[: needed - 1])
    assert enough.pairs[0].change("ttft", statistic).differs is False
    change = fewer.pairs[0].change("ttft", statistic)
    assert change.differs is None
    few = needed - 1
    assert change.why == f"{needed} requests needed; A has {few}, B has {few}"


@pytest.mark.parametrize(("statistic", "needed"), [("p50", 1), ("p95", 20), ("p99", 100)])
def test_a_figure_is_shown_from_so_many_requests_on(statistic: str, needed: int) -> None:
    for count in (needed, needed - 1):
        made = between(VIEWS[:count])
        if "ttft" not in made.figures:
            continue
        value = made.figures["ttft"][statistic].values[0]
        assert (value is not None) is (count == needed)


@pytest.mark.parametrize(("statistic", "needed"), [("p50", 8), ("p95", 16), ("p99", 40)])
def test_gaps_between_tokens_need_fewer_requests(statistic: str, needed: int) -> None:
    for count in (needed, needed - 1):
        state = Lab(seed=1).play([Ask(at=0.5 * n, prompt=100, output=12) for n in range(count)])
        traces = [trace_of_state(name, state) for name in ("a", "b")]
        (pair,) = compare(traces, match="none", rounds=20).pairs
        assert (pair.change("itl", statistic).differs is False) is (count == needed)


# --- what is said ---------------------------------------------------------------------------------

DIFFERS = Change(100.0, 90.0, 110.0, 10.0, 0.1, True)


def case(made: Comparison, changes: dict[str, Change], parts: Sequence[Part] = ()) -> Case:
    """A pair whose medians changed as `changes` say."""
    return Case(made, 1, {key: {"p50": change} for key, change in changes.items()}, parts, (), ())


@pytest.mark.parametrize(("second", "named"), [(15.0, True), (14.9, False)])
def test_a_second_stage_is_named_when_it_explains_enough(second: float, named: bool) -> None:
    parts = [
        Part(BY_KEY["decode"], 0.0, 100.0 - second), Part(BY_KEY["prefill"], 0.0, second),
    ]  # fmt: skip
    changes = dict.fromkeys(("e2e", "decode", "prefill"), DIFFERS)
    verdict, differs, by = case(between(VIEWS[:20]), changes, parts).verdict()
    assert differs
    assert by == "decode"
    assert ("and prefill 15 % (+15.0 ms)" in verdict) is named


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.299, ""),
        (0.301, "That says little: a rise of E2E by 30 % would hardly be seen."),
        (1.99, "by 199 % would"),
        (2.01, "by ×3.0 would"),
        (2000.0, "by more than ×1,000 would"),
    ],
)
def test_noise_that_hides_much_is_reported(share: float, words: str) -> None:
    made = between(VIEWS[:20])
    before = made.figures["e2e"]["p50"].values[0] or 0.0
    change = Change(1.0, -1.0, 1.0, share * before, 0.0, False)
    told, differs, _ = case(made, {"e2e": change}).verdict()
    assert differs is False
    assert words in told
    assert ("says little" in told) is bool(words)
    assert ("noise up to ×" in told) is (2.0 < share < 1000)


@pytest.mark.parametrize(
    ("after", "told"), [(109.9, False), (110.1, True), (90.1, False), (89.9, True)]
)
def test_matched_lengths_that_differ_are_reported(after: float, told: bool) -> None:
    made = between(VIEWS[:20])
    made = replace(made, match="length", late=replace(made.late, output=(100.0, after)))
    said = case(made, {}).warnings()
    wanted = f"even matched requests differ in output length: 100 tokens in A, {after:.0f} in B"
    assert said == ([wanted] if told else [])

"""What-if on made-up traces: changes are read, arrivals are replayed, effects have the right
sign."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.effort import thinned
from tests.state import traces
from tests.tui.timeline import Timeline
from tracer.analysis.beside.observed import Observed, observe
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.fit import Fit, fit, fit_trace
from tracer.analysis.model.config import load_model
from tracer.analysis.model.devices import DEVICES
from tracer.analysis.model.step_model import StepModel
from tracer.analysis.whatif.simulate import simulate
from tracer.analysis.whatif.whatif import (
    Factor,
    Prediction,
    describe,
    label,
    parse_changes,
    what_if,
)
from tracer.export.whatif_text import whatif_document, whatif_text
from tracer.format.text import cell_width
from tracer.state.trace_state import TraceState


@pytest.fixture(scope="module")
def busy() -> Observed:
    """An engine with more to do than it has slots for."""
    return observe(Timeline(120, rate=8.0, seed=3).state())


@pytest.fixture(scope="module")
def fitted(busy: Observed) -> Fit:
    """Its fit; on the CPU that the trace says it ran on."""
    return fit_trace(busy)


@pytest.fixture(scope="module")
def doubled(busy: Observed, fitted: Fit) -> Prediction:
    """What twice the rate would do."""
    return what_if(busy, "rate×2", fitted=fitted, replicates=2)


def test_changes_are_read_as_they_are_written() -> None:
    text = (
        "prefix-cache=on chunked=512 max-num-seqs=64 batch×2 kv-blocks=900, rate*2 device=H100 "
        "output×0.5"
    )
    assert parse_changes(text) == {
        "prefix_cache": True,
        "chunked": 512,
        "slots": Factor(2.0),
        "blocks": 900,
        "rate": Factor(2.0),
        "device": "h100-sxm",
        "output": Factor(0.5),
    }
    assert parse_changes("--enable_prefix_caching=off chunked=off") == {
        "prefix_cache": False,
        "chunked": False,
    }
    assert parse_changes("rate×1.5 batchx3") == {"rate": Factor(1.5), "slots": Factor(3.0)}
    assert describe(parse_changes("prefix-cache=off batch×2")) == "prefix-cache=off slots×2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "faster",
        "prefix-cache",
        "prefix-cache=maybe",
        "prefix-cache×2",
        "chunked=-5",
        "slots=1e3",
        "rate=2",
        "rate×0",
        "rate×nan",
        "rate×inf",
        "batch×",
        "kv-blocks=999999999999",
        "device=abacus",
        "=3",
        "slots=٣",
        "chunked×2",
    ],
)
def test_a_change_that_makes_no_sense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(AnalysisError) as caught:
        parse_changes(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_trace_is_read_as_arrivals_and_settings(busy: Observed) -> None:
    assert len(busy.arrivals) == 120
    assert busy.left_out == 0
    assert (busy.settings.slots, busy.settings.budget, busy.settings.blocks) == (16, 256, 256)
    assert busy.settings.prefix_cache
    assert [each.at for each in busy.arrivals] == sorted(each.at for each in busy.arrivals)
    assert all(each.front > 0 and each.hashes is not None for each in busy.arrivals)
    assert busy.measured.tokens == sum(each.output for each in busy.arrivals)
    assert len(busy.measured.itl) == busy.measured.tokens - 120


def test_the_context_of_each_step_is_known_from_its_members(busy: Observed) -> None:
    held = np.array([step.used or 0 for step in busy.steps]) * 16.0
    alone = np.array([step.batch for step in busy.steps]) >= 1
    assert (busy.context[alone] > 0).all()
    # Never more than the blocks in use hold, and no less than all but one block of each member.
    assert (busy.context <= held + 16.0).mean() > 0.95
    assert (busy.pairs >= busy.context * 0.49).all()


def test_the_replay_of_what_was_recorded_is_close_to_it(busy: Observed, fitted: Fit) -> None:
    told = what_if(busy, {}, fitted=fitted, replicates=2)
    assert told.replay_error is not None
    assert told.replay_error < 0.10
    assert all(metric.change == 0.0 for metric in told.metrics)
    assert all(metric.predicted == pytest.approx(metric.measured) for metric in told.metrics)
    replayed = simulate(busy.arrivals, busy.settings, fitted.step)
    assert replayed.steps == pytest.approx(len(busy.steps), rel=0.1)


@pytest.mark.parametrize(
    ("change", "metric", "sign"),
    thinned(
        [
            ("rate×2", "ttft_p50", 1),
            ("rate×0.5", "ttft_p50", -1),
            ("slots=4", "queue_p95", 1),
            ("slots=4", "itl_p50", -1),
            ("prefix-cache=off", "ttft_p50", 1),
            ("chunked=32", "itl_p95", -1),
            ("output×0.5", "e2e_p50", -1),
            ("kv-blocks=100", "ttft_p95", 1),
            ("device=h100-sxm", "itl_p50", -1),
            ("chunked=off", "itl_p95", 1),
        ],
        3,
    ),
)
def test_a_change_has_the_effect_that_everyone_expects(
    busy: Observed, fitted: Fit, change: str, metric: str, sign: int
) -> None:
    told = what_if(busy, change, fitted=fitted, replicates=3)
    found = told.metric(metric)
    assert found.change * sign > 0.02, told.sentence()
    assert found.low <= found.predicted <= found.high


def test_a_prediction_is_said_in_one_sentence_and_with_its_doubts(
    busy: Observed, fitted: Fit
) -> None:
    told = what_if(busy, "device=h200 kv-blocks=4000", fitted=fitted, replicates=2)
    assert told.sentence().startswith("with device=h200 blocks=4000: TTFT p50 ")
    assert "clients that wait" in told.notes[0]
    assert any("peaks" in note for note in told.notes)
    assert label("ttft_p95") == "TTFT p95"
    with pytest.raises(KeyError):
        told.metric("luck")


@pytest.mark.parametrize("width", [20, 60, 100])
@pytest.mark.parametrize("unicode", [True, False])
def test_a_prediction_is_printed_in_the_width_that_there_is(
    doubled: Prediction, width: int, unicode: bool
) -> None:
    told = doubled
    text = whatif_text(told, width=width, unicode=unicode)
    assert all(cell_width(line) <= width for line in text.splitlines())
    assert "TTFT p50" in text
    assert unicode or text.isascii()
    document = json.loads(msgspec.json.encode(whatif_document(told)))
    assert document["changes"] == {"rate": {"times": 2.0}}
    assert document["metrics"]["ttft_p95"]["predicted"] == told.metric("ttft_p95").predicted


def test_a_request_that_gave_one_token_has_no_gaps() -> None:
    """The figures that need them are then not there, and nothing breaks."""
    timeline = Timeline(40, rate=6.0, mean_output=1, seed=9)
    seen = observe(timeline.state())
    alone = replace(
        seen, arrivals=tuple([replace(each, output=1) for each in seen.arrivals]),
        measured=replace(seen.measured, itl=np.zeros(0)),
    )  # fmt: skip
    told = what_if(alone, "rate×2", replicates=2)
    assert told.metric("itl_p50").measured is None
    assert whatif_document(told)["metrics"]["itl_mean"]["predicted"] is None
    assert "nan" not in whatif_text(told)
    assert "ITL" not in told.sentence()


def test_turning_the_cache_on_without_token_ids_says_that_it_cannot_tell() -> None:
    timeline = Timeline(60, rate=4.0, seed=2, text=False)
    off = observe(timeline.state())
    assert all(each.hashes is None for each in off.arrivals)
    unknown = replace(off, settings=replace(off.settings, prefix_cache=False))
    assert any(
        "--with-text" in note for note in what_if(unknown, "prefix-cache=on", replicates=2).notes
    )


def test_the_same_trace_gives_the_same_prediction(busy: Observed) -> None:
    one, same = (what_if(busy, "slots=8", replicates=2, seed=5) for _ in range(2))
    assert one.metrics == same.metrics


def test_a_pool_too_small_for_a_request_is_refused(busy: Observed) -> None:
    with pytest.raises(AnalysisError, match="does not fit into"):
        what_if(busy, "kv-blocks=3")


def test_a_trace_without_an_engine_or_a_finished_request_is_refused() -> None:
    with pytest.raises(AnalysisError, match="no engine took a step"):
        observe(TraceState())
    begun = Timeline(30, rate=4.0)
    first = next(event.t for event in begun.events if type(event).__name__ == "Step")
    with pytest.raises(AnalysisError, match="no request"):
        observe(begun.state(first))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split", [False, True])
def test_any_trace_can_be_read(seed: int, split: bool) -> None:
    """One process or two, preemptions, cancellations: what cannot be used is left out and
    counted."""
    trace = traces.simulate(seed, requests=30, split=split, blocks=60)
    state = TraceState()
    for header in trace.headers:
        state.add_source(header)
    for source, event in trace.events:
        state.apply(source, event)
    seen = observe(state)
    assert sum(each.counted for each in seen.arrivals) + seen.left_out == len(state.request_ids())
    assert len(seen.measured.e2e) <= sum(each.counted for each in seen.arrivals)
    assert (seen.context >= 0).all()
    done = simulate(seen.arrivals, seen.settings, fit_of(seen))
    assert not np.isnan(done.last).any()


def fit_of(seen: Observed) -> StepModel:
    """The engine of these traces does not tell its model: any will do, only times are used."""
    shape = load_model("smollm2-135m")
    return fit(
        seen.steps, shape, DEVICES["l4"], context=seen.context, pairs=seen.pairs, resamples=2
    ).step


def test_a_request_that_still_runs_takes_its_share_of_the_steps_but_has_no_figures() -> None:
    timeline = Timeline(120, rate=8.0, seed=3)
    middle = timeline.events[len(timeline.events) // 2].t
    seen = observe(timeline.state(middle))
    running = [each for each in seen.arrivals if not each.counted]
    assert running
    assert seen.left_out >= len(running)
    assert len(seen.measured.ttft) == len(seen.arrivals) - len(running)
    # With them, what the members of each step held is known: it lies within the blocks in use.
    held = np.array([step.used or 0 for step in seen.steps]) * 16.0
    assert (seen.context <= held + 16.0).mean() > 0.95
    told = what_if(seen, {}, replicates=2)
    assert told.replay_error is not None
    assert told.replay_error < 0.15

"""A budget told as events folds back into the same twelve stages."""

from __future__ import annotations

import msgspec
import pytest

from engine_hooks.protocol.events import AnyEvent, Step
from engine_hooks.protocol.stages import Stage
from tracer.analysis.budget.budget import Budget, budget
from tracer.analysis.budget.modelled import SOURCE, TITLE, modelled_events, modelled_header
from tracer.analysis.budget.reference import reference
from tracer.analysis.budget.workload import Speculation, Workload
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.config import load_model
from tracer.analysis.model.devices import DEVICES
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase, Snapshot, Status


def folded(made: Budget) -> Snapshot:
    """The state after all of its events."""
    state = TraceState()
    state.add_source(modelled_header(made))
    for event in modelled_events(made):
        state.apply(SOURCE, event)
    assert state.unknown == 0
    return state.snapshot()


def made(workload: Workload) -> Budget:
    """On the reference device."""
    return budget(load_model("llama-3.1-8b"), DEVICES["h100-sxm"], workload)


@pytest.mark.parametrize(
    "workload",
    [Workload(), Workload(cached=1900), Workload(chunk=512), Workload(prompt=1, output=2),
     Workload(batch=16, context=1000, chunk=256), Workload(prompt=100_000, output=2, chunk=8192)],
)  # fmt: skip
def test_the_waterfall_is_the_budget(workload: Workload) -> None:
    one = made(workload)
    snapshot = folded(one)
    (view,) = snapshot.requests
    assert view.phase is Phase.DONE
    assert not view.incomplete
    for row, expected in zip(view.stages, one.stages, strict=True):
        assert row.ms == pytest.approx(expected.ms, abs=2e-5), row.stage
    assert view.e2e_ms == pytest.approx(one.total_ms, abs=1e-4)
    assert view.ttft_ms == pytest.approx(one.ttft_ms, abs=1e-4)
    assert view.unattributed_ms == pytest.approx(0.0, abs=1e-4)
    assert (view.prompt_tokens, view.cached_tokens, view.output_tokens) == (
        workload.prompt, workload.cached, workload.output
    )  # fmt: skip
    assert len(view.chunks) == one.chunks


def test_the_reference_request_takes_what_the_contract_says() -> None:
    view = folded(reference(ignore_kv=True)).requests[0]
    assert view.e2e_ms == pytest.approx(1883, rel=0.005)
    assert view.stages[Stage.DECODE - 1].share == pytest.approx(0.95, abs=0.005)


def test_it_says_of_itself_that_it_was_not_measured() -> None:
    one = made(Workload())
    assert TITLE in modelled_header(one).title
    snapshot = folded(one)
    assert TITLE in snapshot.engines[0].title
    assert all(row.status is Status.ESTIMATED and row.reason == TITLE for row in snapshot.coverage)
    assert snapshot.requests[0].stages[Stage.PREFILL - 1].status is Status.ESTIMATED


def test_time_goes_forward_and_blocks_follow_the_context() -> None:
    events = modelled_events(made(Workload(prompt=500, output=50)))
    assert [event.t for event in events] == sorted(event.t for event in events)
    steps = [event for event in events if isinstance(event, Step)]
    assert [step.n for step in steps] == list(range(1, 51))
    assert steps[0].used == 32
    assert steps[-1].used == -(-549 // 16)
    for event in events:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent) == event


def test_a_request_of_one_token_ends_with_its_first() -> None:
    view = folded(made(Workload(output=1))).requests[0]
    assert view.output_tokens == 1
    assert view.phase is Phase.DONE


def test_what_cannot_be_told_step_by_step_is_refused() -> None:
    with pytest.raises(AnalysisError, match="each one is an event"):
        modelled_events(made(Workload(output=30_000)))
    with pytest.raises(AnalysisError, match="on average"):
        modelled_events(made(Workload(speculation=Speculation())))

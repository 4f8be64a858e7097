"""Steps and latencies out of vLLM's own outputs, where its core cannot be hooked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_hooks.base.emitter import Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import unpack_u32
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm import public
from engine_hooks.vllm.public import PublicSteps
from tests.hooks.shapes import Clock, core_output, emitted, only

S = NS_PER_S
CORE = (Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE, Stage.TEARDOWN)
KEYS = {"a": 1, "b": 2}


def happened(kind: str, second: float) -> Any:
    """An `EngineCoreEvent`."""
    return SimpleNamespace(type=SimpleNamespace(name=kind), timestamp=second)


def prefill(prompt: int, cached: int = 0) -> Any:
    """A `PrefillStats`."""
    return SimpleNamespace(
        num_prompt_tokens=prompt, num_computed_tokens=prompt - cached, num_cached_tokens=cached
    )


class Run:
    """`PublicSteps` at second 100 of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost: tuple[Stage, ...] = CORE) -> None:
        self.clock = Clock(100 * S)
        monkeypatch.setattr(public, "now", self.clock)
        self.emitter = Emitter()
        reasons = {int(stage): ("vllm.core:Scheduler.schedule", "is gone") for stage in lost}
        self.steps = PublicSteps(self.emitter, reasons)

    def outputs(self, second: float | None, *some: Any) -> list[events.Event]:
        self.steps.outputs(KEYS, some, second)
        return emitted(self.emitter)

    def step(self, second: float, *some: Any) -> events.Step:
        (step,) = only(self.outputs(second, *some), events.Step)
        return step


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_the_cores_own_events_become_the_wait_of_a_request(run: Run) -> None:
    asked = [happened("QUEUED", 98), happened("SCHEDULED", 98.5), happened("PREEMPTED", 98.75)]
    found = run.outputs(99, core_output("a", 1, events=asked, prefill_stats=prefill(40, 16)))
    (queued,) = only(found, events.Queued)
    (scheduled,) = only(found, events.Scheduled)
    (preempted,) = only(found, events.Preempted)
    assert (queued.t, queued.key, queued.prompt_tokens) == (98 * S, 1, 40)
    assert (scheduled.t, scheduled.lookup) == (98.5 * S, 98.5 * S)
    assert (scheduled.cached_tokens, scheduled.resumed) == (16, False)
    assert (preempted.t, preempted.total) == (98.75 * S, 1)
    (step,) = only(found, events.Step)
    assert (step.t, step.token, step.end, step.preempted) == (98.5 * S, 0.5 * S, 0.5 * S, 1)
    assert list(unpack_u32(step.odd)) == [1, 24, 1], "40 tokens less the 16 cached ones"


def test_without_its_prefill_a_request_is_back(run: Run) -> None:
    again = [happened("QUEUED", 98), happened("SCHEDULED", 98.5)]
    found = run.outputs(99, core_output("a", 1, events=again))
    assert [event.prompt_tokens for event in only(found, events.Queued)] == [-1]
    (scheduled,) = only(found, events.Scheduled)
    assert (scheduled.cached_tokens, scheduled.resumed) == (-1, True)


@pytest.mark.parametrize(("lost", "queued", "scheduled"), [
    (CORE, 1, 1), ((Stage.DECODE,), 0, 0),
    ((Stage.DECODE, Stage.ADMISSION), 1, 1), ((Stage.DECODE, Stage.KV_ALLOC), 0, 1),
])  # fmt: skip
def test_only_what_the_hooks_do_not_tell_is_told(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[Stage, ...], queued: int, scheduled: int
) -> None:
    run = Run(monkeypatch, lost)
    asked = [happened("QUEUED", 98), happened("SCHEDULED", 98.5)]
    found = run.outputs(99, core_output("a", 1, events=asked, prefill_stats=prefill(4)))
    assert len(only(found, events.Queued)) == queued
    assert len(only(found, events.Scheduled)) == scheduled


@pytest.mark.parametrize(("second", "told"), [
    (100, True), (100.1, False), (None, False), (0.0, False),
])  # fmt: skip
def test_a_stamp_of_another_clock_says_nothing(run: Run, second: float | None, told: bool) -> None:
    assert bool(run.outputs(second, core_output("a", 1))) == told


@pytest.mark.parametrize(("age", "told"), [(120 * S, False), (120 * S - 1, True)])
def test_a_stamp_older_than_two_minutes_says_nothing(run: Run, age: int, told: bool) -> None:
    run.clock.at = 50 * S + age
    assert bool(run.outputs(50, core_output("a", 1))) == told


def test_members_come_and_go_and_steps_follow_each_other(run: Run) -> None:
    first = run.step(90, core_output("a", 1), core_output("unknown", 1))
    second = run.step(91, core_output("a", 1), core_output("b", 0))
    third = run.step(92, core_output("b", 2))
    assert [(step.n, step.batch) for step in (first, second, third)] == [(1, 1), (2, 2), (3, 1)]
    assert [list(unpack_u32(step.joined)) for step in (first, second, third)] == [[1], [2], []]
    assert [list(unpack_u32(step.left)) for step in (first, second, third)] == [[], [], [1]]
    assert [list(unpack_u32(step.odd)) for step in (first, second, third)] == [
        [], [2, 1, 0], [2, 1, 2]
    ]  # fmt: skip
    assert [step.tokens for step in (first, second, third)] == [1, 2, 1]
    # somebody joined at a time that nobody told: no length; else from the end of the one before
    assert [(step.t, step.token) for step in (first, second, third)] == [
        (90 * S, 0), (91 * S, 0), (91 * S + 1, S - 1)
    ]  # fmt: skip


def test_a_step_never_starts_before_the_one_before_it(run: Run) -> None:
    run.step(90, core_output("a", 1))
    assert run.step(91, core_output("a", 1)).t == 90 * S + 1
    early = [happened("SCHEDULED", 80)]
    step = run.step(91.5, core_output("b", 1, events=early, prefill_stats=prefill(300)))
    assert step.t == 90 * S + 2, "b was scheduled at 80, before steps that are told already"
    assert (step.tokens, list(unpack_u32(step.odd))) == (300, [2, 300, 1])


@pytest.mark.parametrize(("blocks", "used", "free"), [(-1, -1, -1), (0, -1, -1), (1, 0, 1),
                                                      (200, 50, 150)])  # fmt: skip
def test_gauges_are_those_of_the_last_statistics(
    run: Run, blocks: int, used: int, free: int
) -> None:
    run.steps.blocks = blocks
    run.steps.gauges(SimpleNamespace(num_running_reqs=3, num_waiting_reqs=4, kv_cache_usage=0.25))
    run.steps.gauges(None)
    step = run.step(90, core_output("a", 1))
    assert (step.running, step.waiting, step.used, step.free) == (3, 4, used, free)


@pytest.mark.parametrize(("reason", "told"), [
    ("stop", "stop"), ("length", "length"), ("abort", "cancelled"), ("error", "failed"),
])  # fmt: skip
def test_ends_are_those_of_the_outputs(run: Run, reason: str, told: str) -> None:
    found = run.outputs(90, core_output("a", 1, finish_reason=reason), core_output("b", 1))
    (end,) = only(found, events.Finished)
    assert (end.t, end.key, end.reason) == (90 * S, 1, told)
    assert [event.key for event in only(found, events.Released)] == [1]


def test_ends_that_the_hooks_tell_are_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, (Stage.DECODE,))
    found = run.outputs(90, core_output("a", 1, finish_reason="stop"))
    assert [type(event) for event in found] == [events.Step]


def test_what_is_estimated_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, (Stage.DECODE, Stage.TEARDOWN))
    run.steps.report_coverage()
    told = {event.stage: event for event in only(emitted(run.emitter), events.Coverage)}
    assert {stage: event.status for stage, event in told.items()} == {
        Stage.PREFILL: "estimated", Stage.DECODE: "estimated", Stage.TEARDOWN: "estimated",
        Stage.EMBED: "unavailable", Stage.LM_HEAD: "unavailable", Stage.SAMPLE: "unavailable",
    }  # fmt: skip
    assert "Scheduler.schedule is gone" in told[Stage.DECODE].reason

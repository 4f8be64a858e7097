"""Device times against a device whose times are known."""

from __future__ import annotations

import pytest

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tests.hooks.simulated_device import Costs, Engine, Machine, Told

CASES = {
    "device-bound": Costs(),
    "input kernels of 0.3 ms": Costs(inputs=0.3),
    "input kernels of 3 ms": Costs(inputs=3.0),
    "a drafter behind the sampler": Costs(draft=4.0),
    "input kernels and a drafter": Costs(inputs=1.0, draft=2.0),
    "host-bound": Costs(layers=2.0, schedule=4.0, collect=3.0),
    "host and device alike": Costs(layers=2.0, schedule=1.5, launch=0.8, collect=0.5),
    "300 ms of layers": Costs(layers=300.0, sample=30.0, inputs=40.0),
}


def wrong(told: list[Told]) -> dict[int, dict[str, float]]:
    """Step → part → error in ms, for those that are told wrong."""
    return {
        one.step.n: {part: error / NS_PER_MS for part, error in one.errors().items()}
        for one in told if any(abs(error) > one.allowed for error in one.errors().values())
    }  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("costs", CASES.values(), ids=CASES)
def test_spans_stay_true_over_500_steps(
    costs: Costs, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Engine(Machine(), monkeypatch, ahead=ahead).run(costs, 500)
    assert [one.step.timing for one in told] == [events.Timing.DEVICE] * 500
    assert not wrong(told)


@pytest.mark.parametrize("rate", [1 - 1e-4, 1 + 1e-4])
def test_clocks_that_drift_apart_by_0_1_ms_a_second(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Engine(Machine(rate), monkeypatch, ahead=True).run(Costs(layers=49.0), 2_000)
    assert told[-1].step.t - told[0].step.t > 90 * NS_PER_S
    assert not wrong(told)


def test_an_engine_that_worked_before_it_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Machine(), monkeypatch, ahead=True)
    engine.start(Costs(layers=40.0))
    told = engine.run(Costs(), 100)
    assert not wrong(told)


def test_an_idle_hour_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1 + 5e-5)
    engine = Engine(machine, monkeypatch, ahead=True)
    told = engine.run(Costs(), 40)
    machine.now += 3600 * NS_PER_S
    told += engine.run(Costs(), 40)
    assert not wrong(told)


def test_from_busy_to_idle_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Machine(), monkeypatch, ahead=True)
    told = [
        one
        for costs in (CASES["device-bound"], CASES["host-bound"], CASES["300 ms of layers"]) * 2
        for one in engine.run(costs, 60)
    ]
    assert not wrong(told)


def test_what_is_not_complete_is_not_waited_for_and_the_next_step_is_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    engine = Engine(machine, monkeypatch, ahead=True)
    told = engine.run(Costs(), 30)
    engine._launch(Costs())
    timer, early = engine.open.pop()
    launched = early.step.sampled
    engine.clock.fill(timer, early.step)  # the host asks too soon
    assert early.step.timing == events.Timing.LAUNCH
    assert early.step.sampled == launched
    told += engine.run(Costs(), 30)
    assert not wrong(told)


def test_events_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    Engine(machine, monkeypatch, ahead=True).run(Costs(), 200)
    assert machine.events == 15  # two steps of seven that are open, and the end of the one before

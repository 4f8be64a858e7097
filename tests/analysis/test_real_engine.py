"""Fit and what-if against the real engine: SmolLM2 on transformers' continuous batching, on one
thread.

The same requests run under several settings; what is predicted from the one is compared with what
the others measured. Times are CPU times of the engine's process (see `engine_runs`), and every
changed run stands between two unchanged ones, so that other work on the machine does not decide the
test. ``pytest -s`` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.runs import Plan, play
from tracer.analysis.beside.observed import Observed, observe
from tracer.analysis.fit.fit import Fit, fit
from tracer.analysis.whatif.whatif import Prediction, label, measured_figures, what_if

pytestmark = pytest.mark.slow

BASE = Plan(requests=9, rate=12.0, prompt=80, output=12)
PLANS = {
    "base 1": BASE,
    "cache": replace(BASE, share=True),
    "base 2": BASE,
    "chunk": replace(BASE, tokens=64),
    "slots": replace(BASE, slots=4),
    "base 3": BASE,
}
CHANGES = {"cache": "prefix-cache=on", "chunk": "chunked=64", "slots": "max-num-seqs=4"}
AROUND = {
    "cache": ("base 1", "base 2"),
    "chunk": ("base 2", "base 3"),
    "slots": ("base 2", "base 3"),
}
COMPARED = ("ttft_p50", "ttft_p95", "itl_mean", "e2e_p50", "throughput")
STEP_ERROR, PREFILL_ERROR = 0.15, 0.20
"""How far the fit may be off."""
CLEAR = 0.15
"""A measured change below it is within what two equal runs differ by: its sign says nothing."""
LIMIT_S = 280
"""When the machine is so busy that the runs do not end, the test fails rather than hangs."""


@dataclass(frozen=True)
class Real:
    """What was measured, and the fit of the unchanged runs."""

    seen: dict[str, Observed]
    fit: Fit
    predicted: dict[str, tuple[Prediction, ...]]


@pytest.fixture(scope="module")
def real(model_dir: Path) -> Real:
    return measure(model_dir)


def measure(model_dir: Path) -> Real:
    """Run the engine under all plans."""
    runs = play(model_dir, PLANS, LIMIT_S)
    print("\n" + runs.log)
    seen = {name: observe(state) for name, state in runs.states.items()}
    bases = [found for name, found in seen.items() if name.startswith("base")]
    first = bases[0]
    fitted = fit(
        [step for each in bases for step in each.steps],
        first.model(),
        first.device(),
        dense=first.dense,
        context=np.concatenate([each.context for each in bases]),
        pairs=np.concatenate([each.pairs for each in bases]),
    )
    predicted = {
        name: tuple(what_if(seen[base], CHANGES[name], fitted=fitted) for base in AROUND[name])
        for name in CHANGES
    }
    return Real(seen, fitted, predicted)


def compared(real: Real) -> list[tuple[str, str, float, float, float]]:
    """(run, figure, unchanged, measured, predicted): means of the two runs around each changed
    one."""
    rows = []
    for name, predictions in real.predicted.items():
        measured = measured_figures(real.seen[name])
        for figure in COMPARED:
            found = [prediction.metric(figure) for prediction in predictions]
            before = float(np.exp(np.mean([np.log(each.measured or np.nan) for each in found])))
            after = float(np.exp(np.mean([np.log(each.predicted) for each in found])))
            rows.append((name, figure, before, measured[figure], after))
    return rows


def repeatability(real: Real) -> float:
    """By how much the same step differs between equal runs, at the median: no prediction can be
    better than that."""
    times = [
        np.array([(step.end - step.begin) / 1e6 for step in found.steps])
        for name, found in real.seen.items()
        if name.startswith("base")
    ]
    steps = min(map(len, times))
    pairs = [
        (one[:steps], other[:steps]) for at, one in enumerate(times) for other in times[at + 1 :]
    ]
    return max(float(np.median(np.abs(one / other - 1))) for one, other in pairs)


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_the_fit_holds_for_steps_that_it_has_not_seen(real: Real, model_dir: Path) -> None:
    if (real.fit.step_error or 1.0) >= STEP_ERROR or (
        real.fit.prefill_error or 1.0
    ) >= PREFILL_ERROR:
        real = measure(model_dir)  # other programs can make some of an engine's steps slow
    found, floor = real.fit, repeatability(real)
    assert found.step_error is not None
    assert found.prefill_error is not None
    print("\n" + found.sentence())
    print(
        f"steps {found.steps}: {found.step_error:.0%} off out of sample, prefill "
        f"{found.prefill_error:.0%}, "
        f"{found.seen_error:.0%} in sample; the same step differs by {floor:.0%} between equal runs"
    )
    assert found.step_error < max(STEP_ERROR, floor)
    assert found.prefill_error < max(PREFILL_ERROR, floor)
    assert 0.02 < found.mbu.value < 1.5
    assert 0.02 < found.decode_share.value < 1.0
    assert found.sentence().startswith("decode runs at ")


def test_the_replay_takes_the_steps_that_the_engine_took(real: Real) -> None:
    """Scheduling is modelled exactly: who runs in which step does not depend on how long it takes,
    in these runs."""
    for name, predictions in real.predicted.items():
        taken = len(real.seen[name].steps)
        for prediction in predictions:
            assert prediction.after.steps == pytest.approx(taken, rel=0.15), name
    (one, _) = real.predicted["cache"]
    hits = sum(arrival.cached for arrival in real.seen["cache"].arrivals)
    assert hits > 0
    assert float(one.after.cached.sum()) == pytest.approx(hits, rel=0.15)


def wrong(rows: list[tuple[str, str, float, float, float]]) -> dict[tuple[str, str], str]:
    """(run, figure) → in words, for the clear changes whose sign was predicted wrong."""
    found = {}
    for name, figure, before, measured, predicted in rows:
        was, told = measured / before - 1, predicted / before - 1
        if abs(was) > CLEAR and was * told <= 0:
            found[name, figure] = f"{name}: {figure} changed by {was:+.0%}, predicted {told:+.0%}"
    return found


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_predicted_changes_have_the_right_sign(real: Real, model_dir: Path) -> None:
    """A prediction is wrong when two measurements say so: other programs can make one run of an
    engine slow. How far off predictions are is for `tests.bench.whatif_truth` to say."""
    rows = compared(real)
    if wrong(rows):
        rows_again = compared(measure(model_dir))
        both = wrong(rows).keys() & wrong(rows_again).keys()
        assert not both, [wrong(rows)[each] for each in both]
        rows = rows_again
    errors = []
    print(
        f"\n{'':<8}{'':<12}{'unchanged':>11}{'measured':>11}{'predicted':>11}{'off':>7}   change "
        "measured, predicted"
    )
    for name, figure, before, measured, predicted in rows:
        off, was, told = predicted / measured - 1, measured / before - 1, predicted / before - 1
        errors.append(abs(off))
        print(
            f"{name:<8}{label(figure):<12}{before:>11.1f}{measured:>11.1f}{predicted:>11.1f}"
            f"{off:>7.0%}   {was:+.0%}, {told:+.0%}"
        )
    print(f"median error {np.median(errors):.0%}, worst {max(errors):.0%}")

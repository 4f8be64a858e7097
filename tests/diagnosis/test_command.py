"""``tracer diagnose``: arguments, baseline, clients, exit codes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.diagnosis.scenario import Ask, Lab, poisson
from tracer.analysis.diagnosis import Diagnosis
from tracer.analysis.errors import AnalysisError
from tracer.cli import target_state
from tracer.cli.diagnose import add_arguments, diagnosis_of
from tracer.state.trace_state import TraceState


@pytest.fixture(scope="module")
def states() -> dict[str, TraceState]:
    arrivals = [Ask(t, 1000, 30) for t in poisson(0.6, 50)]
    return {
        "good.trace": Lab(prefill_ms=0.2, budget=128).play(list(arrivals)),
        "slow.trace": Lab(prefill_ms=0.5, budget=128).play(list(arrivals)),
        "sampler.trace": Lab(sample_ms=lambda t: 30).play(list(arrivals)),
    }


class Answer(NamedTuple):
    diagnosis: Diagnosis
    code: int


def call(states: dict[str, TraceState], *words: str) -> Answer:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    options = parser.parse_args(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_state, "observed", lambda target, seconds: states[target])
        diagnosis = diagnosis_of(options)
    return Answer(diagnosis, diagnosis.exit_code(options.fail_on))


def test_a_trace_is_diagnosed_and_exits_with_0(states: dict[str, TraceState]) -> None:
    answer = call(states, "sampler.trace")
    assert answer.code == 0 and answer.diagnosis.findings[0].rule == "sampler"


@pytest.mark.parametrize(
    ("word", "code"), [("sampler", 1), ("9", 1), ("any", 1), ("Sample", 1), ("decode", 0)]
)
def test_fail_on_decides_the_exit_code(states: dict[str, TraceState], word: str, code: int) -> None:
    assert call(states, "sampler.trace", "--fail-on", "host-stall", "--fail-on", word).code == code


def test_a_baseline_is_loaded_the_same_way(states: dict[str, TraceState]) -> None:
    assert call(states, "slow.trace").diagnosis.findings == ()
    answer = call(states, "slow.trace", "--baseline", "good.trace", "--fail-on", "prefill")
    assert answer.code == 1 and answer.diagnosis.findings[0].rule == "slower-than-baseline"


def test_an_unknown_rule_is_wrong_usage_in_one_line(states: dict[str, TraceState]) -> None:
    with pytest.raises(
        (argparse.ArgumentError, SystemExit), match="no rule or stage called 'bogus'"
    ):
        call(states, "good.trace", "--fail-on", "bogus")


def test_a_file_of_client_times_that_is_not_there_is_told_in_one_line(
    states: dict[str, TraceState], tmp_path: Path
) -> None:
    with pytest.raises(AnalysisError, match="cannot read"):
        call(states, "good.trace", "--clients", str(tmp_path / "none.jsonl"))

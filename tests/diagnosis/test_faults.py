"""The fault lab: what each fault is made of, and two of them on a real engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from engine_hooks.faults import injection, means, transformers, vllm
from engine_hooks.faults.means import Gate
from engine_hooks.protocol.environment import FAULT
from tests.cli.commands import Commands
from tracer.analysis.diagnosis.rules import NAMES
from tracer.cli.main import main
from tracer.demo import faults
from tracer.demo.launch import LAUNCHERS
from tracer.demo.prompts import Plan

DEMO = (
    "transformers",
    "serve",
    "model",
    "--cb-num-blocks",
    "160",
    "--cb-max-batch-tokens",
    "256",
    "--port",
    "1",
)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_each_fault_stands_for_findings_that_exist(name: str) -> None:
    fault = faults.fault(name)
    assert set(fault.expect) <= set(NAMES) and bool(fault.expect) == (name != "healthy")
    assert fault.traffic in faults.SCRIPTS and fault.summary


@pytest.mark.parametrize(("spec", "said"), [
    ("x", "no fault called 'x'; faults are healthy, overload"),
    ("", "no fault called ''"),
    ("overload+nonsense", "no fault called 'nonsense'"),
    ("slow-sampler@soon", "'slow-sampler@soon': after @ must be a number of seconds"),
    ("slow-sampler@-1", "'slow-sampler@-1': after @ must be a number of seconds"),
    ("slow-sampler@nan", "'slow-sampler@nan': after @ must be a number of seconds"),
    ("kv-too-small@20", "kv-too-small is made of the server's options: it cannot start half-way"),
    ("overload+hanging-up", "these need different clients"),
])  # fmt: skip
def test_what_is_no_fault_is_refused_in_one_line(spec: str, said: str) -> None:
    with pytest.raises(faults.FaultError, match=re.escape(said)) as raised:
        faults.fault(spec)
    assert "\n" not in str(raised.value)


def test_the_command_line_refuses_an_unknown_fault_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--fault", "x"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1 and "doubled-bos" in told


def test_the_help_of_demo_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    told = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert all(name in told for name in faults.FAULTS)


@pytest.mark.parametrize(
    "spec", ["slow-sampler@20", "overload+timestamp-in-system-prompt", "doubled-bos+healthy@5"]
)
def test_a_fault_is_found_again_by_its_spec(spec: str) -> None:
    assert faults.fault(faults.fault(spec).spec) == faults.fault(spec)


def test_two_faults_at_once_have_the_parts_of_both() -> None:
    both = faults.fault("overload+timestamp-in-system-prompt")
    assert both.traffic == "prompts" and both.clock and both.rate == faults.FAULTS["overload"].rate
    assert both.right(["over-capacity", "prefix-differs"]) and not both.right(["over-capacity"])
    script = faults.FaultScript(both, 0)
    plans = [script.next() for _ in range(3)]
    assert all(plan.kind == "burst" and plan.system.startswith("The time is ") for plan in plans)
    inside = faults.fault("doubled-bos+slow-stream")
    assert faults.environment(inside) == {"TRACER_FAULT": "doubled-bos+slow-stream"}


def test_the_right_answer_to_no_fault_is_silence() -> None:
    healthy = faults.fault("healthy")
    assert healthy.right([]) and not healthy.right(["sampler"])


def test_clients_are_everyday_ones_until_the_fault_begins() -> None:
    now = 100.0
    script = faults.FaultScript(faults.fault("hanging-up@30"), 1, lambda: now)
    assert {script.next().kind for _ in range(20)} <= {"question", "chat", "classify"}
    now = 129.0
    assert script.next().kind != "hang-up"
    now = 131.0
    assert "hang-up" in {script.next().kind for _ in range(8)}


def test_a_clock_that_begins_half_way_goes_on_with_the_same_chats() -> None:
    now = 0.0
    script = faults.FaultScript(faults.fault("timestamp-in-system-prompt@10"), 1, lambda: now)
    before = script.next()
    now = 10.0
    after = script.next()
    assert (
        before.system
        and after.system.endswith(before.system)
        and after.system.startswith("The time is ")
    )


def test_a_gate_counts_from_its_first_call_and_says_when_it_opens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 50.0
    monkeypatch.setattr(means.time, "monotonic", lambda: at)
    gate = means.Gate(20)
    assert not gate()
    at = 69.0
    assert not gate()
    at = 70.5
    assert gate() and gate()
    told = capsys.readouterr().err
    assert told.count("the fault begins at ") == 1


def test_a_wrapped_function_is_the_engines_own_until_the_gate_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("some_engine")
    module.step = lambda value: value + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_engine", module)
    is_open = False
    means.wrap(lambda: is_open, "some_engine:step", lambda original, value: -original(value))  # type: ignore[arg-type]
    assert module.step(1) == 2
    is_open = True
    assert module.step(1) == -2


def test_faults_made_outside_the_engine_are_not_asked_of_it() -> None:
    mixed = faults.fault("overload+slow-sampler@20")
    assert faults.environment(mixed) == {"TRACER_FAULT": "slow-sampler@20"}


def test_a_variable_that_names_no_fault_is_told_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[Gate] = []
    fault = types.SimpleNamespace(after=transformers.ENGINE, install=installed.append)
    names = dict.fromkeys(transformers.FAULTS, fault)
    monkeypatch.setattr(transformers, "FAULTS", names)
    monkeypatch.setenv(FAULT, "nonsense")
    injection.inject(transformers.ENGINE)
    assert installed == [] and "no fault called 'nonsense'" in capsys.readouterr().err
    monkeypatch.setenv(FAULT, "slow-sampler")
    injection.inject(transformers.ENGINE)
    assert len(installed) == 1 and "fault 'slow-sampler' is in" in capsys.readouterr().err


VLLM = (
    "vllm",
    "serve",
    "model",
    "--max-num-batched-tokens",
    "256",
    "--num-gpu-blocks-override",
    "81",
)


def test_each_engine_has_options_of_its_own() -> None:
    command = faults.command(faults.fault("long-prompt-no-chunking"), VLLM, "vllm")
    assert command[-1] == "--no-enable-chunked-prefill" and "--cb-num-blocks" not in command
    assert command[command.index("--max-num-batched-tokens") + 1] == "4096"
    assert all(
        set(fault.options) == set(fault.rate) == set(LAUNCHERS) for fault in faults.FAULTS.values()
    )


def test_a_faults_options_replace_those_of_the_demo_or_are_added() -> None:
    command = faults.command(faults.fault("long-prompt-no-chunking"), DEMO)
    assert command[command.index("--cb-max-batch-tokens") + 1] == "4096" and len(command) == len(
        DEMO
    )
    other = faults.Fault("f", "s", (), {}, options={"transformers": {"--log-level": "debug"}})
    assert faults.command(other, DEMO) == (*DEMO, "--log-level", "debug")


def test_only_faults_inside_the_engine_touch_its_environment() -> None:
    for fault in faults.FAULTS.values():
        assert faults.environment(fault) == ({"TRACER_FAULT": fault.name} if fault.injected else {})
        assert not fault.injected or fault.name in transformers.FAULTS
        assert not fault.injected or fault.name in vllm.FAULTS


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_clients_of_a_fault_are_the_same_for_the_same_seed(name: str) -> None:
    fault = faults.fault(name)
    one, two = faults.FaultScript(fault, 3), faults.FaultScript(fault, 3)
    plans = [(one.next(), two.next()) for _ in range(20)]
    assert all(isinstance(plan, Plan) and plan.turns and plan.max_tokens > 0 for plan, _ in plans)
    assert all(
        plan.turns == other.turns and plan.max_tokens == other.max_tokens for plan, other in plans
    )


def test_the_clocks_system_prompts_differ_near_their_top_alone() -> None:
    script = faults.FaultScript(faults.fault("timestamp-in-system-prompt"), 0)
    systems = [script.next().system for _ in range(3)]
    assert len({system.split(". ", 1)[1] for system in systems}) == 1
    assert all(system.startswith("The time is ") for system in systems)


def test_a_process_without_the_variable_never_loads_the_faults() -> None:
    code = (
        "import engine_hooks.inject, sys; engine_hooks.inject.install(); "
        "print('engine_hooks.faults' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.mark.slow
def test_two_faults_of_a_demo_are_found_in_a_real_engine(model_dir: Path, tmp_path: Path) -> None:
    """Through the door that a user takes, and half-way: the sampler gets slow after the first
    seconds."""
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    tracer = Commands(sockets, tmp_path)
    # while other programs have the cores, little is answered, and all is slow
    for seconds in ("12", "12", "20"):
        done = tracer.run(
            "demo",
            "--model",
            str(model_dir),
            "--fault",
            "slow-sampler+doubled-bos@3",
            "--rate",
            "1.2",
            "--seconds",
            seconds,
            "--json",
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert (
            document["fault"]["name"] == "slow-sampler+doubled-bos"
            and document["fault"]["after_s"] == 3
        )
        found = {finding["rule"] for finding in document["diagnosis"]["findings"]}
        if {"sampler", "doubled-bos"} <= found:
            break
    assert {"sampler", "doubled-bos"} <= found
    assert (
        document["diagnosis"]["verdict"].startswith("stage 9, sample")
        and not document["diagnosis"]["healthy"]
    )

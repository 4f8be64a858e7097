"""The fault lab: what each fault is made of, and two of them on a real engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from engine_hooks import fault_injection, fault_traffic, faults
from engine_hooks.prompts import Plan
from tests.hooks.server import serving
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.analysis.diagnosis.rules import NAMES

DEMO = ("transformers", "serve", "model", "--cb-num-blocks", "160", "--cb-max-batch-tokens", "256", "--port", "1")


@pytest.mark.parametrize("name", faults.FAULTS)
def test_each_fault_stands_for_findings_that_exist(name: str) -> None:
    fault = faults.fault(name)
    assert set(fault.expect) <= set(NAMES) and bool(fault.expect) == (name != "healthy")
    assert fault.traffic in fault_traffic.SCRIPTS and fault.summary


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no fault called 'x'; faults are healthy, overload"):
        faults.fault("x")


def test_a_faults_options_replace_those_of_the_demo_or_are_added() -> None:
    command = faults.command(faults.fault("long-prompt-no-chunking"), DEMO)
    assert command[command.index("--cb-max-batch-tokens") + 1] == "4096" and len(command) == len(DEMO)
    other = faults.Fault("f", "s", (), {}, options={"transformers": {"--log-level": "debug"}})
    assert faults.command(other, DEMO) == (*DEMO, "--log-level", "debug")


def test_only_faults_inside_the_engine_touch_its_environment() -> None:
    for fault in faults.FAULTS.values():
        assert faults.environment(fault) == ({"TRACER_FAULT": fault.name} if fault.injected else {})
        assert not fault.injected or fault.name in fault_injection._FAULTS


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_clients_of_a_fault_are_the_same_for_the_same_seed(name: str) -> None:
    fault = faults.fault(name)
    one, two = fault_traffic.FaultScript(fault, 3), fault_traffic.FaultScript(fault, 3)
    plans = [(one.next(), two.next()) for _ in range(20)]
    assert all(isinstance(plan, Plan) and plan.turns and plan.max_tokens > 0 for plan, _ in plans)
    assert all(plan.turns == other.turns and plan.max_tokens == other.max_tokens for plan, other in plans)


def test_the_clocks_system_prompts_differ_near_their_top_alone() -> None:
    script = fault_traffic.FaultScript(faults.fault("timestamp-in-system-prompt"), 0)
    systems = [script.next().system for _ in range(3)]
    assert len({system.split(". ", 1)[1] for system in systems}) == 1
    assert all(system.startswith("The time is ") for system in systems)


def test_a_process_without_the_variable_never_loads_the_faults() -> None:
    code = "import engine_hooks.inject, sys; engine_hooks.inject.install(); print('engine_hooks.faults' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [("slow-sampler", "sampler"), ("doubled-bos", "doubled-bos")])
def test_a_fault_inside_a_real_engine_is_found(
    name: str, rule: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, name)
    state = ObservedState()

    async def talk(url: str, model: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def ask(number: int) -> None:
                stream = await client.chat.completions.create(
                    model=model, stream=True, max_tokens=8,
                    messages=[{"role": "user", "content": f"What is {number} plus {number + 1}?"}],
                )  # fmt: skip
                async for _ in stream:
                    pass

            for first in range(0, 8, 2):
                await asyncio.gather(ask(first), ask(first + 1))

    with serving(model_dir, tmp_path) as server, server.collect() as collector:
        asyncio.run(talk(server.url, server.model))
    for event in collector.events:
        state.apply("server", event)
    assert rule in [finding.rule for finding in diagnose(state).findings]

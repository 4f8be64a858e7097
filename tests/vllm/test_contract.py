"""What the hooks rely on, against the installed vLLM; and the way of a pass's marks from the worker
to the step."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine_hooks
from engine_hooks.base.emitter import Emitter
from engine_hooks.base.patching import Patches
from engine_hooks.protocol import events
from engine_hooks.vllm import plugin
from engine_hooks.vllm.marks import TAG, Marks, unpack
from engine_hooks.vllm.roles import Roles
from engine_hooks.vllm.worker import V2, WorkerHooks
from tests.vllm.server import engine_environment

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.vllm
def test_every_place_of_the_hook_tables_is_as_we_know_it(
    python_with_vllm: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [str(python_with_vllm), str(HERE / "contract.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=tmp_path,
        env=engine_environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("tested"), f"vLLM {said['version']} is not one of the tested versions"
    said.pop("version")
    calls = said.pop("calls")
    assert calls == {}, "a runner no longer calls what its hooks sit on"
    assert set(said) == {
        "core",
        "front",
        "server",
        "offline",
        "worker",
        "runner V1",
        "runner V2",
        "fields",
    }
    for table in said.values():
        assert table["misses"] == {}
        assert table["places"] > 0


def test_the_plugin_is_inert_unless_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACER", raising=False)
    plugin.register()
    assert plugin._hooks is None


def test_an_engine_whose_core_is_elsewhere_is_refused_with_what_to_set() -> None:
    elsewhere = type("LLM", (), {"__module__": "vllm.entrypoints.llm"})()
    elsewhere.llm_engine = types.SimpleNamespace(engine_core=types.SimpleNamespace())
    with pytest.raises(
        engine_hooks.UnknownEngineError, match="set TRACER=1 before it is made"
    ) as raised:
        engine_hooks.attach(elsewhere)
    assert "\n" not in str(raised.value)


def test_the_plugin_loads_nothing_but_the_vocabulary() -> None:
    code = (
        "import sys, engine_hooks.vllm.plugin as v; v.register();"
        "print([m for m in sys.modules if m.partition('.')[0] in"
        " ('torch', 'vllm', 'transformers', 'textual', 'numpy', 'rich', 'zstandard', "
        "'platformdirs')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.strip() == "[]"


def test_a_forked_process_starts_with_nothing_of_its_parents() -> None:
    code = (
        "import os\n"
        "from engine_hooks.base.emitter import FRONT, emitter\n"
        "from engine_hooks.protocol.stages import Stage\n"
        "trace = emitter()\n"
        "trace.hold('parents', FRONT)\n"
        "trace.cover(Stage.RECEIVE, 'measured', 'here')\n"
        "pid = os.fork()\n"
        "pid and os.waitpid(pid, 0)\n"
        "print('parent' if pid else 'child', trace.known('parents'), len(trace.coverage), "
        "trace.buffer.emitted)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["child False 0 0", "parent True 1 1"]


# --- marks ----------------------------------------------------------------------------------------


def test_marks_of_a_worker_become_offsets_of_its_step() -> None:
    marks = Marks(7, 1_000)
    took = marks.step
    took.launched, took.layers, took.head, took.token = 100, 200, 900, 1_500
    step = events.Step(1_000, 7)
    unpack(types.SimpleNamespace(**{TAG: marks.pack()}), step)
    parts = (step.launched, step.embed, step.layers, step.head, step.logits, step.token)
    assert parts == (100, -1, 200, 900, -1, 1_500)


def test_marks_of_another_step_or_another_host_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = Marks(7, 1_000)
    marks.step.launched = marks.step.token = 100
    marks.facts = (1, 2)
    output = types.SimpleNamespace(**{TAG: marks.pack()})
    another, bare, elsewhere = events.Step(1_000, 8), events.Step(1_000, 7), events.Step(1_000, 7)
    assert unpack(output, another) is None
    assert unpack(types.SimpleNamespace(), bare) is None
    monkeypatch.setattr("engine_hooks.vllm.marks.HERE", 12345)
    assert unpack(output, elsewhere) == (1, 2), "facts hold on every host"
    assert [(step.launched, step.token) for step in (another, bare, elsewhere)] == [(-1, -1)] * 3


@pytest.fixture
def second_runner() -> Iterator[types.ModuleType]:
    """Modules with the places of model runner V2, which needs Triton: no CPU runs the real one.
    `calls` are made in the order in which the real one makes them (the contract test compares that
    with its source)."""
    runner, utils = types.ModuleType(V2), types.ModuleType("vllm.v1.worker.gpu.async_utils")

    class StepTimingCollector:
        def forward_start(self) -> None:
            return None

    class AsyncOutput:
        def get_output(self) -> Any:
            return types.SimpleNamespace(req_ids=["a"])

    class AsyncPoolingOutput(AsyncOutput):
        pass

    class Model:
        def compute_logits(self, hidden: str) -> str:
            return f"logits of {hidden}"

    class GPUModelRunner:
        def __init__(self) -> None:
            self.model, self.step_timing = Model(), StepTimingCollector()

        def execute_model(self, scheduler_output: Any) -> None:
            self.step_timing.forward_start()

        def sample(self) -> str:
            return self.model.compute_logits("hidden")

        def sample_tokens(self, grammar_output: None) -> AsyncOutput:
            assert self.sample() == "logits of hidden"
            self.model.compute_logits("the prompt")  # prompt logprobs: not the logits of this pass
            return AsyncOutput()

    for module, cls in (
        (runner, GPUModelRunner),
        (utils, StepTimingCollector),
        (utils, AsyncOutput),
        (utils, AsyncPoolingOutput),
    ):
        setattr(module, cls.__name__, cls)
        sys.modules[module.__name__] = module
    yield runner
    del sys.modules[runner.__name__], sys.modules[utils.__name__]


def test_the_second_runners_marks_come_in_order(second_runner: types.ModuleType) -> None:
    patches = Patches(lambda *fault: pytest.fail(str(fault)))
    hooks = WorkerHooks(Emitter(), patches, Roles(Emitter()))
    assert all(patches.install(hook) for hook in hooks.table(V2))
    runner = second_runner.GPUModelRunner()
    hooks._head(runner.model)
    plan = types.SimpleNamespace(**{TAG: (3, 1)})
    runner.execute_model(plan)
    result = runner.sample_tokens(None).get_output()
    step = events.Step(1, 3)
    unpack(result, step)
    order = [step.launched, step.head, step.logits, step.sampled, step.token]
    assert order[0] > 0
    assert order == sorted(order)
    runner.execute_model(types.SimpleNamespace())  # a warm-up: nothing asked for it
    assert not hasattr(runner.sample_tokens(None).get_output(), TAG)
    patches.remove()
    hooks.remove()
    assert runner.model.compute_logits("x") == "logits of x"
    assert "compute_logits" not in vars(runner.model)

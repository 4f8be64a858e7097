"""The hooks keep nothing of vLLM alive, in a program of the user's and in a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.census import left_behind, settled
from tests.hooks.test_memory import GROWTH, ROUNDS, SETTLED, growth
from tests.vllm.server import engine_environment, serving

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

HERE = Path(__file__).parent


def test_an_llm_that_is_let_go_is_gone_as_without_the_hooks(
    python_with_vllm: Path, model_dir: Path, tmp_path: Path
) -> None:
    """After 50 rounds: the same objects live before, when the last reference to it goes, and after
    a collection of garbage; memory is flat meanwhile."""

    def run(name: str, extra: dict[str, str]) -> Any:
        folder = tmp_path / name
        (folder / "s").mkdir(mode=0o700, parents=True)
        done = subprocess.run(
            [str(python_with_vllm), str(HERE / "memory.py"), str(model_dir), "50"],
            capture_output=True,
            text=True,
            check=False,
            timeout=140,
            cwd=folder,
            env=engine_environment(folder, {"TRACER_SOCKET_DIR": str(folder / "s"), **extra}),
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    without, hooked = run("without", {}), run("hooked", {"TRACER": "1"})
    assert hooked["events"] > 1000, "the hooks saw nothing"
    assert hooked["living"] == without["living"]
    assert not hooked["living"][-1]
    assert hooked["memory"][-1] - hooked["memory"][SETTLED] < GROWTH


async def test_rounds_of_requests_leave_nothing_behind(
    python_with_vllm: Path, model_dir: Path, tmp_path: Path
) -> None:
    """No more objects of the engine live after them with the hooks than without, and memory is
    flat. The model has two layers and weights that nobody loaded."""
    arguments = (
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "12",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "1280",
        "--load-format",
        "dummy",
        "--hf-overrides",
        '{"num_hidden_layers": 2}',
    )
    found = {}
    for traced in (True, False):
        folder = tmp_path / str(traced)
        folder.mkdir()
        with serving(python_with_vllm, model_dir, folder, arguments, traced=traced) as server:
            grown = await growth(server.url, server.model, server.process.pid)
            found[traced] = settled(server.process.pid, folder)
        if traced:
            assert grown < GROWTH
    assert found[True], "what lives since the start is frozen by vLLM, and not counted"
    assert not left_behind(found[True], found[False], ROUNDS)

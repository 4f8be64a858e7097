"""Every command that the README shows is run: here, by `.ci/run`, or by the test named beside
it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

RUN_ELSEWHERE = {
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[transformers]'": (
        ".ci/run"
    ),
    ".venv/bin/tracer demo": (
        "tests/demo/test_demo.py::test_on_a_terminal_it_shows_requests_and_obeys_keys"
    ),
    ".venv/bin/pip install -q -c constraints.txt -e '.[transformers,dev]'"
    " && .venv/bin/python -m pytest": ".ci/run",
    "tracer attach": (
        "tests/cli/test_screen.py::test_attach_joins_the_only_engine_and_leaves_it_alone"
    ),
    "tracer run -- vllm serve MODEL": (
        "tests/vllm/test_serve.py::test_three_processes_tell_one_story"
    ),
    "tracer replay slow.trace": (
        "tests/cli/test_files.py::test_a_recording_is_replayed_in_the_same_screens"
    ),
}
"""Command → what runs it."""


def commands() -> list[str]:
    """The commands of all shell blocks, without comments, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    ]


def test_there_are_commands() -> None:
    assert len(commands()) >= 8


def test_it_is_short_and_the_table_names_every_other_command() -> None:
    """What is not shown is in the table at the end (`relay` is started by ``attach ssh://``)."""
    from tracer.cli.commands import GROUPS

    assert len(README.split()) < 650
    for name in (command.name for _, group in GROUPS for command in group):
        assert name == "relay" or f"tracer {name}" in README, name


def test_what_is_run_elsewhere_is_really_run_there() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command, place in RUN_ELSEWHERE.items():
        assert command in commands(), f"{command} left the README"
        if place == ".ci/run":
            for part in command.split(" && "):
                words = shlex.split(part)
                assert words[-1] in ci or "[transformers,dev]" in ci, part
        else:
            path, _, name = place.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_other_commands_run(model_dir: Path, tmp_path: Path) -> None:
    """In the README's order, on a real engine: each one's product is the next one's input."""
    from tests.hooks.server import free_port

    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRACER_SOCKET_DIR": str(sockets),
        "TRACER_LOG_DIR": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    pid = ""
    (tmp_path / "model").symlink_to(model_dir)
    engine: subprocess.Popen[str] | None = None
    ran = []
    try:
        for command in commands():
            if command in RUN_ELSEWHERE:
                continue
            words = shlex.split(command)
            assert words[0] == "tracer", command
            if "serve" in words:
                words.insert(words.index("run") + 1, "--headless")
                words += [
                    "--port",
                    str(free_port()),
                    "--cb-num-blocks",
                    "64",
                    "--cb-block-size",
                    "16",
                    "--device",
                    "cpu",
                ]
            words = [pid if word == "4711" else word for word in words]
            line = [sys.executable, "-m", *words]
            if "serve" in words:
                # It goes on for as long as one likes: the commands below look at it.
                engine = subprocess.Popen(
                    line, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE
                )
                assert engine.stderr is not None
                assert any("Uvicorn running" in told for told in engine.stderr), (
                    "the engine did not come up"
                )
                listed = subprocess.run(
                    [sys.executable, "-m", "tracer", "attach", "--list"],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                )
                pid = listed.stdout.splitlines()[1].split()[1]
            else:
                done = subprocess.run(
                    line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
                )
                assert done.returncode == 0, f"{command}: {done.stderr}"
                assert done.stdout.strip() or done.stderr.strip(), command
            ran.append(command)
    finally:
        if engine is not None:
            engine.terminate()
            engine.communicate(timeout=60)
    assert len(ran) >= 4

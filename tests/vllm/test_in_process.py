"""`LLM` and `AsyncLLM` in a user's own program: compiled and hooked late, and with a vLLM whose
insides are others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol import events
from engine_hooks.protocol.stages import Stage
from tests.vllm.server import engine_environment
from tests.vllm.viewer import Viewer
from tracer.state.view import Phase, Status

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

HERE = Path(__file__).parent


def test_one_line_traces_an_engine_that_exists_and_leaves_nothing_behind(
    python_with_vllm: Path, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    done = subprocess.run(
        [str(python_with_vllm), str(HERE / "offline.py"), str(model_dir)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
        env=engine_environment(tmp_path, {"TRACER_SOCKET_DIR": str(tmp_path / "s")}),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["role"] == "engine"
    assert seen["unknown"] == 0
    assert seen["faults"] == []
    assert seen["same_text"]
    assert seen["left_behind"] == []
    assert seen["texts"][0].startswith("The capital of France is Paris.")
    routes = [request["route"] for request in seen["requests"]]
    assert sorted(routes) == ["LLM.chat", "LLM.chat", "LLM.generate", "LLM.generate"]
    for request in seen["requests"]:
        assert request["phase"] == Phase.DONE
        assert request["output_tokens"] == 12
        assert request["unattributed"] < 0.01
    # The model is compiled: no Python clock inside it, all around it.
    (lacking,) = [
        stage for stage, (status, _) in seen["coverage"].items() if status != Status.MEASURED
    ]
    assert lacking == "embed"
    assert "torch.compile" in seen["coverage"]["embed"][1]
    for request in seen["requests"]:
        if request["route"] == "LLM.chat":
            rows = {
                stage: status
                for stage, (status, _, _) in request["stages"].items()
                if stage != "embed"
            }
            assert set(rows.values()) == {Status.MEASURED}


@pytest.fixture(scope="module")
def streamed(
    python_with_vllm: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Viewer, list[str]]]:
    folder = tmp_path_factory.mktemp("streamed")
    (folder / "s").mkdir(mode=0o700)
    extra = {"TRACER": "1", "TRACER_SOCKET_DIR": str(folder / "s")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(python_with_vllm), str(HERE / "streamed.py"), str(model_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env=engine_environment(folder, extra),
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        _until_line(process, "ready", folder / "log")
        with Viewer(folder / "s") as viewer:
            process.stdin.write("go\n")
            process.stdin.flush()
            texts = json.loads(_until_line(process, "[", folder / "log"))
            viewer.settle()
        yield viewer, texts
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until_line(process: subprocess.Popen[str], start: str, log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(log.read_text()[-4000:])


def test_an_async_engine_is_traced_without_a_server(streamed: tuple[Viewer, list[str]]) -> None:
    viewer, texts = streamed
    assert viewer.roles() == {"api", "core", "worker"}
    assert texts[0] == " 5, 6, 7, 8,"
    assert viewer.state.unknown == 0
    for rid, text in zip(("one", "two"), texts, strict=True):
        detail = viewer.state.detail(rid)
        assert detail is not None
        assert detail.view.phase is Phase.DONE
        assert detail.view.route == "AsyncLLM.generate"
        assert detail.view.output_tokens == 12
        assert detail.output_text == text
        assert detail.prompt_ids


def test_a_vllm_with_other_insides_serves_and_says_what_is_gone(
    streamed: tuple[Viewer, list[str]],
) -> None:
    viewer, _ = streamed
    assert viewer.of(events.HookFault) == []
    said = {
        (viewer.headers[source].role, stage): event
        for source, state in viewer.state.sources.items()
        for stage, event in state.coverage.items()
    }
    lookup = said["core", Stage.KV_ALLOC]
    assert (lookup.status, lookup.reason) == (
        "unavailable",
        "its parameters changed: request missing",
    )
    assert "get_computed_blocks" in lookup.hook
    sample = said["worker", Stage.SAMPLE]
    assert (sample.status, "_sample" in sample.hook) == ("unavailable", True)
    assert said["worker", Stage.LM_HEAD].status == "measured"
    # The core tells no steps. The front end makes them of what vLLM itself says, and marks them as
    # that.
    assert said["core", Stage.DECODE].status == "unavailable"
    assert said["api", Stage.DECODE].status == "estimated"
    assert "update_from_output" in said["api", Stage.DECODE].reason
    detail = viewer.state.detail("one")
    assert detail is not None
    rows = {row.stage.id: row for row in detail.view.stages}
    assert rows["admission"].status is Status.MEASURED
    assert rows["decode"].ms is not None
    assert (detail.view.queue_ms or 0) < (detail.view.ttft_ms or 0) < (detail.view.e2e_ms or 0)
    assert rows["sample"].status is Status.UNAVAILABLE
    assert detail.view.incomplete is False

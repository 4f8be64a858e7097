"""The example of docs/own-engine.md: an engine that tells its own story is seen like any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.viewer import Viewer
from tracer.state.view import Phase, Status

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_engine.py"


@pytest.mark.slow
def test_the_example_is_a_whole_story(model_dir: Path, tmp_path: Path) -> None:
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    env = {
        **os.environ,
        "TRACER_SOCKET_DIR": str(sockets),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), str(model_dir)], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        with Viewer(sockets) as viewer:
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            viewer.settle()
    finally:
        process.kill()
    assert "The capital of France is Paris" in out
    assert viewer.state.unknown == 0
    for rid, prompt in (("one", 5), ("two", 6)):
        detail = viewer.state.detail(rid)
        assert detail is not None
        seen = detail.view
        assert seen.phase is Phase.DONE
        assert not seen.incomplete
        assert (seen.prompt_tokens, seen.output_tokens) == (prompt, 8)
        rows = {row.stage.id: row.status for row in seen.stages}
        for stage in ("tokenise", "admission", "prefill", "decode", "teardown"):
            assert rows[stage] is Status.MEASURED, stage
        assert (seen.unattributed_ms or 0) / (seen.e2e_ms or 1) < 0.05

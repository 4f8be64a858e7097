"""Whatever happens to a viewer, the engine gives the same tokens and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.hooks.server import Server, folded, serving
from tracer.transport.sources import discover

pytestmark = pytest.mark.slow

VIEWER = Path(__file__).parents[1] / "transport" / "viewer.py"
QUESTION = "Explain what a cache is, in three sentences."


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model_dir, tmp_path_factory.mktemp("serve")) as server:
        yield server


def answer(server: Server, tokens: int = 32) -> str:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    done = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=tokens,
        temperature=0,
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == tokens
    return done.choices[0].message.content or ""


def viewer(server: Server) -> subprocess.Popen[str]:
    (path,) = server.sockets.glob("*.sock")
    process = subprocess.Popen(
        [sys.executable, str(VIEWER), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_viewer_that_is_killed_stopped_or_gone_changes_no_token(server: Server) -> None:
    answer(server, 2)
    alone = answer(server)

    killed = viewer(server)
    killed.send_signal(signal.SIGKILL)
    assert answer(server) == alone
    killed.wait()

    stopped = viewer(server)
    os.kill(stopped.pid, signal.SIGSTOP)
    begin = time.monotonic()
    answers = 0
    while time.monotonic() - begin < 4:
        assert answer(server) == alone
        answers += 1
    assert answers >= 1
    os.kill(stopped.pid, signal.SIGCONT)
    with server.collect() as late:
        assert answer(server) == alone
        late.stop()
    (seen,) = folded(late).snapshot().requests
    assert seen.output_tokens == 32
    assert not seen.incomplete
    stopped.kill()
    stopped.wait()
    assert server.process.poll() is None


def test_an_engine_that_ends_with_viewers_attached_ends_as_without(
    model_dir: Path, tmp_path: Path
) -> None:
    with serving(model_dir, tmp_path) as server:
        answer(server, 4)
        watching, frozen = viewer(server), viewer(server)
        os.kill(frozen.pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == -signal.SIGTERM or server.process.returncode == 0
        assert watching.wait(timeout=20) == 0
        frozen.kill()
        frozen.wait()
        # The server ends by its signal, past every exit handler: what it leaves is swept away by
        # the next who looks.
        assert discover(server.sockets) == []
        assert not list(server.sockets.glob("*.sock"))

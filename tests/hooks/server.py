"""A real `transformers serve` in a process of its own, with the hooks put in from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_hooks.protocol.environment import traced_environment
from tests.hooks.census import counting
from tests.hooks.collect import Collector
from tracer.state.trace_state import TraceState

START_DEADLINE_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """`url` of the OpenAI API, `process` the engine's, `log` its output, `sockets` where it is
    traced."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    sockets: Path
    model: str

    def collect(self) -> Collector:
        """A viewer on the server's socket."""
        (path,) = self.sockets.glob("*.sock")
        return Collector(path)


def command(model: Path, port: int, *, blocks: int = 256, batch_tokens: int = 256) -> list[str]:
    executable = shutil.which("transformers", path=str(Path(sys.executable).parent))
    assert executable, "the transformers command belongs to the environment of the tests"
    return [
        executable,
        "serve",
        str(model),
        "--continuous-batching",
        "--cb-block-size",
        "16",
        "--cb-num-blocks",
        str(blocks),
        "--cb-max-batch-tokens",
        str(batch_tokens),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
    ]


@contextlib.contextmanager
def serving(
    model: Path, folder: Path, *, blocks: int = 256, batch_tokens: int = 256, traced: bool = True
) -> Iterator[Server]:
    """A server that is ready and traced, and gone afterwards; without the hooks if it is not to be
    `traced`."""
    sockets = folder / "s"
    sockets.mkdir(mode=0o700)
    port = free_port()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **counting(folder),
    }
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(model, port, blocks=blocks, batch_tokens=batch_tokens),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=traced_environment(env, sockets, "test") if traced else env,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.1)
        yield Server(f"{url}/v1", process, log, sockets, str(model))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def folded(collector: Collector) -> TraceState:
    """The state after everything that was collected."""
    state = TraceState()
    for event in collector.events:
        state.apply("server", event)
    return state

"""A real engine under ``tracer run``, with the demo's clients, whose processes can be named, hurt
and counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.cli.commands import marked, parent, runs
from tracer.demo.clients import Order, Stopwatch
from tracer.demo.launch import free_port, launch_transformers
from tracer.recording.own_python import own_python
from tracer.transport.sources import discover

REPOSITORY: Final = Path(__file__).resolve().parents[2]
START_S: Final = 500.0
"""Patience with an engine that starts on a loaded machine."""
END_S: Final = 60.0
"""Patience with processes that should end."""
MARK: Final = "TRACER_TEST_MARK"


class TroubleError(AssertionError):
    """Something that should hold did not."""


def until(condition: Callable[[], Any], what: str, seconds: float = END_S) -> Any:
    """Wait until `condition()` is true and return it. Raises TroubleError with `what` when it never
    is."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TroubleError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)
    return result


def below(pid: int) -> list[int]:
    """Every process below `pid` that runs."""
    parents = {
        int(path.name): parent(int(path.name))
        for path in Path("/proc").iterdir()
        if path.name.isdigit()
    }
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for child, above in parents.items() if above in front and runs(child)]
        found += front
    return found


@dataclass
class Clients:
    """The demo's clients in a process of their own; `watches` are the records of requests that have
    ended."""

    url: str
    model: str
    seed: int
    sent: int = 0
    watches: dict[str, Stopwatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = own_python(
            "tests.faults.clients", "main", self.url, self.model, str(self.seed), "0", "0"
        )
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._order(Order(begin=True))

    def come(self, visits: int) -> None:
        """So many requests at once."""
        self.sent += visits
        self._order(Order(burst=visits))

    @property
    def under_way(self) -> int:
        """Requests that were sent and have not ended."""
        return self.sent - len(self.watches)

    def close(self) -> None:
        """All hang up."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _order(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            watch = msgspec.json.decode(line, type=Stopwatch)
            self.watches[watch.client_id] = watch


class TracedEngine:
    """One engine under ``tracer run --headless``, from its start to its end. `kind` is
    transformers, vllm or paper."""

    def __init__(self, kind: str, model: str, seed: int = 0, python: str = "") -> None:
        self.kind = kind
        self.model = model or "paper"
        self._folder = tempfile.TemporaryDirectory(prefix="tracer-rounds-")
        self.home = Path(self._folder.name)
        self.sockets = self.home / "sockets"
        self.sockets.mkdir(mode=0o700)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.roles: dict[str, int] = {}
        self.launcher = self._launch(python)
        try:
            until(self._serves, "the engine to serve", START_S)
            self._name_processes()
            self.clients = Clients(f"{self.url}/v1", self.model, seed)
            self.alone = self.probe("warm-up")
        except BaseException:
            self.end()
            raise

    # --- processes --------------------------------------------------------------------------------

    def environment(self, **more: str) -> dict[str, str]:
        """That of every process of ours that belongs to this engine: its sockets, logs and mark."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRACER", "COV_", "PYTEST"))
            and name not in ("COLUMNS", "LINES")
        }
        return {
            **kept,
            "PYTHONPATH": str(REPOSITORY),
            "TRACER_SOCKET_DIR": str(self.sockets),
            "TERM": "xterm-256color",
            "TRACER_LOG_DIR": str(self.home / "logs"),
            MARK: self.mark,
            **more,
        }

    def tracer(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """A tracer command of this checkout."""
        return subprocess.Popen(
            [sys.executable, "-m", "tracer", *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **{"env": self.environment(), **options},
        )

    def _launch(self, python: str) -> subprocess.Popen[bytes]:
        command, added = self._command(python)
        with (self.home / "launcher.err").open("wb") as out:
            return self.tracer(
                "run",
                "--headless",
                "--log",
                str(self.home / "engine.log"),
                "--",
                *command,
                env={**self.environment(), **added},
                stdout=out,
                stderr=out,
            )

    def _command(self, python: str) -> tuple[list[str], dict[str, str]]:
        if self.kind == "paper":
            return [sys.executable, "-m", "tests.faults.paper_engine", str(self.port)], {}
        if self.kind == "transformers":
            launch = launch_transformers(self.model, self.port)
            # Room for everybody: after a preemption whose requests all hang up this engine admits
            # nobody any more.
            command = ["512" if word == "160" else word for word in launch.command]
            return command, launch.environment
        from tests.vllm.server import engine_environment

        env = engine_environment(self.home)
        env["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
        added = {name: value for name, value in env.items() if os.environ.get(name) != value}
        return [
            python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            self.model,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--dtype",
            "bfloat16",
            "--enforce-eager",
            "--block-size",
            "32",
            "--num-gpu-blocks-override",
            "257",
            "--max-num-batched-tokens",
            "256",
            "--max-model-len",
            "2560",
            "--max-num-seqs",
            "16",
            "--uvicorn-log-level",
            "warning",
        ], added

    def _serves(self) -> bool:
        if self.launcher.poll() is not None:
            raise TroubleError("the engine did not start: " + self.complaints()[-2000:])
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return bool(list(self.folder.glob("*.sock")))
        return False

    @property
    def folder(self) -> Path:
        """Where the sockets of this run are."""
        return self.sockets / self.folder_name

    @property
    def folder_name(self) -> str:
        """Name of the run's folder."""
        return next((path.name for path in self.sockets.glob("run-*")), "run-")

    @property
    def name(self) -> str:
        """Name of the run as a target."""
        return self.folder_name.removeprefix("run-")

    def _name_processes(self) -> None:
        self.roles = {"launcher": self.launcher.pid}
        (second,) = [pid for pid in below(self.launcher.pid) if parent(pid) == self.launcher.pid]
        (self.roles["guardian"],) = [pid for pid in below(second) if parent(pid) == second]
        for found in discover(self.folder):
            if found.header is not None:
                self.roles[found.header.role] = found.header.pid

    @property
    def processes(self) -> list[int]:
        """Pids of the launcher and all below it when the engine came up."""
        return list(self.roles.values())

    # --- what it does -----------------------------------------------------------------------------

    def probe(self, client_id: str, tokens: int = 6) -> str:
        """The answer to one request. Raises TroubleError when there is none."""
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": client_id},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                told = json.load(answer)
        except (OSError, ValueError) as error:
            raise TroubleError(f"the engine does not answer: {error}") from error
        text = told["choices"][0]["message"]["content"]
        if not text or told["usage"]["completion_tokens"] > tokens:
            raise TroubleError(f"the engine answers {told['choices']}")
        return str(text)

    def complaints(self) -> str:
        """What the launcher and the engine wrote."""
        texts = [
            path.read_text(errors="replace")
            for path in (self.home / "launcher.err", self.home / "engine.log")
            if path.exists()
        ]
        return "\n".join(texts)

    # --- its end ----------------------------------------------------------------------------------

    def end(self) -> list[int]:
        """End all that is left, gently first. Pids that had to be killed though their launcher was
        gone: orphans."""
        clients = getattr(self, "clients", None)
        if clients is not None:
            clients.close()
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGCONT)
            self.launcher.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(END_S)
        orphans = []
        with contextlib.suppress(TroubleError):
            until(lambda: not marked(self.mark) and not any(map(runs, self.roles.values())), "", 20)
        # vLLM's processes write their titles over their environment, and the mark with it.
        for pid in {*marked(self.mark), *(pid for pid in self.roles.values() if runs(pid))} - {
            self.launcher.pid
        }:
            orphans.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
        return orphans

    def remove(self) -> None:
        """Remove its folder."""
        self._folder.cleanup()

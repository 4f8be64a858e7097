"""Start and steer the processes of the transport tests."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tracer
from engine_hooks.protocol.events import Event, Header
from engine_hooks.protocol.frames import Batch, FrameReader, Hello, SequenceCheck, decode
from engine_hooks.protocol.sockets import connect

HERE = Path(__file__).parent
PATIENCE = 30.0
"""Seconds after which something that should have happened counts as not happening: far beyond any
noise."""


def environment(directory: Path) -> dict[str, str]:
    """Environment of a traced process whose socket is to lie in `directory`."""
    path = str(Path(tracer.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": path, "TRACER_SOCKET_DIR": str(directory)}


class Emitter:
    """A traced process in which every command is answered. `before`: code that runs in it first."""

    def __init__(self, directory: Path, before: str = "") -> None:
        script = str(HERE / "emitter.py")
        command = [sys.executable, script]
        if before:
            command = [
                sys.executable,
                "-c",
                f"{before}\nimport runpy\nrunpy.run_path({script!r}, run_name='__main__')",
            ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(directory),
        )
        status = self._answer()
        self.pid: int = status["pid"]
        self.path = Path(status["path"])
        self.source: str = status["source"]

    def ask(self, *command: Any) -> Any:
        """Send a command, wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert ready, "the traced process does not answer: something blocks it"
        line = self.process.stdout.readline()
        assert line, "the traced process died"
        return json.loads(line)

    def close(self) -> None:
        """End it the ordinary way."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()


@contextmanager
def emitter(directory: Path, before: str = "") -> Iterator[Emitter]:
    """A traced process for the length of a with block; see `Emitter`."""
    started = Emitter(directory, before)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def viewer_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A viewer of its own process; what it has got stands on its stdout, line by line."""
    command = [sys.executable, str(HERE / "viewer.py"), str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(path.parent)
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass
class Wire:
    """A viewer that counts by the numbers on the wire: what came, what is missing, where it
    began."""

    path: Path
    header: Header | None = None
    headers: int = 0
    snapshot: list[Event] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    first_seq: int = -1
    next_seq: int = -1
    ended: bool = False

    def __post_init__(self) -> None:
        self._reader = FrameReader()
        self._check = SequenceCheck()
        self.connection: socket.socket = connect(self.path)

    @property
    def missing(self) -> int:
        """Events that the numbers jumped over."""
        return self._check.missing

    def read(self, until: Callable[[], bool]) -> None:
        """Read until `until` holds; fails when it never does."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert not self.ended, "the stream ended"
            ready, _, _ = select.select(
                [self.connection], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, "nothing more came"
            self._take()

    def read_to_end(self) -> None:
        """Read until the traced process closes the stream."""
        self.read(lambda: self.ended)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Read along in a thread for the length of a with block, which the traced process must end
        in."""
        thread = threading.Thread(target=self.read_to_end)
        thread.start()
        yield
        thread.join(PATIENCE)
        assert self.ended

    def _take(self) -> None:
        try:
            data = self.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self.ended = True
            self.connection.close()
        for payload in self._reader.feed(data):
            frame, unknown = decode(payload)
            assert unknown == 0
            if isinstance(frame, Hello):
                self.header = frame.header
                self.headers += 1
            else:
                self._count(frame)

    def _count(self, batch: Batch) -> None:
        self._check.missed(batch)
        if batch.snapshot:
            self.snapshot += batch.events
            self.first_seq = self.next_seq = batch.seq
        else:
            self.events += batch.events
            self.next_seq = batch.seq + len(batch.events)


def eventually(condition: Callable[[], Any]) -> Any:
    """Wait until `condition()` is true and return it; fails when it never is."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return result

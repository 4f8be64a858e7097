"""Viewers of one engine, each a process of its own: one that can be asked, one that records, one
with a screen."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from typing import Any, Final, Protocol

from tests.cli.terminal import Terminal
from tests.faults.engine import REPOSITORY, START_S, TracedEngine, TroubleError, until
from tracer.replay.cursor import load
from tracer.state.trace_state import TraceState

ANSWER_S: Final = 60.0
"""Patience with a viewer that is asked."""
ALTERNATE_SCREEN_OFF: Final = b"\x1b[?1049l"


class Viewer(Protocol):
    """What is done to any of them. `since` monotonic s of its start; `ended` how: a signal, or None
    while it lives."""

    pid: int
    since: float
    ended: signal.Signals | None

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait until the process is over."""

    def close(self) -> None:
        """End it if it lives, and free what it held."""

    def complaints(self) -> str:
        """What it wrote on stderr."""


class Watcher:
    """`tests.faults.watcher`: says what it holds true."""

    def __init__(self, engine: TracedEngine) -> None:
        self.ended: signal.Signals | None = None
        self._errors = engine.home / f"watcher-{time.monotonic_ns()}.err"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.watcher", str(engine.folder)],
                env=engine.environment(),
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.baseline: dict[str, Any] = {}
        """Accounts when the engine was quiet last."""
        self.ask()
        self.since = time.monotonic()

    def ask(self) -> dict[str, Any]:
        """What it holds true now."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise TroubleError(f"the watcher is gone: {self.complaints()}") from error
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            raise TroubleError("the watcher does not answer")
        line = self.process.stdout.readline()
        if not line:
            raise TroubleError(f"the watcher is gone: {self.complaints()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def end(self, number: signal.Signals) -> None:
        """See Viewer."""
        self.ended = number
        _end(self.process, number)

    def close(self) -> None:
        """See Viewer."""
        if self.ended is None:
            self.end(signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def complaints(self) -> str:
        """See Viewer."""
        return self._errors.read_text(errors="replace")


class Recording:
    """``tracer record``."""

    def __init__(self, engine: TracedEngine) -> None:
        self.ended: signal.Signals | None = None
        stem = f"recording-{time.monotonic_ns()}"
        self.path = engine.home / f"{stem}.trace"
        self._errors = engine.home / f"{stem}.err"
        with self._errors.open("wb") as errors:
            self.process = engine.tracer(
                "record", engine.name, "-o", str(self.path), stdout=errors, stderr=errors
            )
        self.pid = self.process.pid
        try:
            until(
                lambda: self._began() or self.process.poll() is not None,
                "a recording to have something",
                START_S,
            )
        except TroubleError:
            self.end(signal.SIGKILL)
            raise
        if self.process.poll() is not None:
            raise TroubleError(f"the recorder ended: {self.complaints()}")
        self.since = time.monotonic()

    def _began(self) -> bool:
        with contextlib.suppress(Exception):
            return bool(self.state().sources)
        return False

    def state(self) -> TraceState:
        """What the file tells now."""
        return load(self.path)

    def end(self, number: signal.Signals) -> None:
        """See Viewer."""
        self.ended = number
        _end(self.process, number)

    def close(self) -> None:
        """See Viewer."""
        if self.ended is None:
            self.end(signal.SIGTERM)
        self.path.unlink(missing_ok=True)

    def complaints(self) -> str:
        """See Viewer."""
        return self._errors.read_text(errors="replace")


class Screen:
    """``tracer attach`` on a terminal, which is read all the time."""

    def __init__(self, engine: TracedEngine) -> None:
        self.ended: signal.Signals | None = None
        self._lock = threading.Lock()
        self._closing = False
        self.terminal = Terminal(
            [sys.executable, "-m", "tracer", "attach", engine.name], engine.environment()
        )
        self.pid = self.terminal.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.since = time.monotonic()
        try:
            until(
                lambda: "▌recv" in self.text or self.terminal.process.poll() is not None,
                "a screen",
                START_S,
            )
            if self.terminal.process.poll() is not None:
                raise TroubleError("the screen ended")
        except TroubleError as trouble:
            shown = self.text
            self.close()
            raise TroubleError(f"{trouble}; it shows:\n{shown}") from None
        self.since = time.monotonic()

    def _read(self) -> None:
        while not self._closing:
            select.select([self.terminal.master], [], [], 0.2)
            with self._lock:
                self.terminal.read(0.02)
            time.sleep(0.02)

    @property
    def text(self) -> str:
        """The rows as a person sees them."""
        with self._lock:
            return self.terminal.text

    def type(self, keys: str) -> None:
        """Type something."""
        self.terminal.type(keys)

    def shows(self, client_id: str) -> str:
        """What it shows when only this request is asked for by the filter, which is taken away
        again; it takes keys."""
        deadline = time.monotonic() + ANSWER_S
        # keys that come while a stopped program takes its terminal again are lost
        while "filter id" not in self.text:
            if time.monotonic() > deadline:
                raise TroubleError(f"the screen takes no key; it shows:\n{self.text}")
            self.type("\x1b")
            time.sleep(0.2)
            self.type("/")
            with contextlib.suppress(TroubleError):
                until(lambda: "filter id" in self.text, "", 4)
        self.type(client_id)
        try:
            until(lambda: "requests 1 " in self.text, f"the screen to show {client_id}", ANSWER_S)
            return self.text
        except TroubleError as trouble:
            raise TroubleError(f"{trouble}; it shows:\n{self.text}") from None
        finally:
            self.type("\x1b")

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was found."""
        modes = termios.tcgetattr(self.terminal.slave) == self.terminal.before
        return modes and ALTERNATE_SCREEN_OFF in bytes(self.terminal.raw)[-4096:]

    def end(self, number: signal.Signals) -> None:
        """See Viewer."""
        self.ended = number
        _end(self.terminal.process, number)

    def close(self) -> None:
        """See Viewer."""
        if self.ended is None:
            self.end(signal.SIGKILL)
        self._closing = True
        self._reader.join(5)
        self.terminal.close()

    def complaints(self) -> str:
        """See Viewer; stderr is the terminal."""
        return (
            bytes(self.terminal.raw)[-8192:].decode(errors="replace")
            if self.ended is not None
            else ""
        )


def _end(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGCONT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        raise TroubleError(f"a viewer did not end on {number.name}") from error


KINDS: Final[dict[str, type[Watcher] | type[Recording] | type[Screen]]] = {
    "watcher": Watcher, "recorder": Recording, "screen": Screen,
}  # fmt: skip

"""`tracer` as a user runs it: in processes of its own, with its own socket and log folders."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_S = 60.0
"""Patience with anything that should take a second: the machine may be busy."""

TRACED_CHILD = Path(__file__).with_name("traced_child.py")


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `condition()` holds. Fails with `what` when it never does."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process runs; one that has ended and only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (
            b"Z",
            b"X",
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    """Its parent's pid; 0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def marked(mark: str) -> list[int]:
    """Pids of the processes whose environment carries this mark."""
    needle = f"TRACER_TEST_MARK={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0") and runs(
                    int(entry.name)
                ):
                    found.append(int(entry.name))
    return found


@dataclass
class Commands:
    """Starts commands that share a socket folder and a log folder."""

    sockets: Path
    logs: Path
    mark: str = field(default_factory=lambda: f"{os.getpid()}-{time.monotonic_ns()}")
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        """Ours, with the folders of this test and without what would colour the output, or tell it
        another size than that of its terminal (test runners do)."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRACER", "COV_")) and name not in ("COLUMNS", "LINES")
        }
        return {**kept, "TRACER_SOCKET_DIR": str(self.sockets), "TRACER_LOG_DIR": str(self.logs),
                "TRACER_TEST_MARK": self.mark, "TERM": "xterm-256color", **more}  # fmt: skip

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start ``tracer ARGUMENTS``; its output in pipes."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tracer", *arguments],
            env=self.environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``tracer ARGUMENTS`` to its end."""
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def finish(self) -> None:
        """Nothing that was started here may be left."""
        try:
            wait_until(lambda: not marked(self.mark), "every process to end", 20)
            left = sorted(str(path.relative_to(self.sockets)) for path in self.sockets.rglob("*"))
            assert left == [], "sockets or folders are left"
        finally:
            for pid in marked(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.started:
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()


def python(code: str) -> list[str]:
    """A command that runs Python code."""
    return [sys.executable, "-c", code]


def traced(*what: str) -> list[str]:
    """A command that is traced: it publishes events of two requests, then does `what` (see
    traced_child.py)."""
    return [sys.executable, str(TRACED_CHILD), *what]

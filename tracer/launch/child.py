"""The command under `tracer run`: started, listened to, signalled, and ended without leaving
anything behind.

The command's output does not go through us: a tracer that is stopped or slow never holds up the
engine, nor does a full disk. The command has a session of its own, so a Ctrl-C in the terminal
reaches the tracer alone, which passes it on. A `guardian` process stands in between and carries the
output into the log; see there for what happens when the tracer or the guardian dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tracer.launch import guardian

GRACE_S: Final = 5.0
"""How long the command may take to react to a signal before the next, harder one."""

_HARDER: Final = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGTERM: signal.SIGKILL,
}


Report = Callable[[str], None]


class ChildError(Exception):
    """The command could not be started. `code` is the exit code a shell would give: 127 no such
    program, 126 not executable."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """A running command. Made by `start`; belongs to the event loop in which that was called."""

    def __init__(
        self, process: asyncio.subprocess.Process, pid: int, name: str, log: Path, report: Report
    ) -> None:
        self.pid = pid
        self.name = name
        self.exit_code: int | None = None
        """The code that a shell would report: the command's own, 128 + n when signal n ended it;
        None while it runs."""
        self._log = log
        self._report = report
        self._process = process
        self._ended = asyncio.create_task(self._wait())
        self._hurry = asyncio.Event()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
        report: Report = lambda _: None,
    ) -> Child:
        """Run `command` with `env`, its stdout and stderr appended to `log`, its stdin empty.

        `folder` is removed when the tracer dies before the command; `report` is called when the log
        cannot be written. Raises ChildError when the command cannot be executed, OSError when the
        log cannot be opened.
        """
        writing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", guardian.__file__, str(folder or ""), *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=writing,
                env=dict(env),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writing)
        assert process.stdin is not None and process.stdout is not None
        try:
            word, rest = _news(await process.stdout.readline())
        except asyncio.CancelledError:
            process.stdin.close()  # the guardian takes it as our end
            await process.wait()
            raise
        if word != "started":
            await process.wait()
            code, _, reason = rest.partition(" ")
            if word == "failed" and code.isdigit():
                raise ChildError(f"cannot run {command[0]}: {reason.lower()}", int(code))
            raise ChildError(f"cannot run {command[0]}; see {log}", 1)
        return cls(process, int(rest), Path(command[0]).name, log, report)

    async def wait(self) -> int:
        """Wait until the command and everything that it started has ended; return its exit code."""
        return await asyncio.shield(self._ended)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command's process group."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(b"signal %d\n" % number)

    def hurry(self) -> None:
        """Cut the present grace short: the second Ctrl-C of an impatient user."""
        self._hurry.set()

    async def stop(self, first: signal.Signals, grace: float = GRACE_S) -> int:
        """End the command with signal `first`, then with harder ones, each after `grace` seconds;
        return its exit code. Each step beyond the first is reported."""
        number: signal.Signals | None = first
        while number is not None and not self._ended.done():
            self.send(number)
            self._hurry.clear()
            hurried = asyncio.create_task(self._hurry.wait())
            await asyncio.wait(
                {self._ended, hurried}, timeout=grace, return_when=asyncio.FIRST_COMPLETED
            )
            impatient = hurried.done()
            hurried.cancel()
            harder = _HARDER.get(number)
            if not self._ended.done() and harder is not None:
                waited = "" if impatient else f" within {grace:g} s"
                self._report(
                    f"{self.name} did not end on {number.name}{waited}: sending {harder.name}"
                )
            number = harder
        return await self.wait()

    async def _wait(self) -> int:
        assert self._process.stdout is not None
        code = 1  # the guardian was killed, and its second too: the kernel has ended the command
        async for line in self._process.stdout:
            word, rest = _news(line)
            if word == "dropped":
                self._report(f"cannot write to {self._log}: {rest}; {self.name} goes on")
            elif word == "missing":
                self._report(f"{int(rest):,} bytes of {self.name}'s output are not in {self._log}")
            elif word in ("exited", "killed") and rest.isdigit():
                code = int(rest) + (128 if word == "killed" else 0)
        await self._process.wait()
        self.exit_code = code
        return code


def _news(line: bytes) -> tuple[str, str]:
    """Return a line of the guardian's as its word and what follows."""
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    return word, rest

"""The command under `tracer run`: started, listened to, signalled, and ended without leaving
anything behind.

Its output does not go through us: a tracer that is stopped or slow never holds up the engine, nor
does a full disk. It has a session of its own, so a Ctrl-C in the terminal reaches the tracer alone,
which passes it on. A `guardian` process stands in between and carries the output into the log; see
there for what happens when the tracer dies, or when it is killed itself. When it is killed together
with its second, the kernel ends the command, and the tracer what is left of the command's session.
"""

from __future__ import annotations

import asyncio
import contextlib
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


class ChildError(Exception):
    """The command could not be started. `code` is the exit code a shell would give: 127 no such
    program, 126 not executable."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """A running command. Made by `start`; belongs to the event loop in which that was called."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        pid: int,
        name: str,
        log: Path,
        say: Callable[[str], None],
    ) -> None:
        self.pid = pid
        self.name = name
        self._log = log
        self._say = say
        self.exit_code: int | None = None
        """What a shell would report: the command's own code, 128 + n when signal n ended it; None
        while it runs."""
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
        say: Callable[[str], None] = lambda _: None,
    ) -> Child:
        """Run `command` with `env`, its stdout and stderr appended to `log`, its stdin empty.

        `folder` is removed when the tracer dies before the command; `say` is told when the log
        takes no more. Raises ChildError when the command cannot be executed, OSError when the log
        cannot be opened.
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
            word, _, rest = (
                (await process.stdout.readline()).decode("utf-8", "replace").strip().partition(" ")
            )
        except asyncio.CancelledError:
            process.stdin.close()  # the guardian takes it as our end
            await process.wait()
            raise
        if word != "started":
            await process.wait()
            code, _, reason = rest.partition(" ")
            failed = word == "failed" and code.isdigit()
            raise ChildError(
                f"cannot run {command[0]}: {reason.lower()}"
                if failed
                else f"cannot run {command[0]}; see {log}",
                int(code) if failed else 1,
            )
        return cls(process, int(rest), Path(command[0]).name, log, say)

    async def wait(self) -> int:
        """Wait until the command and everything that it started has ended; its exit code."""
        return await asyncio.shield(self._ended)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command's process group."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(b"signal %d\n" % number)

    def hurry(self) -> None:
        """Cut the present grace short: the second Ctrl-C of an impatient user."""
        self._hurry.set()

    async def stop(
        self, first: signal.Signals, say: Callable[[str], None], grace: float = GRACE_S
    ) -> int:
        """Ask the command to end with signal `first`, then with harder ones, each after `grace`
        seconds; its exit code.

        `say` is told of each step beyond the first.
        """
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
                say(f"{self.name} did not end on {number.name}{waited}: sending {harder.name}")
            number = harder
        return await self.wait()

    async def _wait(self) -> int:
        assert self._process.stdout is not None
        code = None
        async for line in self._process.stdout:
            word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
            if word == "waits":
                self._say(
                    f"{self._log} takes no more of what {self.name} writes: {rest}; {self.name} "
                    "goes on"
                )
            elif word == "missing":
                self._say(f"{rest} bytes that {self.name} wrote are not in {self._log}")
            elif word in ("exited", "killed") and rest.isdigit():
                code = int(rest) + (128 if word == "killed" else 0)
        await self._process.wait()
        # the guardian was killed; perhaps its second too, and what the command had started goes on
        if code is None:
            await _end_session(self.pid)
            code = 1
        self.exit_code = code
        return code


async def _end_session(session: int) -> None:
    """End every process of a session: ask each once, force those that are still there after a
    while."""
    deadline = asyncio.get_running_loop().time() + guardian.LEFT_OVER_GRACE_S
    asked: set[int] = set()
    while left := _members(session):
        late = asyncio.get_running_loop().time() > deadline
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.05)


def _members(session: int) -> list[int]:
    """Pids of the processes of a session that run, if only some of their threads, from /proc; none
    where there is no such thing."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_bytes().rpartition(b")")[2].split()
            if int(fields[3]) == session and (fields[0] not in (b"Z", b"X") or int(fields[17]) > 1):
                found.append(int(stat.parent.name))
    return found

"""A run: a job's command with the hooks on, its log, its events, and its end.

A job (`Job`) says which command to start and what to do once it runs; `tracer run` has a plain one
(`Command`), the demo one with a model and traffic. The run gives the command a private socket
folder, in which every process that the command starts can be found, by this viewer and by others
(`tracer attach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from engine_hooks.protocol.environment import traced_environment
from engine_hooks.protocol.regular_file import no_pipe
from engine_hooks.protocol.sockets import default_directory, private_directory
from tracer.launch.child import Child, ChildError
from tracer.launch.engine_log import EngineLog, new_log
from tracer.transport.bus import Bus
from tracer.transport.sources import DirectorySource
from tracer.transport.targets import RUN_PREFIX

if TYPE_CHECKING:
    from engine_hooks.protocol.recorder import Recorder
    from tracer.monitor.monitor import Monitor
    from tracer.recording.flight import FlightRecorder
    from tracer.state.view import Snapshot

UNTRACED_S: Final = 20.0
"""Seconds without a traced process after which a line says so: engines import for long."""

LAST_EVENTS_S: Final = 0.6
"""How long events may be under way once the command has ended."""

TAIL: Final = 20
"""Lines of the log that are shown when a command failed."""


class Report(Protocol):
    """Takes one line that says what goes on. `passing`: the next one replaces it."""

    def __call__(self, text: str, *, passing: bool = False) -> None: ...


class RunError(Exception):
    """The run could not start or go on. The message is one line; `code` the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Job(Protocol):
    """Something to run: `prepare` gives the command, the rest has defaults. Errors of `prepare` and
    `started` that a user can understand are RuntimeErrors."""

    title: str
    """A word or two for it."""
    stop_signal: signal.Signals = signal.SIGINT
    """The first signal with which it is asked to end."""
    transparent: bool = True
    """Signals that come for us go to the command as they are, and its exit code is ours."""

    async def prepare(self, report: Report) -> tuple[list[str], dict[str, str]]:
        """Return the command, and what to add to its environment."""
        raise NotImplementedError

    async def started(self, alive: Callable[[], bool], report: Report) -> None:
        """Return once the running command is in service. `alive()` is false once it has ended."""
        return

    async def finish(self) -> None:
        """Undo `started`; called once, before the command is ended."""
        return

    def extra(self, snapshot: Snapshot) -> dict[str, object]:
        """Return what to add to the JSON summary of `snapshot`."""
        return {}


class Command(Job):
    """The job of `tracer run`: a command as the user gave it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.title = Path(command[0]).name

    async def prepare(self, report: Report) -> tuple[list[str], dict[str, str]]:
        return list(self.command), {}


class Run:
    """A run of a job. `live` it in an event loop, `stop` it there; `close` removes its files."""

    def __init__(self, job: Job, report: Report, *, log: Path | None = None,
                 on_line: Callable[[str], None] = lambda _: None, recorder: Recorder | None = None,
                 flight: FlightRecorder | None = None) -> None:  # fmt: skip
        """`on_line` gets each line of the command's output; `recorder` and `flight` are given all
        events. Raises OSError for a log or a socket folder that cannot be made."""
        self.job = job
        self.report = report
        self.name = f"{_plain(job.title)}-{os.getpid()}"
        self._own_log = log is None
        if log is not None:
            no_pipe(log)
            log.touch()
        self.log = EngineLog(log or new_log(self.name), on_line)
        base = private_directory(default_directory(), create=True)
        self.folder = private_directory(base / f"{RUN_PREFIX}{self.name}", create=True)
        self.bus = Bus()
        self.bus.add(DirectorySource(self.folder))
        self.child: Child | None = None
        self.monitor: Monitor | None = None
        self.serving = asyncio.Event()
        """Set once the job is in service."""
        self.stopping = False
        """True once we end the command."""
        self.traced = False
        """True once a traced process has appeared."""
        self.recorder = recorder
        self.flight = flight
        self._recordings: list[asyncio.Task[None]] = []
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._finished = False

    async def live(self) -> int:
        """Prepare, start and attend the command until it has ended by itself or by `stop`; return
        its exit code.

        Raises RunError when it cannot be started or when what follows fails; nothing runs any more
        then.
        """
        try:
            return await self._live()
        except ChildError as error:
            raise RunError(str(error), error.code) from error
        except Exception as error:
            await self.stop()
            raise RunError(" ".join(str(error).split()) or type(error).__name__) from error

    async def _live(self) -> int:
        command, added = await self.job.prepare(self.report)
        env = traced_environment({**os.environ, **added}, self.folder, self.name)
        log = Path(self.log.path)
        self.child = child = await Child.start(command, env, log, self.folder, self.report)
        self._started_at = time.monotonic()
        helpers = [asyncio.create_task(self._serve(child)), asyncio.create_task(self._watch())]
        if self.recorder is not None:
            self._recordings.append(asyncio.create_task(self.recorder.run(self.bus.subscribe())))
        if self.flight is not None:
            self.flight.watch_signal()
            self._recordings.append(asyncio.create_task(self.flight.run(self.bus.subscribe())))
        helpers += self._recordings
        try:
            ended = asyncio.create_task(child.wait())
            await asyncio.wait({ended, helpers[0]}, return_when=asyncio.FIRST_COMPLETED)
            if helpers[0].done():
                helpers[0].result()  # what went wrong there ends the run
            code = await ended
            self._ended_at = time.monotonic()
            if not all(recording.done() for recording in self._recordings):
                await asyncio.sleep(LAST_EVENTS_S)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._finish()
        return code

    async def _serve(self, child: Child) -> None:
        await self.job.started(lambda: child.exit_code is None, self.report)
        self.serving.set()

    async def _watch(self) -> None:
        """Note the first traced process, or report that there is none."""
        late = asyncio.get_running_loop().call_later(UNTRACED_S, self.report, self.untraced)
        try:
            async with contextlib.aclosing(self.bus.subscribe()) as deliveries:
                async for delivery in deliveries:
                    if delivery.header is not None:
                        self.traced = True
                        return
        finally:
            late.cancel()

    async def stop(self, came: signal.Signals | None = None) -> int:
        """End the command because signal `came` came for us, or because the user or the time says
        so (None).

        Returns the exit code for us: 0 without a signal, else that of the command or 128 + n
        (`Job.transparent`).
        """
        self.stopping = True
        for recording in self._recordings:
            # An engine that is ended by us may log that as a crash: no part of the recording.
            recording.cancel()
        await asyncio.gather(*self._recordings, return_exceptions=True)
        await self._finish()
        code = 0
        if self.child is not None:
            passed_on = came if self.job.transparent else None
            code = await self.child.stop(passed_on or self.job.stop_signal)
        if came is None:
            return 0
        return code if self.job.transparent and self.child is not None else 128 + came

    async def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            await self.job.finish()

    @property
    def untraced(self) -> str:
        """The line for a command in which no traced process has appeared."""
        where = f"no traced process appeared in {self.job.title}"
        return f"{where}; is tracer installed in that environment?"

    @property
    def seconds(self) -> float:
        """Seconds for which the command has run, or ran."""
        if self._started_at is None:
            return 0.0
        return (self._ended_at or time.monotonic()) - self._started_at

    def tail(self) -> list[str]:
        self.log.close()
        return self.log.lines[-TAIL:]

    def close(self) -> None:
        """Remove the socket folder, and our log if nothing is in it; one that the user named
        stays."""
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        log = Path(self.log.path)
        with contextlib.suppress(OSError):
            if self._own_log and log.stat().st_size == 0:
                log.unlink()


def _plain(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", title)[:40].strip("._") or "run"

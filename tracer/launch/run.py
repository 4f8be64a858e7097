"""One run: a job's command with the hooks on, its log, its events, and its end.

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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from engine_hooks.protocol.regular_file import no_pipe
from engine_hooks.protocol.sockets import default_directory, private_directory
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.launch.child import Child, ChildError
from tracer.launch.engine_log import EngineLog, new_log
from tracer.transport.bus import Bus
from tracer.transport.run_folders import RUN_PREFIX
from tracer.transport.sources import DirectorySource

if TYPE_CHECKING:
    from engine_hooks.protocol.recorder import Recorder
    from tracer.monitor.outlets import Outlets
    from tracer.recording.flight import FlightRecorder
    from tracer.state.view import Snapshot

UNTRACED_S: Final = 20.0
"""Seconds after which a command in which no traced process has appeared is remarked upon: engines
import for long."""

LAST_EVENTS_S: Final = 0.6
"""How long a recording goes on once the command has ended: its last events are under way."""

TAIL: Final = 20
"""Lines of the log that are shown when a command failed."""

Hooks = Callable[[Mapping[str, str], Path, str], dict[str, str]]
"""``environment(env, socket folder, name of the run)``: the environment in which a child is
traced."""


class Say(Protocol):
    """Takes one line that says what goes on. `passing`: the next one replaces it."""

    def __call__(self, text: str, *, passing: bool = False) -> None: ...


class RunError(Exception):
    """The run could not begin or go on. The message is one line; `code` the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Job(Protocol):
    """What is to be run. Errors of `prepare` and `started` that a user can understand are
    RuntimeErrors."""

    @property
    def title(self) -> str:
        """A word or two for it."""

    @property
    def stop_signal(self) -> signal.Signals:
        """The first signal with which it is asked to end."""

    @property
    def transparent(self) -> bool:
        """Whether signals that come for us go to the command as they are, and its exit code is
        ours."""

    async def prepare(self, say: Say) -> tuple[list[str], dict[str, str]]:
        """The command, and what to add to its environment."""

    async def started(self, alive: Callable[[], bool], say: Say) -> None:
        """What to do once the command runs; returns when it is in service. `alive()` is false once
        it has ended."""

    async def finish(self) -> None:
        """Undo `started`; called once, before the command is ended."""

    def extra(self, snapshot: Snapshot) -> dict[str, object]:
        """What to add to the JSON summary; `snapshot` is what it is about."""


@dataclass(slots=True)
class Command:
    """The job of `tracer run`: a command as the user gave it."""

    command: Sequence[str]
    stop_signal: signal.Signals = signal.SIGINT
    transparent: bool = True

    @property
    def title(self) -> str:
        """The command's name."""
        return Path(self.command[0]).name

    async def prepare(self, say: Say) -> tuple[list[str], dict[str, str]]:
        """As it was given."""
        return list(self.command), {}

    async def started(self, alive: Callable[[], bool], say: Say) -> None:
        """Nothing to do."""

    async def finish(self) -> None:
        """Nothing to undo."""

    def extra(self, snapshot: Snapshot) -> dict[str, object]:
        """Nothing."""
        return {}


class Run:
    """One run of a job. `live` it in an event loop, `stop` it there; `close` removes what it
    made."""

    def __init__(self, job: Job, hooks: Hooks, say: Say, *, log: Path | None = None,
                 on_line: Callable[[str], None] | None = None, recorder: Recorder | None = None,
                 flight: FlightRecorder | None = None) -> None:  # fmt: skip
        """`on_line` gets each line of the command's output; `recorder` and `flight` are given all
        events. Raises OSError for a log or a socket folder that cannot be made."""
        self.job = job
        self.say = say
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
        self.outlets: Outlets | None = None
        """What works beside the run: alerts, metrics."""
        self.serving = asyncio.Event()
        """Set once the job is in service."""
        self.stopping = False
        """Whether the command is being ended by us."""
        self.traced = False
        """Whether a traced process has appeared."""
        self._hooks = hooks
        self.recorder = recorder
        self.flight = flight
        self._recordings: list[asyncio.Task[None]] = []
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._finished = False

    async def live(self) -> int:
        """Prepare, start and attend the command until it has ended by itself or by `stop`; its exit
        code.

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
        command, added = await self.job.prepare(self.say)
        env = self._hooks({**os.environ, **added}, self.folder, self.name)
        self.child = child = await Child.start(
            command, env, Path(self.log.path), self.folder, self.say
        )
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
        await self.job.started(lambda: child.exit_code is None, self.say)
        self.serving.set()

    async def _watch(self) -> None:
        """Notice the first traced process, or say that there is none."""
        async with contextlib.aclosing(self.bus.subscribe()) as deliveries:
            seen = asyncio.create_task(_first_header(deliveries))
            try:
                await asyncio.wait({seen}, timeout=UNTRACED_S)
                if not seen.done():
                    self.say(self.untraced)
                await seen
                self.traced = True
            finally:
                seen.cancel()

    async def stop(self, came: signal.Signals | None = None) -> int:
        """End the command because signal `came` came for us, or because the user or the time says
        so (None).

        The exit code for us: 0 without a signal, else that of the command or 128 + n
        (`Job.transparent`).
        """
        self.stopping = True
        for recording in self._recordings:
            # What an engine says while we end it is no part of the story: some call it a crash.
            recording.cancel()
        await asyncio.gather(*self._recordings, return_exceptions=True)
        await self._finish()
        code = 0
        if self.child is not None:
            passed_on = came if self.job.transparent else None
            code = await self.child.stop(passed_on or self.job.stop_signal, self.say)
        if came is None:
            return 0
        return code if self.job.transparent and self.child is not None else 128 + came

    async def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            await self.job.finish()

    @property
    def untraced(self) -> str:
        """What to say when no traced process has appeared."""
        return (
            f"no traced process appeared in {self.job.title}; is tracer installed in that "
            "environment?"
        )

    @property
    def seconds(self) -> float:
        """How long the command has run, or ran."""
        if self._started_at is None:
            return 0.0
        return (self._ended_at or time.monotonic()) - self._started_at

    def tail(self) -> list[str]:
        """The last lines of the command's output."""
        self.log.close()
        return self.log.lines[-TAIL:]

    def close(self) -> None:
        """Remove the socket folder, and the log that this made if nothing is in it. One that the
        user named stays."""
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        log = Path(self.log.path)
        with contextlib.suppress(OSError):
            if self._own_log and log.stat().st_size == 0:
                log.unlink()


async def _first_header(deliveries: AsyncIterator[Delivery]) -> None:
    async for delivery in deliveries:
        if delivery.header is not None:
            return


def _plain(title: str) -> str:
    """A title as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", title)[:40].strip("._") or "run"

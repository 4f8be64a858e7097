"""A run without a screen: the engine's output on stderr, a summary at the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine_hooks.protocol import clock
from tracer.launch.run import LAST_EVENTS_S, Run
from tracer.state.metrics.numbers import Ask
from tracer.state.metrics.slo import Slo
from tracer.state.view import Snapshot
from tracer.transport.follow import follow

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Diagnosis

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code` for us; `snapshot` and `diagnosis` of the instant before
    anything was ended."""

    exit_code: int
    snapshot: Snapshot
    diagnosis: Diagnosis


async def attend(run: Run, seconds: float | None, slo: Slo, *, with_text: bool) -> Outcome:
    """Live through a run: until its command ends, `seconds` of service are over, or a signal comes,
    which is passed on.

    `slo`: targets for the summary's figures; `with_text`: the diagnosis may quote prompts. A second
    signal ends the wait for the command. Raises RunError when the command cannot be run.
    """
    from tracer.analysis.diagnosis import ObservedState, diagnose

    state = ObservedState()
    state.quotes = with_text
    came: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    living = asyncio.create_task(run.live())
    timing = asyncio.create_task(_service(run, seconds))
    helpers = [living, timing, asyncio.create_task(follow(run.bus, state))]
    helpers.append(asyncio.create_task(run.log.follow()))
    if run.monitor is not None:
        helpers.append(asyncio.create_task(run.monitor.run(state)))
    with _signals(run, came):
        try:
            first: set[asyncio.Future[Any]] = {living, timing, came}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            ended_by_itself = living.done()
            if ended_by_itself:
                await _last_events(run, living.result())
            # without a process there is no trace, and no time that it could have taken
            now = clock.now() if state.sources else state.now
            snapshot = state.snapshot(now=now, numbers=Ask(slo=slo))
            diagnosis = diagnose(state, now=now)
            if run.monitor is not None:
                run.monitor.check(state, now)
            if ended_by_itself:
                code = living.result()
            else:
                code = await end(run, living, came.result() if came.done() else None)
            run.log.close()
            return Outcome(code, snapshot, diagnosis)
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)


async def end(run: Run, living: asyncio.Task[int], came: signal.Signals | None) -> int:
    """Stop a run of which `living` is the `Run.live`; see `Run.stop`."""
    if run.child is None:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
    code = await run.stop(came)
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await living
    return code


@contextlib.contextmanager
def _signals(run: Run, came: asyncio.Future[signal.Signals]) -> Iterator[None]:
    """Put the first signal into `came`; each further one hurries the command's end."""

    def on_signal(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)
        elif run.child is not None:
            run.child.hurry()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _last_events(run: Run, code: int) -> None:
    """Wait for what is under way from a command that has ended, and report how it ended."""
    await asyncio.sleep(LAST_EVENTS_S)
    if code:
        run.log.close()
        run.report(f"{run.job.title} ended with code {code} after {run.seconds:.1f} s")


async def _service(run: Run, seconds: float | None) -> None:
    """Return after `seconds` of service; never without a limit."""
    await run.serving.wait()
    await asyncio.sleep(seconds if seconds is not None else 1 << 30)

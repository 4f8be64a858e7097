"""A run without a screen: the engine's output to stderr, a summary in the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine_hooks.protocol import clock
from tracer.launch.run import Run
from tracer.state.metrics.numbers import Ask
from tracer.state.metrics.slo import NO_TARGETS, Slo
from tracer.state.view import Snapshot
from tracer.transport.follow import follow

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Diagnosis

LAST_WORDS_S: Final = 0.6
"""How long events may be under way once the engine has ended."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code` for us; `snapshot` and `diagnosis` of the instant before
    anything was ended."""

    exit_code: int
    snapshot: Snapshot
    diagnosis: Diagnosis


async def attend(
    run: Run, seconds: float | None, slo: Slo = NO_TARGETS, *, with_text: bool = False
) -> Outcome:
    """Live through a run: until its command ends, `seconds` of service are over, or a signal comes,
    which is passed on.

    `slo`: targets for the summary's figures; `with_text`: the diagnosis may cite prompts. A second
    signal cuts the patience with the command short. Raises RunError when the command cannot be run.
    """
    from tracer.analysis.diagnosis import ObservedState, diagnose

    state = ObservedState()
    state.quotes = with_text
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)
        elif run.child is not None:
            run.child.hurry()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    following = asyncio.create_task(follow(run.bus, state))
    reading = asyncio.create_task(run.log.follow())
    living = asyncio.create_task(run.live())
    timing = asyncio.create_task(_service(run, seconds))
    helpers: list[asyncio.Task[Any]] = [following, reading, living, timing]
    if run.outlets is not None:
        helpers.append(asyncio.create_task(run.outlets.run(state)))
    try:
        first: set[asyncio.Future[Any]] = {living, timing, came}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        by_itself = living.done()
        if by_itself:
            code = living.result()
            await asyncio.sleep(LAST_WORDS_S)
            if code:
                run.log.close()
                run.say(f"{run.job.title} ended with code {code} after {run.seconds:.1f} s")
        snapshot = state.snapshot(now=clock.now(), numbers=Ask(slo=slo))
        diagnosis = diagnose(state, now=snapshot.now)
        if run.outlets is not None:
            run.outlets.look(state, snapshot.now)
        if not by_itself:
            code = await end(run, living, came.result() if came.done() else None)
        run.log.close()
        return Outcome(code, snapshot, diagnosis)
    finally:
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def end(run: Run, living: asyncio.Task[int], came: signal.Signals | None) -> int:
    """Stop a run of which `living` is the `Run.live`; see `Run.stop`."""
    if run.child is None:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
    code = await run.stop(came)
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await living
    return code


async def _service(run: Run, seconds: float | None) -> None:
    """Done after `seconds` of service; never without a limit."""
    await run.serving.wait()
    await asyncio.sleep(seconds if seconds is not None else 1 << 30)

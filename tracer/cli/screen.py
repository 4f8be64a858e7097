"""Under the TUI: an engine that is joined, or one that is run and ends with the screen."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_hooks.protocol.stream_decoder import Delivery
from tracer.analysis.diagnosis.finding import Diagnosis
from tracer.cli.status_line import StatusLine, report
from tracer.format.text import clean
from tracer.launch.engine_log import EventLog
from tracer.launch.headless import SIGNALS, end
from tracer.launch.run import Run, RunError
from tracer.monitor.monitor import Monitor
from tracer.recording.evidence_ring import EvidenceRing
from tracer.recording.live_recording import LiveRecording
from tracer.recording.own_python import own_python
from tracer.replay.folding import start_following
from tracer.state.metrics.slo import Slo
from tracer.transport.bus import Bus
from tracer.transport.ssh.remote import Remote

if TYPE_CHECKING:
    from tracer.analysis.budget.budget import Budget
    from tracer.replay.player import Player
    from tracer.tui.app import TracerApp
    from tracer.tui.feed import EngineLog, Traffic

POLL_S: Final = 0.02
"""Seconds between two checks whether the screen is painted."""
PATIENCE_S: Final = 2.0
"""Limit of the wait for a slow terminal before the engine starts."""


def show_live(
    sources: Iterable[AsyncIterable[Delivery]], title: str, slo: Slo, monitor: Monitor
) -> int:
    """Show `sources` until the user quits; return the exit code. `monitor` works beside."""
    bus = Bus()
    remotes = []
    for source in sources:
        bus.add(source)
        if isinstance(source, Remote):
            remotes.append(source)
    tape = LiveRecording(bus, on_start=start_following)
    log = EventLog() if monitor.alerts is not None else None
    app = _app(bus, title, mode="live", tape=tape, log=log, evidence=EvidenceRing(bus))
    app.slo = slo
    _show_connections(remotes, app)

    async def main() -> str:
        watching = asyncio.create_task(_watch(app, monitor))
        try:
            await _shown(app)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            ended = await tape.stop()
        return ended

    if ended := asyncio.run(main()):
        report(ended)
    return app.return_code or 0


def _show_connections(remotes: Sequence[Remote], app: TracerApp) -> None:
    troubles: dict[int, str] = {}

    def on_trouble(number: int, text: str) -> None:
        troubles[number] = clean(text)
        app.trouble = " · ".join(text for text in troubles.values() if text)

    def on_status(text: str) -> None:
        app.note = clean(text)

    for number, remote in enumerate(remotes):
        remote.on_status = on_status
        remote.on_trouble = partial(on_trouble, number)


def show_replay(player: Player, title: str, slo: Slo) -> int:
    """Show a replay until the user quits; return the exit code."""
    from engine_hooks.protocol.blocks import Mark
    from tracer.recording.excerpt import Excerpts
    from tracer.tui.replay.app import ReplayApp
    from tracer.tui.watch import FileWatch

    trace = player.trace
    watch = FileWatch(player, lambda: _diagnosis_of(trace.path, trace.begin))

    async def marks() -> list[Mark]:
        findings = (await watch.ask()).findings
        return [Mark(finding.start, clean(finding.statement)) for finding in findings]

    app = ReplayApp(player, title=title, find_findings=marks)
    app.diagnosis, app.evidence = watch, Excerpts(trace.path, trace.end)
    app.monitor = Monitor()
    app.monitor.watch_hardware()
    app.slo = slo
    return asyncio.run(_shown(app))


async def _diagnosis_of(path: Path, began: int) -> Diagnosis:
    """Return the diagnosis of a trace file that starts at `began` (ns), made in a process of its
    own: the screen goes on drawing. Raises OSError, with the reason in words."""
    process = await asyncio.create_subprocess_exec(
        *own_python("tracer.cli.main", "main", "diagnose", str(path.absolute()), "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # gives way to the screen
        os.setpriority(os.PRIO_PROCESS, process.pid, os.nice(0) + 5)
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        reason = f"the diagnosis ended with code {process.returncode}"
        raise OSError(clean(lines[-1]) if lines else reason)
    try:
        return Diagnosis.from_document(json.loads(out), began)
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


def show_budget(made: Budget, *, journey: bool) -> int:
    """Show a budget with its sliders, or its journey, until the user quits; return the exit
    code."""
    from tracer.tui.standalone import BudgetApp

    return asyncio.run(_shown(BudgetApp(made, journey=journey)))


def show_run(
    run: Run, status: StatusLine, monitor: Monitor, options: argparse.Namespace,
    *, traffic: Traffic | None, mode: str,
) -> int:  # fmt: skip
    """Run and show `run`: the engine starts once the screen is there, and ends after it is gone.

    Returns the command's exit code when it ended by itself or by a signal that came for us, 0 when
    the user quit. Raises RunError when the command cannot be run, or ended before any traced
    process appeared in it.
    """
    text = options.with_text
    tape = LiveRecording(
        run.bus, with_text=text, given=run.recorder, flight=run.flight, on_start=start_following
    )
    ring = EvidenceRing(run.bus, with_text=text, flight=run.flight)
    title = run.job.title
    app = _app(run.bus, title, mode=mode, tape=tape, log=run.log, traffic=traffic, evidence=ring)
    app.slo = options.slo
    return asyncio.run(_show_run(run, status, monitor, app, tape))


async def _show_run(
    run: Run, status: StatusLine, monitor: Monitor, app: TracerApp, tape: LiveRecording
) -> int:
    def on_screen(text: str, passing: bool) -> None:
        app.note = text
        if not run.traced:  # the stream has no news of its own yet
            app.feed.status = text
        if not passing:
            run.log.add(f"tracer: {text}")

    status.on_screen = on_screen
    reading = asyncio.create_task(run.log.follow())
    living = asyncio.create_task(_live(run, app))
    watching = asyncio.create_task(_watch(app, monitor))
    try:
        await _shown(app)
    except BaseException:
        await end(run, living, None)
        raise
    finally:
        status.on_screen = None
        reading.cancel()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if ended := await tape.stop():
            status.report(ended)
    if living.done():
        return _own_end(run, living.result())
    came = next((known for known in SIGNALS if app.return_code == 128 + known), None)
    loop = asyncio.get_running_loop()
    for known in SIGNALS:
        loop.add_signal_handler(known, lambda: run.child.hurry() if run.child is not None else None)
    if run.child is not None:
        status.report(f"ending {run.job.title} …")
    code = await end(run, living, came)
    return code or app.return_code or 0 if came is None else code


def _own_end(run: Run, code: int) -> int:
    """Return the exit code of a command that ended by itself. Raises RunError when it failed before
    a traced process appeared in it."""
    if code and not run.traced:
        reason = f"{run.job.title} ended with code {code} after {run.seconds:.1f} s"
        raise RunError(reason, code)
    return code


async def _shown(app: TracerApp) -> int:
    """Show an app until it is left, by Ctrl-C too, which the app does not look after itself; return
    its code."""
    with contextlib.suppress(RuntimeError, ValueError):
        leave = partial(app.exit, return_code=128 + signal.SIGINT)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, leave)
    await app.run_async()
    return app.return_code or 0


async def _painted(app: TracerApp) -> None:
    while not app.is_running or not app.screen_stack:
        await asyncio.sleep(POLL_S)
    painted = asyncio.Event()
    app.call_after_refresh(painted.set)
    await painted.wait()


async def _watch(app: TracerApp, monitor: Monitor) -> None:
    """Let the monitor work beside a screen, from its first paint on."""
    app.monitor = monitor
    monitor.on_news = app.report_alert
    monitor.report = app.report
    await _painted(app)
    if monitor.endpoint is not None:
        app.note = f"metrics at {monitor.endpoint.url}"
    monitor.watch_hardware()
    await monitor.run(app.feed.state, app.feed.now)


async def _live(run: Run, app: TracerApp) -> int:
    """Live through the run, from the first paint on. When the engine has ended the screen stays if
    there is anything on it."""
    await _painted(app)
    # for the thread that writes, and a terminal that takes its time
    for _ in range(round(PATIENCE_S / POLL_S)):
        if app.at_rest:
            break
        await asyncio.sleep(POLL_S)
    try:
        code = await run.live()
    except RunError:
        app.exit()
        raise
    if code and not run.traced:
        app.exit()
    elif not run.stopping:
        how = f"ended with code {code}" if code else "has ended"
        run.report(f"{run.job.title} {how} · q quits")
    return code


def _app(
    bus: Bus, title: str, *, mode: str, tape: LiveRecording, log: EngineLog | None = None,
    traffic: Traffic | None = None, evidence: EvidenceRing | None = None,
) -> TracerApp:  # fmt: skip
    from tracer.analysis.diagnosis.series import ObservedState
    from tracer.tui.app import TracerApp
    from tracer.tui.feed import LiveFeed

    class Feed(LiveFeed):
        """A feed that runs the bus once it listens, so that it misses nothing."""

        async def run(self) -> None:
            carrying = asyncio.create_task(bus.run())
            try:
                await super().run()
            finally:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)

    bus.retain()
    app = TracerApp(
        Feed(bus, ObservedState()), title=title, log=log, traffic=traffic, mode=mode, tape=tape
    )

    def on_note(sentence: str) -> None:
        app.note = sentence

    tape.on_note = on_note
    if evidence is not None:
        evidence.on_note = on_note
        app.evidence = evidence
    return app

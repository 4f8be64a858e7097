"""Under the TUI: an engine that is joined, or one that is run and ends with the screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from engine_hooks.protocol.stream_decoder import Delivery
from tracer.cli.status_line import Voice
from tracer.format.text import clean
from tracer.launch.engine_log import EventLog
from tracer.launch.headless import SIGNALS, end
from tracer.launch.run import Run, RunError
from tracer.monitor.outlets import Outlets
from tracer.recording.evidence_ring import EvidenceRing
from tracer.recording.live_recording import LiveRecording
from tracer.state.metrics.slo import NO_TARGETS, Slo
from tracer.transport.bus import Bus
from tracer.transport.ssh.remote import Remote

if TYPE_CHECKING:
    from tracer.analysis.budget.budget import Budget
    from tracer.replay.player import Player
    from tracer.tui.app import TracerApp
    from tracer.tui.feed import EngineLog, Traffic

PAINT_S: Final = 0.02
"""Seconds between two looks whether the screen is painted."""
PATIENCE_S: Final = 2.0
"""How long a terminal that does not take what is written holds up the start of the engine."""


def show_live(
    sources: Iterable[AsyncIterable[Delivery]],
    title: str,
    *,
    slo: Slo = NO_TARGETS,
    outlets: Outlets | None = None,
) -> int:
    """Show what `sources` tell until the user quits; the exit code. `slo`: the targets to begin
    with. `outlets` work beside it."""
    bus = Bus()
    links = []
    for source in sources:
        bus.add(source)
        if isinstance(source, Remote):
            links.append(source)
    tape = LiveRecording(bus)
    beside = outlets or Outlets(lambda _: None)
    app = _app(
        bus,
        title,
        mode="live",
        tape=tape,
        log=EventLog() if beside.alerts is not None else None,
        evidence=EvidenceRing(bus),
    )
    app.slo = slo
    _tell_of(links, app)
    ended = ""

    async def main() -> None:
        nonlocal ended
        _leave_on(app, signal.SIGINT)
        watching = asyncio.create_task(_beside(app, beside))
        try:
            await app.run_async()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            ended = await tape.stop()

    asyncio.run(main())
    if ended:
        print(f"tracer: {clean(ended)}", file=sys.stderr)
    return app.return_code or 0


def _tell_of(links: Sequence[Remote], app: TracerApp) -> None:
    """Have the screen say how the connections to other hosts are."""
    troubles: dict[int, str] = {}

    def trouble(link: int, text: str) -> None:
        troubles[link] = clean(text)
        app.trouble = " · ".join(text for text in troubles.values() if text)

    def note(text: str) -> None:
        app.note = clean(text)

    for number, link in enumerate(links):
        link.say = note
        link.on_trouble = partial(trouble, number)


def show_replay(player: Player, title: str, *, slo: Slo = NO_TARGETS) -> int:
    """Show what `player` plays until the user quits; the exit code. `slo`: the targets to begin
    with."""
    from engine_hooks.protocol.blocks import Mark
    from tracer.cli.trace_findings import diagnosis_of
    from tracer.recording.excerpt import Excerpts
    from tracer.tui.replay.app import ReplayApp
    from tracer.tui.watch import FileWatch

    trace = player.trace
    watch = FileWatch(player, lambda: diagnosis_of(trace.path, trace.begin))

    async def marks() -> list[Mark]:
        return [
            Mark(finding.start, clean(finding.statement))
            for finding in (await watch.ask()).findings
        ]

    app = ReplayApp(player, title=title, find_findings=marks)
    app.diagnosis, app.evidence = watch, Excerpts(trace.path, trace.end)
    app.outlets = Outlets(lambda _: None)
    app.outlets.watch_hardware()
    app.slo = slo

    async def main() -> None:
        _leave_on(app, signal.SIGINT)
        await app.run_async()

    asyncio.run(main())
    return app.return_code or 0


def show_budget(made: Budget, *, journey: bool) -> int:
    """Show a budget with its sliders, or its journey, until the user quits; the exit code."""
    from tracer.tui.budget_app import BudgetApp

    app = BudgetApp(made, journey=journey)

    async def main() -> None:
        _leave_on(app, signal.SIGINT)
        await app.run_async()

    asyncio.run(main())
    return app.return_code or 0


def show_run(
    run: Run,
    voice: Voice,
    *,
    traffic: Traffic | None,
    mode: str,
    with_text: bool = False,
    slo: Slo = NO_TARGETS,
) -> int:
    """Run and show `run`: the engine starts once the screen is there, and ends after it is gone.
    `with_text`: what is recorded by a key holds prompts and outputs too. `slo`: the targets to
    begin with.

    The exit code: the command's when it ended by itself or by a signal that came for us, 0 when the
    user quit. Raises RunError when the command cannot be run, or ended before any traced process
    appeared in it.
    """
    return asyncio.run(_show_run(run, voice, traffic, mode, with_text, slo))


async def _show_run(
    run: Run, voice: Voice, traffic: Traffic | None, mode: str, with_text: bool, slo: Slo
) -> int:
    tape = LiveRecording(run.bus, with_text=with_text, given=run.recorder, flight=run.flight)
    ring = EvidenceRing(run.bus, with_text=with_text, flight=run.flight)
    app = _app(
        run.bus, run.job.title, mode=mode, log=run.log, traffic=traffic, tape=tape, evidence=ring
    )
    app.slo = slo

    def on_screen(text: str, passing: bool) -> None:
        app.note = text
        if not run.traced:  # the stream has no news of its own yet
            app.feed.status = text
        if not passing:
            run.log.add(f"tracer: {text}")

    voice.on_screen = on_screen
    reading = asyncio.create_task(run.log.follow())
    living = asyncio.create_task(_live(run, app))
    watching = asyncio.create_task(_beside(app, run.outlets or Outlets(voice.say)))
    try:
        _leave_on(app, signal.SIGINT)
        await app.run_async()
    except BaseException:
        await end(run, living, None)
        raise
    finally:
        voice.on_screen = None
        reading.cancel()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        ended = await tape.stop()
        if ended:
            voice.say(ended)
    if living.done():
        code = living.result()
        if code and not run.traced:
            raise RunError(
                f"{run.job.title} ended with code {code} after {run.seconds:.1f} s", code
            )
        return code
    came = next((known for known in SIGNALS if app.return_code == 128 + known), None)
    loop = asyncio.get_running_loop()
    for known in SIGNALS:
        loop.add_signal_handler(known, lambda: run.child.hurry() if run.child is not None else None)
    if run.child is not None:
        voice.say(f"ending {run.job.title} …")
    code = await end(run, living, came)
    return code or app.return_code or 0 if came is None else code


async def _painted(app: TracerApp) -> None:
    """Wait for the first paint."""
    while not app.is_running or not app.screen_stack:
        await asyncio.sleep(PAINT_S)
    painted = asyncio.Event()
    app.call_after_refresh(painted.set)
    await painted.wait()


async def _beside(app: TracerApp, outlets: Outlets) -> None:
    """Alerts, metrics and the machine beside a screen, from its first paint on."""
    app.outlets = outlets
    outlets.on_news = app.tell
    outlets.say = app.say
    await _painted(app)
    if outlets.endpoint is not None:
        app.note = f"metrics at {outlets.endpoint.url}"
    outlets.watch_hardware()
    await outlets.run(app.feed.state, app.feed.now)


async def _live(run: Run, app: TracerApp) -> int:
    """The run's life, from the first paint on. When the engine has ended the screen stays if it
    shows something."""
    await _painted(app)
    # for the thread that writes, and a terminal that takes its time
    for _ in range(round(PATIENCE_S / PAINT_S)):
        if app.at_rest:
            break
        await asyncio.sleep(PAINT_S)
    try:
        code = await run.live()
    except RunError:
        app.exit()
        raise
    if code and not run.traced:
        app.exit()
    elif not run.stopping:
        how = f"ended with code {code}" if code else "has ended"
        run.say(f"{run.job.title} {how} · q quits")
    return code


def _app(
    bus: Bus,
    title: str,
    *,
    mode: str,
    tape: LiveRecording,
    log: EngineLog | None = None,
    traffic: Traffic | None = None,
    evidence: EvidenceRing | None = None,
) -> TracerApp:
    from tracer.analysis.diagnosis.series import ObservedState
    from tracer.tui.app import TracerApp
    from tracer.tui.feed import LiveFeed

    class Feed(LiveFeed):
        """Sets the bus going once the feed listens, so that it misses nothing."""

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

    def note(sentence: str) -> None:
        app.note = sentence

    tape.on_note = note
    if evidence is not None:
        evidence.on_note = note
        app.evidence = evidence
    return app


def _leave_on(app: TracerApp, number: signal.Signals) -> None:
    """Leave the screen on a signal that the app does not look after itself."""
    with contextlib.suppress(RuntimeError, ValueError):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: app.exit(return_code=128 + number)
        )

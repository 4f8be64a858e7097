"""Under the TUI: an engine that is joined, or one that is run and ends with the screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Final

from tracer.bus import Bus
from tracer.headless import SIGNALS, end
from tracer.intake import Delivery
from tracer.run import Run, RunError
from tracer.voice import Voice

if TYPE_CHECKING:
    from tracer.player import Player
    from tracer.tui.app import TracerApp
    from tracer.tui.feed import Traffic

PAINT_S: Final = 0.02
"""Seconds between two looks whether the screen is painted."""
PATIENCE_S: Final = 2.0
"""How long a terminal that does not take what is written holds up the start of the engine."""


def show_live(sources: Iterable[AsyncIterable[Delivery]], title: str) -> int:
    """Show what `sources` tell until the user quits; the exit code."""
    bus = Bus()
    for source in sources:
        bus.add(source)
    app = _app(bus, title, mode="live")

    async def main() -> None:
        _leave_on(app, signal.SIGINT)
        await app.run_async()

    asyncio.run(main())
    return app.return_code or 0


def show_replay(player: Player, title: str) -> int:
    """Show what `player` plays until the user quits; the exit code."""
    from tracer.tui.replay import ReplayApp

    app = ReplayApp(player, title=title)

    async def main() -> None:
        _leave_on(app, signal.SIGINT)
        await app.run_async()

    asyncio.run(main())
    return app.return_code or 0


def show_run(run: Run, voice: Voice, *, traffic: Traffic | None, mode: str) -> int:
    """Run and show `run`: the engine starts once the screen is there, and ends after it is gone.

    The exit code: the command's when it ended by itself or by a signal that came for us, 0 when the user quit. Raises
    RunError when the command cannot be run, or ended before any traced process appeared in it.
    """
    return asyncio.run(_show_run(run, voice, traffic, mode))


async def _show_run(run: Run, voice: Voice, traffic: Traffic | None, mode: str) -> int:
    app = _app(run.bus, run.job.title, mode=mode, log=run.log, traffic=traffic)

    def on_screen(text: str, passing: bool) -> None:
        app.note = text
        if not run.traced:  # the stream has no news of its own yet
            app.feed.status = text
        if not passing:
            run.log.add(f"tracer: {text}")

    voice.on_screen = on_screen
    reading = asyncio.create_task(run.log.follow())
    living = asyncio.create_task(_live(run, app))
    try:
        _leave_on(app, signal.SIGINT)
        await app.run_async()
    except BaseException:
        await end(run, living, None)
        raise
    finally:
        voice.on_screen = None
        reading.cancel()
    if living.done():
        code = living.result()
        if code and not run.traced:
            raise RunError(f"{run.job.title} ended with code {code} after {run.seconds:.1f} s", code)
        return code
    came = next((known for known in SIGNALS if app.return_code == 128 + known), None)
    loop = asyncio.get_running_loop()
    for known in SIGNALS:
        loop.add_signal_handler(known, lambda: run.child.hurry() if run.child is not None else None)
    if run.child is not None:
        voice.say(f"ending {run.job.title} …")
    code = await end(run, living, came)
    return code or app.return_code or 0 if came is None else code


async def _live(run: Run, app: TracerApp) -> int:
    """The run's life, from the first paint on. When the engine has ended the screen stays if it shows something."""
    while not app.is_running or not app.screen_stack:
        await asyncio.sleep(PAINT_S)
    painted = asyncio.Event()
    app.call_after_refresh(painted.set)
    await painted.wait()
    for _ in range(round(PATIENCE_S / PAINT_S)):  # for the thread that writes, and a terminal that takes its time
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


def _app(bus: Bus, title: str, *, mode: str, log: object = None, traffic: Traffic | None = None) -> TracerApp:
    from tracer.tui.app import TracerApp
    from tracer.tui.feed import LiveFeed

    class Feed(LiveFeed):
        """Sets the bus going once the feed listens, so that it misses nothing."""

        async def run(self) -> None:
            carrying = asyncio.create_task(self.bus.run())
            try:
                await super().run()
            finally:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)

    return TracerApp(Feed(bus), title=title, log=log, traffic=traffic, mode=mode)  # type: ignore[arg-type]


def _leave_on(app: TracerApp, number: signal.Signals) -> None:
    """Leave the screen on a signal that the app does not look after itself."""
    with contextlib.suppress(RuntimeError, ValueError):
        asyncio.get_running_loop().add_signal_handler(number, lambda: app.exit(return_code=128 + number))

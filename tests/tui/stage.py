"""A feed over a timeline with a clock that stands still until a test moves it, apps on it, and what
a terminal sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pyte
from textual._compositor import Compositor
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot
from textual.screen import Screen

from engine_hooks.protocol.events import Event
from tests.tui import stillness
from tests.tui.timeline import HEADER, SOURCE, Timeline
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.screens.base import FrameScreen
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.toolkit.theme import DARK, UNICODE, Look

stillness.install()


class FixedFeed:
    """Events up to an instant that only `advance` moves."""

    def __init__(
        self, events: Iterable[Event], at: int, *, status: str = "● LIVE", announce: bool = True
    ) -> None:
        self.state = TraceState(keep_finished=10_000)
        if announce:
            self.state.add_source(HEADER)
        self.status = status
        self._events = iter(events)
        self._next: Event | None = next(self._events, None)
        self._at = 0
        self.advance(at)

    def now(self) -> int:
        """Where the clock stands."""
        return self._at

    def advance(self, to: int) -> None:
        """Move the clock to an instant, taking in what happened until then."""
        self._at = to
        while self._next is not None and self._next.t <= to:
            self.state.apply(SOURCE, self._next)
            self._next = next(self._events, None)

    def apply(self, event: Event) -> None:
        """Take in one more event."""
        self.state.apply(SOURCE, event)

    async def run(self) -> None:
        """Nothing comes by itself."""
        await asyncio.Event().wait()


def app_at(timeline: Timeline, at: int, **options: Any) -> TracerApp:
    """An app that shows a timeline at an instant, with a look that does not depend on the terminal
    of the test."""
    return app_on(FixedFeed(timeline.events, at), **options)


def app_on(feed: FixedFeed, **options: Any) -> TracerApp:
    """An app on a feed; frames come when a test asks for them."""
    options.setdefault("look", Look(DARK, UNICODE))
    return TracerApp(feed, **options)


async def settle(pilot: Pilot[Any]) -> None:
    """Draw every part of the screen in front, and let the terminal have it."""
    for _ in range(2):
        await pilot.pause()
        screen = pilot.app.screen
        if isinstance(screen, LiveScreen | RequestScreen):
            screen.redraw()
        elif isinstance(screen, FrameScreen):
            screen.draw()
    await pilot.pause()


async def flushed(pilot: Pilot[Any]) -> None:
    """Wait until the terminal has been sent everything that was drawn."""
    await settle(pilot)
    screen = pilot.app.screen
    for _ in range(200):
        if not (
            screen._dirty_widgets or compositor_of(screen)._dirty_regions or screen._layout_required
        ):
            return
        await pilot.pause(0.01)
    raise AssertionError("the screen never comes to rest")


def compositor_of(screen: Screen[Any]) -> Compositor:
    """What composes a screen."""
    return screen._compositor


def rows_of(app: TracerApp) -> list[str]:
    """The text of the screen, a string a row."""
    return [strip.text for strip in compositor_of(app.screen).render_strips()]


def text_of(app: TracerApp) -> str:
    """The text of the screen."""
    return "\n".join(rows_of(app))


class CapturingDriver(HeadlessDriver):
    """A driver without a terminal that keeps what would be sent to one."""

    sent: str = ""

    @property
    def is_headless(self) -> bool:
        """So that the app writes."""
        return False

    def write(self, data: str) -> None:
        """Keep it."""
        self.sent += data

    def flush(self) -> None:
        """Nothing waits."""


class Terminal:
    """A terminal emulator fed with what an app sends."""

    def __init__(self, width: int, height: int) -> None:
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.Stream(self.screen)
        self._stream.feed("\x1b[?7l")  # as Textual's driver does: no wrapping at the right edge

    def feed(self, data: str) -> None:
        """Take in sequences."""
        self._stream.feed(data)

    def cells(self) -> list[list[tuple[str, str, str, bool, bool, bool]]]:
        """Every cell: text, colours, bold, reverse, underscore."""
        rows = []
        for y in range(self.screen.lines):
            line = self.screen.buffer[y]
            rows.append([
                (c.data, c.fg, c.bg, c.bold, c.reverse, c.underscore)
                for c in (line[x] for x in range(self.screen.columns))
            ])  # fmt: skip
        return rows


def repainted(app: TracerApp) -> Terminal:
    """A fresh terminal that was sent the whole screen at once."""
    terminal = Terminal(*app.size)
    terminal.feed("\x1b[2J\x1b[H")
    terminal.feed(
        compositor_of(app.screen)
        .render_full_update()
        .render_segments(app.console)
        .replace("\n", "")
    )
    return terminal

"""A screen that was left is whole when it is visited again: what counts is what the terminal was
sent."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.screen import Screen

from engine_hooks.protocol.clock import NS_PER_S
from tests.effort import thinned
from tests.tui.seen import screens_in
from tests.tui.stage import CapturingDriver, FixedFeed, Terminal, app_on, repainted
from tests.tui.timeline import START, Timeline
from tracer.tui import watch
from tracer.tui.app import TracerApp
from tracer.tui.toolkit.theme import DARK, LIGHT, UNICODE, Look, Palette


class Visitor:
    """Somebody in front of a terminal, who presses keys and looks."""

    def __init__(self, app: TracerApp, feed: FixedFeed, pilot: Pilot[Any]) -> None:
        self.app, self.feed, self.pilot = app, feed, pilot
        self.terminal = Terminal(*app.size)
        self.looks = 0

    async def press(self, *keys: str) -> None:
        """Press keys, and let what follows happen."""
        await self.pilot.press(*keys)

    async def type(self, keys: str) -> None:
        """Keys that come in one piece: none waits for what the one before does."""
        for key in keys:
            event = events.Key("question_mark" if key == "?" else key, key)
            event.set_sender(self.app)
            self.driver.send_message(event)
        await self.pilot.pause()

    async def resize(self, width: int, height: int) -> None:
        """Another size; the terminal keeps what it can of what it showed."""
        self._take_in()
        self.terminal.screen.resize(height, width)
        await self.pilot.resize_terminal(width, height)

    async def look(self, key: str) -> Terminal:
        """Make something new known, and see that the terminal shows the screen of `key`, whole and
        as of now."""
        self.looks += 1
        self.app.note = f"look {self.looks}"
        for _ in range(6):  # some parts are drawn every few frames only
            self.app.tick()
            await self.pilot.pause()
        self._take_in()
        rows = list(self.terminal.screen.display)
        text = "\n".join(rows)
        assert screens_in(text) == {key}, text
        assert key == "?" or self.app.note in rows[-1], text
        assert self.terminal.cells() == repainted(self.app).cells(), text
        return self.terminal

    @property
    def driver(self) -> CapturingDriver:
        """What sends to the terminal."""
        driver = self.app._driver
        assert isinstance(driver, CapturingDriver)
        return driver

    def _take_in(self) -> None:
        self.terminal.feed(self.driver.sent)
        self.driver.sent = ""


@asynccontextmanager
async def visiting(
    timeline: Timeline, size: tuple[int, int] = (80, 24), palette: Palette = DARK
) -> AsyncIterator[Visitor]:
    """An app over a timeline, and somebody who looks at it."""
    feed = FixedFeed(timeline.events, START + 3 * NS_PER_S)
    app = app_on(feed, look=Look(palette, UNICODE))
    app.driver_class = CapturingDriver
    async with app.run_test(headless=False, size=size) as pilot:
        visitor = Visitor(app, feed, pilot)
        await visitor.look("1")
        yield visitor


@pytest.fixture(scope="module")
def short() -> Timeline:
    """A few requests, some of which run."""
    return Timeline(24, rate=6.0)


@pytest.mark.parametrize("key", thinned("34567", 3))
async def test_a_screen_is_drawn_at_each_visit(short: Timeline, key: str) -> None:
    async with visiting(short) as visitor:
        for back in ("1", "escape", "1"):
            await visitor.press(key)
            await visitor.look(key)
            visitor.feed.advance(visitor.feed.now() + NS_PER_S // 10)
            await visitor.look(key)
            await visitor.press(back)
            await visitor.look("1")


async def test_a_screen_is_found_as_it_was_left(short: Timeline) -> None:
    async with visiting(short) as visitor:
        await visitor.press("5", "down", "down")
        left = (await visitor.look("5")).screen.display[:-1]
        await visitor.press("3", "1", "5")
        assert (await visitor.look("5")).screen.display[:-1] == left
        await visitor.press("up")
        assert (await visitor.look("5")).screen.display[:-1] != left


@pytest.mark.parametrize("keys", thinned(["3142567", "3131313", "25?4?17", "2222", "4?53?6"], 5))
async def test_keys_that_come_in_one_piece_lead_to_the_last_one(short: Timeline, keys: str) -> None:
    async with visiting(short) as visitor:
        for _ in range(2):
            await visitor.type(keys)
            await visitor.look(keys[-1])
        for key in "13":
            await visitor.press(key)
            await visitor.look(key)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_screens_that_were_away_have_the_size_and_palette_of_now(
    short: Timeline, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look as those of a program that was started so. The diagnosis comes every few seconds:
    not in between."""
    monkeypatch.setattr(watch, "CHECK_S", 3_600)
    async with visiting(short, size, LIGHT) as fresh:
        expected = {}
        for key in "1345672":
            await fresh.press(key)
            expected[key] = (await fresh.look(key)).cells()[:-1]
    async with visiting(short, (100, 30)) as visitor:
        for key in "345671":
            await visitor.press(key)
            await visitor.look(key)
        await visitor.resize(*size)
        visitor.app.use_palette(LIGHT.name)
        for key in "1345672":
            await visitor.press(key)
            assert (await visitor.look(key)).cells()[:-1] == expected[key], key


@pytest.mark.parametrize("keys", ["2", "?"])
async def test_screens_that_are_made_anew_each_time_are_freed(short: Timeline, keys: str) -> None:
    made: weakref.WeakSet[Screen[Any]] = weakref.WeakSet()
    async with visiting(short) as visitor:
        for back in ("1", "escape", "3"):
            await visitor.press(*keys)
            made.add(visitor.app.screen)
            await visitor.press(back)
        await visitor.look("3")
        gc.collect()
        assert len(made) <= 1, "the last one may still be referred to"

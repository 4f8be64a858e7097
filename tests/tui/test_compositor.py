"""Partial updates draw the same screen as a full repaint, with fewer bytes; and Textual's own way
stays as fallback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import textual
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual import _compositor
from textual.strip import Strip

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tests.tui.stage import CapturingDriver, FixedFeed, Terminal, app_on, repainted, settle
from tests.tui.timeline import START, Timeline
from tracer.tui.toolkit import compositor
from tracer.tui.toolkit.theme import ANSI16, ASCII, DARK, MONO, UNICODE, Look

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    """Each test starts and ends with the fast path in place."""
    assert compositor.patch() == ""
    yield
    compositor.patch()


def capturing(feed: FixedFeed, **options: Any) -> Any:
    app = app_on(feed, **options)
    app.driver_class = CapturingDriver
    return app


LOOKS = {"dark": Look(DARK, UNICODE), "ansi": Look(ANSI16, UNICODE), "mono": Look(MONO, ASCII)}


@pytest.mark.parametrize(
    "size", [pytest.param((200, 60), marks=pytest.mark.slow), (80, 24), (37, 11)]
)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("stock", [False, True])
async def test_incremental_screen_equals_a_forced_repaint(
    busy: Timeline, size: tuple[int, int], look: str, stock: bool
) -> None:
    feed = FixedFeed(busy.events, START + 4 * NS_PER_S)
    app = capturing(feed, look=LOOKS[look])
    if stock:
        compositor.unpatch()
    terminal = Terminal(*size)
    draw = random.Random(7)
    async with app.run_test(headless=False, size=size) as pilot:
        await settle(pilot)
        for step in range(36):
            feed.advance(feed.now() + draw.choice([30, 100, 400]) * NS_PER_MS)
            if step % 6 == 5:
                await pilot.press(
                    draw.choice(["up", "down", "s", "f", "v", "m", "a", "pageup", "space"])
                )
            await pilot.pause()
            app.screen.draw()
            await pilot.pause()
            terminal.feed(app._driver.sent.replace("\n", ""))
            app._driver.sent = ""
            if step % 4 == 3:
                assert terminal.cells() == repainted(app).cells(), f"after step {step}"


async def test_incremental_screen_is_right_under_and_after_overlays(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, START + 4 * NS_PER_S)
    app = capturing(feed)
    app.NOTIFICATION_TIMEOUT = 0.3
    terminal = Terminal(120, 36)
    async with app.run_test(headless=False, size=(120, 36), notifications=True) as pilot:
        await settle(pilot)

        async def frames(count: int) -> None:
            for _ in range(count):
                feed.advance(feed.now() + 100 * NS_PER_MS)
                if hasattr(app.screen, "draw"):
                    app.screen.draw()
                await pilot.pause()
            terminal.feed(app._driver.sent.replace("\n", ""))
            app._driver.sent = ""
            assert terminal.cells() == repainted(app).cells()

        app.report("[red]a message[/] over the list")
        await frames(3)
        await pilot.press("ctrl+p")
        await frames(2)
        await pilot.press("escape")
        await frames(3)
        await pilot.press("up", "up", "enter")
        await frames(4)
        await pilot.press("question_mark")
        await frames(2)
        await pilot.press("escape", "escape", "slash", "r")
        await frames(4)
        await pilot.pause(0.5)
        await frames(3)


async def test_request_screen_is_drawn_incrementally_too(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, START + 4 * NS_PER_S)
    app = capturing(feed)
    terminal = Terminal(160, 50)
    async with app.run_test(headless=False, size=(160, 50)) as pilot:
        await settle(pilot)
        await pilot.press("up", "enter")
        for _ in range(25):
            feed.advance(feed.now() + 80 * NS_PER_MS)
            app.screen.draw()
            await pilot.pause()
        terminal.feed(app._driver.sent.replace("\n", ""))
        assert terminal.cells() == repainted(app).cells()


async def test_an_update_sends_far_less_than_stock(busy: Timeline) -> None:
    sent = {}
    for stock in (False, True):
        feed = FixedFeed(busy.events, START + 6 * NS_PER_S)
        app = capturing(feed)
        if stock:
            compositor.unpatch()
        async with app.run_test(headless=False, size=(200, 60)) as pilot:
            await settle(pilot)
            app._driver.sent = ""
            for _ in range(10):
                feed.advance(feed.now() + 100 * NS_PER_MS)
                app.screen.draw()
                await pilot.pause()
            sent[stock] = len(app._driver.sent)
    assert sent[False] < sent[True] / 3


async def test_nothing_is_sent_when_nothing_changed(busy: Timeline) -> None:
    app = capturing(FixedFeed(busy.events, busy.end + NS_PER_S))
    async with app.run_test(headless=False, size=(200, 60)) as pilot:
        await settle(pilot)
        app._driver.sent = ""
        for _ in range(12):
            app.tick()
            app.screen.draw()
            await pilot.pause()
        assert app._driver.sent == ""


def test_another_version_of_textual_keeps_its_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    compositor.unpatch()
    stock = _compositor.ChopsUpdate.render_segments
    monkeypatch.setattr(textual, "__version__", "99.0", raising=False)
    assert "99.0" in compositor.patch()
    assert _compositor.ChopsUpdate.render_segments is stock


def test_two_cell_glyphs_are_never_cut() -> None:
    strip = Strip([Segment("ab中文cd", Style(color="red"))])
    assert compositor.whole_glyphs(strip, 3, 4) == (2, 4)
    assert compositor.whole_glyphs(strip, 0, 3) == (0, 4)
    assert compositor.whole_glyphs(strip, 3, 5) == (2, 6)
    assert compositor.whole_glyphs(strip, 0, 2) == (0, 2)


@pytest.mark.parametrize(
    "system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT, ColorSystem.STANDARD]
)
def test_styles_said_once_mean_the_same_as_styles_said_each_time(system: ColorSystem) -> None:
    styles = [
        Style(color="#2f99fa", bgcolor="#0d1117"),
        Style(color="#dd7408", bgcolor="#0d1117", bold=True),
        Style(color="red"),
        Style(bold=True, reverse=True),
        Style(),
        None,
        Style(bgcolor="#141b24", underline=True),
        Style(color="#2f99fa", bgcolor="#0d1117"),
    ]
    draw = random.Random(3)
    console = Console(force_terminal=True, color_system="truecolor")
    console._color_system = system
    for _ in range(50):
        strip = Strip(
            [
                Segment(draw.choice("abc█░") * draw.randint(1, 4), draw.choice(styles))
                for _ in range(6)
            ]
        )
        pen = compositor._Pen(system)
        pen.draw(strip, 0, 0, 0, strip.cell_length)
        ours, theirs = Terminal(40, 1), Terminal(40, 1)
        ours.feed(pen.end())
        theirs.feed("\x1b[1;1H" + strip.render(console))
        assert ours.cells() == theirs.cells()

"""What can be reached with keys, what a still screen sends, and a replay of hostile text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual.widget import Widget

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import record
from tests.state.traces import header
from tests.tui.stage import (
    CapturingDriver,
    FixedFeed,
    app_at,
    app_on,
    flushed,
    rows_of,
    settle,
    text_of,
)
from tests.tui.test_hostile import BIDI, MARKUP, SEQUENCES, facts, request_events
from tests.tui.timeline import START, Timeline
from tracer.format.text import clean
from tracer.replay.player import Player
from tracer.tui.replay.app import ReplayApp
from tracer.tui.toolkit.theme import DARK, UNICODE, Look

pytestmark = pytest.mark.slow

AT = START + 9_500 * NS_PER_MS


@pytest.mark.parametrize(("size", "keys", "parts"), [
    ((160, 40), (), {"waterfall", "kv", "batch", "queue"}), ((80, 24), (), {"waterfall"}),
    ((80, 24), ("v",), {"kv", "batch", "queue"}), ((160, 40), ("v",), {"waterfall"}),
])  # fmt: skip
async def test_tab_goes_through_the_parts_that_can_be_seen_and_no_others(
    busy: Timeline, size: tuple[int, int], keys: tuple[str, ...], parts: set[str]
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await pilot.press(*keys)
        await settle(pilot)
        seen: set[str] = set()
        for _ in range(8):
            await pilot.press("tab")
            focused: Widget | None = app.focused
            assert focused is not None and focused.id is not None
            seen.add(focused.id)
        assert seen == parts


async def test_everything_is_reached_without_a_mouse(busy: Timeline) -> None:
    """From the start to a request, its parts, each numbered screen, the palette, and out."""
    app = app_at(busy, AT)
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        await pilot.press("up", "enter")
        await settle(pilot)
        assert "twelve stages" in text_of(app)
        for tab in app.TABS:
            await pilot.press(str(tab.number))
            await settle(pilot)
            assert app.screen is app._tabs[tab.number]
        await pilot.press("1", "ctrl+p")
        await pilot.pause()
        assert app.screen is not app.live
        await pilot.press("escape", "q")
        await pilot.pause()
    assert app.return_code == 0


async def test_a_still_screen_sends_nothing(busy: Timeline) -> None:
    """Nothing runs and nothing comes: minutes pass without a byte."""
    feed = FixedFeed(busy.events, busy.end)
    app = app_on(feed)
    app.driver_class = CapturingDriver
    async with app.run_test(headless=False, size=(160, 48)) as pilot:
        await flushed(pilot)
        for _ in range(3):
            app.tick()
            await flushed(pilot)
        driver = app._driver
        assert isinstance(driver, CapturingDriver)
        driver.sent = ""
        for _ in range(600):
            app.tick()
        await pilot.pause()
        assert driver.sent == ""


@pytest.mark.parametrize(
    "texts", [MARKUP, SEQUENCES, BIDI], ids=["markup", "sequences", "bidirectional"]
)
async def test_hostile_text_of_a_recording_reaches_no_terminal_and_is_shown(
    texts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "hostile.trace"
    events = [event for key, text in enumerate(texts, 1) for event in request_events(key, text)]
    source = header(f"engine{texts[0]}")
    record(
        path,
        [
            Delivery(source.source, source),
            Delivery(source.source, None, [facts(texts[0]), *events]),
        ],
    )
    player = Player.open(path, paused=True)
    app = ReplayApp(player, look=Look(DARK, UNICODE), title=texts[0])
    app.driver_class = CapturingDriver
    async with app.run_test(headless=False, size=(130, 44)) as pilot:
        player.seek(START + NS_PER_S)
        for _ in range(200):
            await pilot.pause()
            if player.target is None and player.state.requests.order:
                break
            player.tick()
        app.tick()
        app._redraw()
        await flushed(pilot)
        assert any(clean(texts[0])[:4] in row for row in rows_of(app))
        driver = app._driver
        assert isinstance(driver, CapturingDriver)
        body = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\n|\x1b\\]22;[a-z]*\x07", "", driver.sent)
        assert body
        assert [c for c in body if ord(c) < 32 or 0x7F <= ord(c) < 0xA0] == []
        assert not any(character in body for character in "\u202e\u2066\u2028\u2029\u200f\ufeff")
    player.close()

"""Every size: rows exactly as wide as the widget, no exception, and something useful wherever there
is room."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import START, Timeline
from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas
from tracer.tui.toolkit.theme import ANSI16, ASCII, DARK, MONO, UNICODE, Look

pytestmark = pytest.mark.slow

AT = START + 9_500 * NS_PER_MS


@pytest.mark.slow
@pytest.mark.parametrize("look", [Look(DARK, UNICODE), Look(ANSI16, UNICODE), Look(MONO, ASCII)])
async def test_every_part_paints_rows_of_its_width_at_every_width_and_height(
    busy: Timeline, look: Look
) -> None:
    app = app_at(busy, AT, look=look)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        app.live.listing.select(3)
        await settle(pilot)
        parts = list(app.live.query(Canvas))
        app.open_request(app.live.listing.rows[3])
        await settle(pilot)
        parts += list(app.screen.query(Canvas))
        await pilot.press("question_mark")
        parts += list(app.screen.query(Canvas))
        assert len(parts) > 15
        for part in parts:
            for width in range(1, 201):
                for height in (1, 3, 12) if width % 20 else (1, 2, 3, 4, 5, 8, 13, 21, 34, 60):
                    for row in part.paint(width, height)[:height]:
                        cells = sum(cell_width(segment.text) for segment in row)
                        assert cells == width, f"{part.id} at {width}×{height}"


SIZES = [
    (1, 1),
    (2, 2),
    (500, 200),
    (1, 60),
    (200, 1),
    (3, 5),
    (10, 4),
    (40, 10),
    (65, 20),
    (79, 23),
    (116, 30),
    (119, 40),
]


@pytest.mark.parametrize("size", SIZES)
async def test_screens_of_any_size_work(busy: Timeline, size: tuple[int, int]) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        assert len(rows_of(app)) == size[1]
        await pilot.press("up", "v", "m", "tab", "enter")
        await settle(pilot)
        await pilot.press("x", "down", "c", "m", "question_mark")
        await settle(pilot)
        await pilot.press("escape", "escape", "escape")
        await settle(pilot)
        assert {cell_width(row) for row in rows_of(app)} == {size[0]}


@pytest.mark.slow
async def test_a_storm_of_resizes_while_it_streams_ends_in_the_right_screen(busy: Timeline) -> None:
    draw = random.Random(11)
    feed = FixedFeed(busy.events, START + NS_PER_S)
    app: Any = app_on(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        for _ in range(40):
            await pilot.resize_terminal(draw.randint(1, 220), draw.randint(1, 70))
            feed.advance(feed.now() + 120 * NS_PER_MS)
            app.tick()
        await pilot.resize_terminal(120, 40)
        await settle(pilot)
        stormy = text_of(app)
        span = app.live.waterfall.axis.begin, app.live.waterfall.axis.span
    calm = app_on(FixedFeed(busy.events, feed.now()))
    async with calm.run_test(size=(120, 40)) as pilot:
        calm.live.waterfall.axis.begin, calm.live.waterfall.axis.span = span
        await settle(pilot)
        ids = [
            row.split()[0] for row in text_of(calm).splitlines()[5:30] if row.startswith(" req_")
        ]
        assert ids
        assert [
            row.split()[0] for row in stormy.splitlines()[5:30] if row.startswith(" req_")
        ] == ids
        assert text_of(calm).splitlines()[:3] == stormy.splitlines()[:3]


async def test_eighty_by_twenty_four_shows_what_matters(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        text = text_of(app)
        for word in (
            "SmolLM2",
            "● LIVE",
            "TTFT ms",
            "ITL ms",
            "KV",
            "requests 83",
            "decode",
            "█",
            "? help",
        ):
            assert word in text
        assert sum(row.startswith(" req_") for row in rows_of(app)) >= 13

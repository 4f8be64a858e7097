"""Expected values on the screens: a tick on the bars, a column of figures, and the reason where
there are none."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import STAGES
from tests.tui.stage import FixedFeed, app_on, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.analysis.fit.calibration import keep_processor
from tracer.analysis.model.devices import cpu_device
from tracer.format import figures
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.toolkit.bar import Bars, Stretch
from tracer.tui.toolkit.theme import ASCII, DARK, MONO, UNICODE, Look

AT = START + 9_500 * NS_PER_MS
TICK = UNICODE.expected


@pytest.fixture(scope="module")
def on_l4() -> Timeline:
    """A timeline of an engine on a device whose peaks are known."""
    return Timeline(80, rate=9.0, engine=msgspec.structs.replace(ENGINE, device="NVIDIA L4"))


async def request_screen(pilot: object, app: object) -> RequestScreen:
    view = next(
        view
        for view in app.feed.state.snapshot().requests
        if view.closed and view.output_tokens > 20
    )  # type: ignore[attr-defined]
    app.open_request(view)  # type: ignore[attr-defined]
    await settle(pilot)  # type: ignore[arg-type]
    screen = app.screen  # type: ignore[attr-defined]
    assert isinstance(screen, RequestScreen)
    return screen


async def test_each_stage_has_its_expected_value_as_a_tick_and_a_figure(on_l4: Timeline) -> None:
    app = app_on(FixedFeed(on_l4.events, AT))
    async with app.run_test(size=(120, 44)) as pilot:
        screen = await request_screen(pilot, app)
        assert set(screen.stages.expected) == {known.stage for known in STAGES}
        rows = rows_of(app)
        assert f"{TICK} expected" in text_of(app)
        assert "expected from theory: L4" in text_of(app)
        header = next(row for row in rows if "share" in row)
        assert "expected" in header
        for known in STAGES:
            row = next(row for row in rows if known.label in row[:18])
            assert figures.milliseconds(screen.stages.expected[known.stage]) in row
            assert TICK in row or UNICODE.beyond in row, known.label


async def test_at_80_columns_the_ticks_are_there_without_the_column(on_l4: Timeline) -> None:
    app = app_on(FixedFeed(on_l4.events, AT))
    async with app.run_test(size=(80, 24)) as pilot:
        await request_screen(pilot, app)
        rows = rows_of(app)
        assert f"{TICK} expected" in text_of(app)
        assert sum(TICK in row or UNICODE.beyond in row for row in rows[4:16]) == 12


async def test_a_chosen_stage_tells_how_far_off_it_is(on_l4: Timeline) -> None:
    app = app_on(FixedFeed(on_l4.events, AT))
    async with app.run_test(size=(120, 44)) as pilot:
        screen = await request_screen(pilot, app)
        screen.stages.select(11)
        await settle(pilot)
        assert re.search(r"expected [\d.,]+ ms, took [\d.,]+ times as long", text_of(app))


async def test_without_a_known_device_there_is_no_tick_and_the_reason_is_said(
    busy: Timeline,
) -> None:
    app = app_on(FixedFeed(busy.events, AT))
    async with app.run_test(size=(120, 44)) as pilot:
        await settle(pilot)
        assert not app.live.waterfall.ticks
        await request_screen(pilot, app)
        text = text_of(app)
        assert "no expected values: run `tracer budget --device cpu` once" in text
        assert TICK not in text


async def test_a_processor_that_was_measured_once_is_enough(busy: Timeline, cache: Path) -> None:
    path = keep_processor(cpu_device(1e11, 2e10))
    try:
        app = app_on(FixedFeed(busy.events, AT))
        async with app.run_test(size=(120, 44)) as pilot:
            await request_screen(pilot, app)
            assert TICK in text_of(app)
    finally:
        path.unlink()
    assert cache in path.parents


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_bars_of_the_list_carry_ticks_and_a_word_explains_them(
    on_l4: Timeline, size: tuple[int, int]
) -> None:
    app = app_on(FixedFeed(on_l4.events, AT))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await settle(pilot)
        rows = [row for row in rows_of(app) if row.lstrip(" ▌").startswith("req_")]
        assert len(rows) > 10
        assert sum(TICK in row for row in rows) > len(rows) // 2
        legend = next(
            row for row in rows_of(app) if "█recv" in row or "▌recv" in row or "receive" in row
        )
        assert f"{TICK} exp" in legend


async def test_the_tick_of_a_finished_request_lies_where_it_should_have_ended(
    on_l4: Timeline,
) -> None:
    feed = FixedFeed(on_l4.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(160, 50)) as pilot:
        await settle(pilot)
        await settle(pilot)
        waterfall = app.live.waterfall
        engine = feed.state.snapshot().engines[0]
        for view in waterfall.listing.rows:
            should = waterfall.expect(view)
            assert should is not None
            detail = feed.state.detail(view.id)
            if view.closed is not None:
                assert should == app.beside.e2e_ms(engine, detail)
            else:
                assert should == app.beside.first_ms(engine, view)


@pytest.mark.parametrize("look", [Look(DARK, UNICODE), Look(DARK, ASCII), Look(MONO, ASCII)])
def test_a_tick_takes_one_cell_inside_behind_and_beyond_a_bar(look: Look) -> None:
    bars = Bars(look, 20)
    stretch = [Stretch(2 * bars.unit, 12 * bars.unit, 11)]
    plain = bars.draw(stretch)
    for unit, glyph, column in (
        (5 * bars.unit, look.glyphs.expected, 5), (15 * bars.unit, look.glyphs.expected, 15),
        (99 * bars.unit, look.glyphs.beyond, 19), (0, look.glyphs.expected, 0),
    ):  # fmt: skip
        text = "".join(segment.text for segment in bars.draw(stretch, expected=unit))
        assert len(text) == 20
        assert text[column] == glyph
        rest = "".join(segment.text for segment in plain)
        assert text[:column] + text[column + 1 :] == rest[:column] + rest[column + 1 :]
    assert bars.draw(stretch, expected=-3) == plain

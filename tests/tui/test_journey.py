"""The Journey screen: a page a stage, of a traced request or of the one on the desk."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import STAGES, Stage
from tests.tui.stage import FixedFeed, app_on, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.analysis.budget.reference import reference
from tracer.format import figures
from tracer.format.text import cell_width
from tracer.tui.screens.journey.screen import JourneyScreen
from tracer.tui.screens.journey.story import TOLD
from tracer.tui.standalone import BudgetApp
from tracer.tui.toolkit.canvas import Canvas
from tracer.tui.toolkit.digits import ROWS, large
from tracer.tui.toolkit.theme import ASCII, DARK, MONO, UNICODE, Look

AT = START + 9_500 * NS_PER_MS


@pytest.fixture(scope="module")
def on_l4() -> Timeline:
    return Timeline(80, rate=9.0, engine=msgspec.structs.replace(ENGINE, device="NVIDIA L4"))


async def at_journey(pilot: Pilot[Any]) -> JourneyScreen:
    for _ in range(50):
        await settle(pilot)
        if isinstance(pilot.app.screen, JourneyScreen):
            return pilot.app.screen
    raise AssertionError("the Journey never came")


def modelled(**options: Any) -> BudgetApp:
    options.setdefault("look", Look(DARK, UNICODE))
    return BudgetApp(reference(), journey=True, **options)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_each_stage_has_a_page_with_words_clock_and_bound(size: tuple[int, int]) -> None:
    app = modelled()
    async with app.run_test(size=size) as pilot:
        await at_journey(pilot)
        made = reference()
        assert "modelled, not measured" in text_of(app)
        assert "llama-3.1-8b on H100 SXM" in text_of(app)
        for known in STAGES:
            await pilot.press("right")
            await settle(pilot)
            text = text_of(app)
            assert f"{int(known.stage)}  {known.label}" in text
            assert TOLD[known.stage].split(".")[0][:40] in text
            assert "on the clock" in text
            digits = large(figures.milliseconds(made.stage(known.stage).ms))
            assert all(row.rstrip() in text for row in digits)
            if known.stage not in (Stage.PREFILL, Stage.DECODE):
                assert f"bounded by    {known.bounded_by}"[:50] in text
        await pilot.press("right")
        await settle(pilot)
        text = text_of(app)
        for words in (
            "token 1 against token 2",
            "2,000",
            "arithmetic",
            "memory bandwidth",
            "295 FLOPs",
        ):
            assert words in text


async def test_shapes_and_bytes_come_from_the_models_facts() -> None:
    app = modelled()
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await at_journey(pilot)
        screen.action_turn(7)
        await settle(pilot)
        text = text_of(app)
        assert "residual stream [2,000, 4,096] = 15.6 MiB" in text
        assert "2,000 tokens over 32 layers = 250 MiB" in text


async def test_it_follows_the_request_chosen_on_the_list(on_l4: Timeline) -> None:
    app = app_on(FixedFeed(on_l4.events, AT))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        listing = app.live.listing
        listing.select(
            next(
                row
                for row, view in enumerate(listing.rows)
                if view.closed and view.output_tokens > 5
            )
        )
        await settle(pilot)
        chosen = listing.current
        assert chosen is not None
        await pilot.press("7")
        screen = await at_journey(pilot)
        assert chosen.id in rows_of(app)[1]
        assert "measured" in rows_of(app)[1]
        assert "modelled" not in rows_of(app)[1]
        screen.action_turn(11)
        await settle(pilot)
        text = text_of(app)
        assert all(
            row.rstrip() in text for row in large(figures.milliseconds(chosen.stages[10].ms))
        )
        assert "expected" in text
        await pilot.press("o")
        await settle(pilot)
        assert "modelled, not measured" in text_of(app)
        await pilot.press("o")
        await settle(pilot)
        assert chosen.id in text_of(app)


async def test_without_a_choice_it_tells_of_the_newest_that_is_over_and_n_goes_on(
    on_l4: Timeline,
) -> None:
    app = app_on(FixedFeed(on_l4.events, AT))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("7")
        screen = await at_journey(pilot)
        requests = app.feed.state.snapshot(reverse=True).requests
        newest = next(view for view in requests if view.closed and view.output_tokens)
        assert screen.request_id == newest.id
        await pilot.press("p")
        assert screen.request_id != newest.id
        await pilot.press("n")
        assert screen.request_id == newest.id
        await pilot.press("escape")
        assert app.screen is app.live


async def test_pages_are_turned_by_mouse_and_have_ends() -> None:
    app = modelled()
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await at_journey(pilot)
        await pilot.click(screen.page, offset=(80, 10))
        assert screen.number == 1
        await pilot.click(screen.page, offset=(10, 10))
        await pilot.press("left")
        assert screen.number == 0
        await pilot.press("end", "right")
        assert screen.number == 13


async def test_a_request_that_cannot_be_told_token_by_token_says_so() -> None:
    app = modelled()
    async with app.run_test(size=(100, 30)) as pilot:
        await at_journey(pilot)
        app.budget_model.set("output", 30_000)
        await settle(pilot)
        assert "each one is an event" in text_of(app)


@pytest.mark.parametrize("look", [Look(DARK, UNICODE), Look(MONO, ASCII)])
async def test_every_page_paints_rows_of_its_width(look: Look) -> None:
    app = modelled(look=look)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await at_journey(pilot)
        for number in range(14):
            screen.action_turn(number - screen.number)
            for part in screen.query(Canvas):
                for width in (1, 4, 9, 23, 40, 79, 120, 200):
                    for height in (1, 4, 22, 50):
                        for row in part.paint(width, height)[:height]:
                            assert sum(cell_width(segment.text) for segment in row) == width
        if look.glyphs is ASCII:
            await settle(pilot)
            assert text_of(app).isascii()


def test_large_figures_have_three_rows_of_one_width() -> None:
    for text in ("0", "1,883", "86.2", "0.12", "-", "<0.1"):
        rows = large(text)
        assert len(rows) == ROWS
        assert len({len(row) for row in rows}) == 1
        assert any(character != " " for row in rows for character in row)
    assert len({tuple(large(digit)) for digit in "0123456789"}) == 10

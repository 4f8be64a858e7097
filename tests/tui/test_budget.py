"""The Budget screen: sliders by keys and mouse, figures that follow, and what was measured beside
them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import STAGES, Stage
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.analysis.budget.budget import sentence
from tracer.analysis.budget.reference import reference
from tracer.analysis.budget.workload import Workload
from tracer.format import figures
from tracer.format.text import cell_width
from tracer.tui.screens.budget.model import DIALS, WORKLOADS, BudgetModel, ladder, modelled_view
from tracer.tui.screens.budget.screen import BudgetScreen
from tracer.tui.standalone import BudgetApp
from tracer.tui.toolkit.canvas import Canvas
from tracer.tui.toolkit.theme import ANSI16, ASCII, DARK, MONO, UNICODE, Look

AT = START + 9_500 * NS_PER_MS


def budget_app(**options: Any) -> BudgetApp:
    options.setdefault("look", Look(DARK, UNICODE))
    return BudgetApp(reference(), **options)


async def at_budget(pilot: Pilot[Any]) -> BudgetScreen:
    for _ in range(50):
        await settle(pilot)
        if isinstance(pilot.app.screen, BudgetScreen):
            return pilot.app.screen
    raise AssertionError("the Budget screen never came")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_without_an_engine_it_shows_the_reference_with_what_binds(
    size: tuple[int, int],
) -> None:
    app = budget_app()
    async with app.run_test(size=size) as pilot:
        await at_budget(pilot)
        made, text = reference(), text_of(app)
        for figure in (made.ttft_ms, made.itl_ms, made.total_ms):
            assert f"{figures.milliseconds(figure)} ms" in text
        assert "148" in text
        assert "modelled" in rows_of(app)[0]
        assert sentence(made)[:60] in text
        for known in STAGES:
            row = next(row for row in rows_of(app) if known.label in row[:18])
            assert figures.milliseconds(made.stage(known.stage).ms) in row
        assert "measured:" not in text


async def test_arrows_choose_a_slider_and_move_it() -> None:
    app = budget_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await at_budget(pilot)
        await pilot.press("right")
        assert app.budget_model.workload.prompt == 2200
        await pilot.press("left", "left", "shift+right")
        assert app.budget_model.workload.prompt == 1801
        await pilot.press("down", "end")
        assert app.budget_model.workload.cached == 1800
        await pilot.press("down", "home")
        assert app.budget_model.workload.output == 1
        await pilot.press("down", "pageup", "down")
        assert app.budget_model.workload.batch > 5
        assert app.budget_model.workload.context == 1801
        await pilot.press("pagedown")
        assert app.budget_model.workload.context < 1801
        await settle(pilot)
        assert figures.milliseconds(app.budget_model.budget.total_ms) in text_of(app)


async def test_a_slider_is_dragged_clicked_and_turned() -> None:
    app = budget_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await at_budget(pilot)
        y = 3  # the row of `output` in the panel, its title counted
        await pilot.click(screen.sliders, offset=(46, y))
        assert screen.sliders.row == 2
        clicked = app.budget_model.workload.output
        assert clicked > 300
        await pilot.mouse_down(screen.sliders, offset=(46, y))
        await pilot.hover(screen.sliders, offset=(30, y))
        await pilot.mouse_up(screen.sliders, offset=(30, y))
        assert app.budget_model.workload.output < 300
        settled = app.budget_model.workload.output
        await pilot.hover(screen.sliders, offset=(50, y))
        assert app.budget_model.workload.output == settled
        await pilot.hover(screen.bars)
        screen.sliders.move(1)
        await pilot.pause()
        assert app.budget_model.workload.output > settled


async def test_loads_models_and_devices_are_gone_through() -> None:
    app = budget_app()
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await at_budget(pilot)
        seen = []
        for _ in WORKLOADS:
            await pilot.press("p")
            seen.append(app.budget_model.preset)
        assert seen == ["busy chat", "classification", "long document", "one chat"]
        await pilot.press("d")
        assert app.budget_model.device.name == "h100-pcie"
        await pilot.press("D", "O", "o", "o")
        assert (app.budget_model.device.name, app.budget_model.model.name) == (
            "h100-sxm",
            "llama-3.2-1b",
        )
        await pilot.press("y")
        assert app.budget_model.budget.efficiency.roofline == "max"
        screen.sliders.select(0)
        await pilot.press("left")
        assert app.budget_model.model.name == "llama-3.1-8b"
        await pilot.click(screen.sliders, offset=(40, 2))
        assert app.budget_model.device.name == "h100-pcie"
        await settle(pilot)
        assert "H100 PCIe" in rows_of(app)[0]


async def test_it_starts_from_the_traced_engine_with_the_measured_beside() -> None:
    timeline = Timeline(80, rate=9.0, engine=msgspec.structs.replace(ENGINE, device="NVIDIA L4"))
    app = app_on(FixedFeed(timeline.events, AT))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        app.live.listing.select(4)
        await settle(pilot)
        await pilot.press("5")
        await at_budget(pilot)
        model = app.budget_model
        assert (model.model.name, model.device.name) == ("SmolLM2-135M-Instruct", "l4")
        assert model.traced is not None
        view = model.traced[1]
        assert view.id == app.live.listing.chosen_id
        assert (model.workload.prompt, model.workload.output) == (
            view.prompt_tokens,
            view.output_tokens,
        )
        assert model.pool_bytes == 256 * 16 * 23_040
        text = text_of(app)
        assert "modelled as traced" in text
        row = next(row for row in rows_of(app) if "11 decode" in row)
        assert figures.milliseconds(view.stages[Stage.DECODE - 1].ms) in row
        await pilot.press("right")
        await settle(pilot)
        assert "modelled as traced" not in text_of(app)
        await pilot.press("a")
        await settle(pilot)
        assert "modelled as traced" in text_of(app)


async def test_of_an_engine_on_an_unknown_device_the_preset_stays_and_the_reason_is_said(
    busy: Timeline,
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("5")
        await at_budget(pilot)
        assert app.budget_model.model.name == "llama-3.1-8b"
        assert "tracer budget --device cpu" in app.note


async def test_what_cannot_be_is_said_instead_of_shown() -> None:
    app = budget_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await at_budget(pilot)
        app.budget_model.block_size = 0
        app.budget_model.changed()
        await settle(pilot)
        assert "block size must be at least 1" in text_of(app)


@pytest.mark.parametrize("size", [(1, 1), (40, 10), (79, 23), (300, 90)])
async def test_screens_of_any_size_work(size: tuple[int, int]) -> None:
    app = budget_app(look=Look(MONO, ASCII))
    async with app.run_test(size=size) as pilot:
        await at_budget(pilot)
        await pilot.press("right", "down", "x", "p", "7", "right", "5")
        await settle(pilot)
        assert {cell_width(row) for row in rows_of(app)} == {size[0]}


async def test_every_part_paints_rows_of_its_width() -> None:
    for look in (Look(DARK, UNICODE), Look(ANSI16, ASCII)):
        app = budget_app(look=look)
        async with app.run_test(size=(200, 60)) as pilot:
            screen = await at_budget(pilot)
            for part in screen.query(Canvas):
                for width in (*range(1, 30, 4), *range(30, 200, 17)):
                    for height in (1, 14, 30):
                        for row in part.paint(width, height)[:height]:
                            assert sum(cell_width(segment.text) for segment in row) == width, (
                                f"{part.id} at {width}"
                            )


async def test_a_move_redraws_well_within_50_ms_of_work() -> None:
    """CPU time, so that a busy machine does not decide; the largest screen and a long answer."""
    app = budget_app()
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await at_budget(pilot)
        app.budget_model.load(Workload(100_000, 0, 20_000, 64, 50_000, 2048))
        screen.sliders.select(2)
        times = []
        for step in (1, -1) * 12:
            begin = time.process_time()
            screen.sliders.move(step)
            screen.draw()
            times.append(time.process_time() - begin)
        assert sorted(times)[len(times) // 2] < 0.05


# --- the model ----------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(50, 2_000_000))
def test_a_ladder_is_round_ordered_and_reaches_both_ends(least: int, most: int) -> None:
    stops = ladder(least, most)
    assert stops[0] == least
    assert stops[-1] == most
    assert list(stops) == sorted(set(stops))
    assert all(after / before < 2.01 for before, after in pairwise(stops) if before >= 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DIALS),
            st.sampled_from(["step", "place", "set", "load", "model"]),
            st.integers(-40, 40),
        ),
        max_size=12,
    )
)
def test_no_way_to_move_the_sliders_leads_to_what_cannot_be(
    moves: list[tuple[Any, str, int]],
) -> None:
    model = BudgetModel()
    for dial, how, amount in moves:
        match how:
            case "step":
                model.step(dial, amount or 1)
            case "place":
                model.place(dial, amount / 40)
            case "set":
                model.set(dial.field, max(dial.least, min(model.most(dial), 300 + amount)))
            case "load":
                model.load(WORKLOADS[amount % len(WORKLOADS)][1])
            case _:
                model.next_model(amount or 1)
        made = model.budget
        assert made.total_ms > 0
        assert 0 <= model.share(dial) <= 1
        assert model.workload.cached < model.workload.prompt


@pytest.mark.parametrize("load", [load for _, load in WORKLOADS])
def test_the_bars_tile_the_request_as_the_budget_adds_it_up(load: Workload) -> None:
    model = BudgetModel()
    model.load(load)
    made, view = model.budget, modelled_view(model.budget)
    assert (view.closed or 0) / 1e6 == pytest.approx(made.total_ms, abs=1e-4)
    stream = view.stages[Stage.STREAM - 1]
    assert (stream.end or 0) / 1e6 == pytest.approx(made.ttft_ms, abs=1e-4)
    for row, told in zip(view.stages, made.stages, strict=True):
        assert row.ms == pytest.approx(told.ms, abs=1e-6)

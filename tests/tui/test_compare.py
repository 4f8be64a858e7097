"""The Compare screen: what is compared, that it is labelled, and that every key does what it
says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding

from engine_hooks.protocol.clock import NS_PER_S
from tests.compare.recorded import recorded
from tests.compare.traffic import Traffic
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import START, Timeline
from tracer.analysis.compare import trace_of_views
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.replay.app import ReplayApp
from tracer.tui.screens.compare.screen import CompareScreen
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.standalone import CompareApp
from tracer.tui.toolkit.theme import ASCII, DARK, MONO, UNICODE, Look

CALM = {"drift": 0.02, "requests": 80}


def given(*columns: Traffic, look: Look | None = None) -> CompareApp:
    """The app that ``tracer compare --screen`` shows."""
    traces = [
        trace_of_views(f"{'abc'[k]}.trace", traffic.views(k + 1))
        for k, traffic in enumerate(columns)
    ]
    return CompareApp(traces, TraceState(), look=look or Look(DARK, UNICODE))


async def answered(pilot: Any) -> CompareScreen:
    """The Compare screen, once it has found out what it was last asked."""
    for _ in range(1000):
        await settle(pilot)
        screen = pilot.app.screen
        if (
            isinstance(screen, CompareScreen)
            and not screen.working
            and (screen.comparison or screen.trouble)
        ):
            await settle(pilot)
            return screen
        await asyncio.sleep(0.01)
    raise AssertionError("it never has an answer")


async def pressed(pilot: Any, *keys: str) -> CompareScreen:
    for key in keys:
        await pilot.press(key)
    return await answered(pilot)


def slow() -> CompareApp:
    return given(Traffic(**CALM), Traffic(token_ms=24.0, **CALM))


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_verdict_rows_and_changes_are_seen(size: tuple[int, int]) -> None:
    app = slow()
    async with app.run_test(size=size) as pilot:
        screen = await answered(pilot)
        rows = rows_of(app)
        assert "a.trace against b.trace" in rows[0]
        assert screen.pair is not None and "decode explains" in screen.pair.verdict
        assert "decode explains" in " ".join(" ".join(rows).split())
        tpot = next(row for row in rows if row[1:].startswith("TPOT"))
        assert "slower" in tpot
        assert [float(word) for word in tpot.split()[1:3]] == pytest.approx([20.0, 24.0], rel=0.03)
        assert any("E2E" in row and "ms" not in row for row in rows)


@pytest.mark.parametrize(("width", "height"), [(40, 14), (60, 20), (80, 24), (130, 36), (200, 60)])
@pytest.mark.parametrize("look", [Look(DARK, UNICODE), Look(MONO, ASCII)])
async def test_every_side_is_labelled_at_every_size(width: int, height: int, look: Look) -> None:
    app = given(Traffic(**CALM), Traffic(**CALM), look=look)
    async with app.run_test(size=(width, height)) as pilot:
        screen = await answered(pilot)
        assert screen.comparison is not None
        text = text_of(app)
        for context in screen.comparison.columns:
            assert f"{context.request_rate:.2g}" in text
            assert f"{context.concurrency:.1f} open" in text
        assert text.count("p50") >= 2
        assert text.count("cache not told") + text.count("cache ?") >= 2
        if look.glyphs is ASCII:
            assert text.isascii()


async def test_the_rest_of_the_rows_is_reached_by_moving_and_each_is_explained() -> None:
    app = slow()
    async with app.run_test(size=(220, 20)) as pilot:
        await answered(pilot)
        assert "teardown" not in text_of(app)
        screen = await pressed(pilot, "end", "up")
        assert screen.table.row is not None and screen.table.row.key == "teardown"
        assert "teardown" in text_of(app)
        assert "teardown: last token known" in rows_of(app)[-1]


async def test_enter_shows_how_a_row_is_spread_on_both_sides_and_escape_goes_back() -> None:
    app = slow()
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await answered(pilot)
        keys = [row.key for row in screen.comparison.rows]  # type: ignore[union-attr]
        await pressed(pilot, *["down"] * keys.index("tpot"), "enter")
        rows = rows_of(app)
        assert any("TPOT distribution" in row for row in rows)
        shares = [row for row in rows if "%" in row and " to " in row]
        assert len(shares) > 6
        first, last = shares[0], shares[-1]
        assert "▓" in first and "█" not in first, "the faster side begins lower"
        assert "█" in last and "▓" not in last
        assert any(row.lstrip().startswith("p95") and "slower" in row for row in rows)
        await pressed(pilot, "escape")
        assert "TPOT distribution" not in text_of(app)
        await pilot.press("escape")
        await settle(pilot)
        assert isinstance(app.screen, LiveScreen)


async def test_keys_change_the_percentile_and_the_matching() -> None:
    app = slow()
    async with app.run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        screen = await pressed(pilot, "p")
        assert screen.comparison is not None and screen.comparison.percentile == "p95"
        assert "p95 in ms" in text_of(app)
        screen = await pressed(pilot, "x")
        assert screen.comparison is not None and screen.comparison.match == "work"
        screen = await pressed(pilot, "x")
        assert "not matched" in text_of(app)


async def test_of_three_traces_each_pair_can_be_seen() -> None:
    app = given(Traffic(**CALM), Traffic(token_ms=24.0, **CALM), Traffic(wait_ms=90.0, **CALM))
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await answered(pilot)
        assert screen.pair is not None and screen.pair.explained_by == "decode"
        screen = await pressed(pilot, "n")
        assert screen.pair is not None and screen.pair.explained_by == "admission"
        assert "A and C" in text_of(app)


async def test_a_live_trace_is_compared_with_itself_by_halves(busy: Timeline) -> None:
    app = app_at(busy, busy.end)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = await pressed(pilot, "6")
        assert screen.comparison is not None
        one, two = screen.comparison.columns
        assert abs(one.requests - two.requests) <= 1
        assert one.requests + two.requests == 140
        assert "first against second half" in rows_of(app)[0]
        assert "prefix cache on" in text_of(app)
        assert "ITL" in text_of(app)
        await pilot.press("1")
        await settle(pilot)
        assert (await pressed(pilot, "6")).comparison is not None


async def test_a_mark_divides_what_came_before_from_what_comes_after(busy: Timeline) -> None:
    middle = START + 8 * NS_PER_S
    feed = FixedFeed(busy.events, middle)
    app = app_on(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pressed(pilot, "6", "m")
        feed.advance(busy.end)
        screen = app.screen
        assert isinstance(screen, CompareScreen)
        screen._ask()
        screen = await answered(pilot)
        assert screen.comparison is not None
        received = [view.received for view in feed.state.snapshot().requests]
        assert [column.requests for column in screen.comparison.columns] == [
            sum(t < middle for t in received), sum(t >= middle for t in received),
        ]  # fmt: skip
        assert "before against after the mark" in rows_of(app)[0]
        await pressed(pilot, "s")
        assert "first against second half" in rows_of(app)[0]


async def test_a_file_that_is_named_is_compared_with_what_is_shown(
    busy: Timeline, tmp_path: Path
) -> None:
    path = recorded(tmp_path / "base.trace")
    app = app_at(busy, busy.end)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(pilot)
        await pressed(pilot, "6")
        await pilot.press("f")
        await settle(pilot)
        await pilot.press(*"missing", "enter")
        for _ in range(300):
            await settle(pilot)
            if "cannot read missing" in text_of(app):
                break
            await asyncio.sleep(0.01)
        assert "cannot read missing" in text_of(app)
        screen = app.screen
        assert isinstance(screen, CompareScreen)
        await screen._read(str(path))
        screen = await answered(pilot)
        assert "base.trace against this trace" in rows_of(app)[0]
        assert screen.pair is not None
        assert any(
            warning.startswith(("model differs", "engine differs"))
            for warning in screen.pair.warnings
        )
        assert "engine differs" in text_of(app)


async def test_the_window_limits_what_is_compared(busy: Timeline) -> None:
    app = app_at(busy, busy.end)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pressed(pilot, "6")
        app.frozen.window_s = 10.0
        screen = await pressed(pilot, "a")
        assert screen.comparison is not None
        assert "last 10 s" in rows_of(app)[0]
        assert sum(column.requests for column in screen.comparison.columns) < 140


async def test_an_empty_trace_is_no_error() -> None:
    app = app_on(FixedFeed([], START))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        screen = await pressed(pilot, "6")
        assert not screen.trouble
        assert "Too few requests to compare" in text_of(app)


async def test_names_from_outside_are_shown_inert() -> None:
    traces = [
        trace_of_views(name, Traffic(requests=20).views(1)) for name in ("\x1b[31mred[/]\n", "b")
    ]
    app = CompareApp(traces, TraceState(), look=Look(DARK, UNICODE))
    async with app.run_test(size=(160, 40)) as pilot:
        await answered(pilot)
        assert "\\x1b[31mred[/]\\n" in text_of(app)


def test_its_keys_are_none_of_the_apps() -> None:
    ours = {
        key for b in CompareScreen.BINDINGS if isinstance(b, Binding) for key in b.key.split(",")
    }
    for kind in (TracerApp, ReplayApp):
        theirs = {key for b in kind.BINDINGS if isinstance(b, Binding) for key in b.key.split(",")}
        assert not ours & theirs

"""The KV, batch and queue panels: every figure of theirs, at every room that they get."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import (
    Engine,
    Event,
    Evicted,
    Finished,
    Queued,
    Received,
    Released,
    Scheduled,
    Step,
    pack_u32,
)
from engine_hooks.protocol.stages import Stage
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.format import figures
from tracer.format.text import cell_width
from tracer.state.engine.pool import Prefix, pool_of
from tracer.state.view import EngineView
from tracer.tui.screens.live import kv_panel
from tracer.tui.screens.live.batch_panel import marked, meter, ridge_text
from tracer.tui.screens.live.kv_panel import prefix_strip
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.toolkit.theme import ANSI16, ASCII, DARK, MONO, UNICODE, Look

AT = START + 9_500 * NS_PER_MS
H100 = msgspec.structs.replace(ENGINE, device="NVIDIA H100 80GB HBM3")


@pytest.fixture(scope="module")
def tight() -> Timeline:
    """More than its 90 blocks hold."""
    return Timeline(
        100, rate=9.0, mean_output=140, engine=msgspec.structs.replace(H100, num_blocks=90)
    )


@pytest.fixture(scope="module")
def slots() -> Timeline:
    """More than its eight slots take."""
    engine = msgspec.structs.replace(H100, num_blocks=900, max_batch=8)
    return Timeline(120, rate=19.0, mean_output=140, engine=engine)


def right(rows: Iterable[str], begin: int) -> list[str]:
    """What stands in the column of panels."""
    return [row[begin:].strip("│├┬ ") for row in rows]


# --- KV ---


async def test_the_kv_panel_tells_growth_holders_and_how_many_more_fit(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        rows = right(rows_of(app), 140)
        text = "\n".join(rows)
        assert app.live.snapshot is not None
        engine = app.live.snapshot.engines[0]
        pool = pool_of(engine)
        assert engine.mean_tokens is not None and engine.holders == 9
        assert (
            f"room for {pool.fit_mean} average requests ({round(engine.mean_tokens)} tokens), "
            "0 of 8,192" in text
        )
        assert f"22.5 KiB a token · {engine.held / engine.holders:.0f} blocks a request" in text
        assert "pool     256 × 16 tokens = 90.0 MiB" in rows


async def test_the_selected_request_shows_its_hits_and_what_it_may_come_to_hold(
    busy: Timeline,
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        view = next(v for v in app.live.listing.rows if v.phase == "decode" and v.reused_tokens)
        app.live.listing.choose(view.key)
        await settle(pilot)
        prefix = app.live.kv.prefix
        assert prefix is not None and prefix.hit == (view.reused_tokens or 0) // 16 > 0
        row = next(row for row in right(rows_of(app), 140) if row.startswith(f"{view.id} "))
        assert f"{prefix.hit} of {prefix.prompt} prompt blocks hit, at most {prefix.longest}" in row
        assert row.count("▣") == prefix.hit
        states = app.live.kv.states
        assert int((states == kv_panel.HIT).sum()) == prefix.hit
        assert int((states == kv_panel.CHOSEN).sum()) == len(app.live.kv.chosen) - prefix.hit


async def test_what_the_next_in_line_needs_is_told_while_nobody_is_selected(
    tight: Timeline,
) -> None:
    app = app_at(tight, START + 6 * NS_PER_S)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        first = app.live.queue.waits[0]
        text = text_of(app)
        assert first.needs is not None
        assert f"next     needs {first.needs} blocks, {first.has} free" in text
        assert f"KV blocks: next needs {first.needs}, {first.has} free" in text


async def test_evictions_and_ages_of_cached_blocks_are_told_and_drawn(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(200, 60)) as pilot:
        feed.apply(Evicted(AT, 7, 7))
        await settle(pilot)
        young = app.live.kv.ages
        assert young is not None and young[0] > 50
        assert "evicted  7" in text_of(app)
        for seconds, glyph in ((30, "▫"), (90, "◦")):
            feed._at = AT + seconds * NS_PER_S
            await settle(pilot)
            ages = app.live.kv.ages
            assert ages is not None and sum(ages) == sum(young)
            drawn = "".join(right(rows_of(app), 140)[3:])
            assert drawn.count(glyph) >= ages[1 if glyph == "▫" else 2] > 50


@pytest.mark.parametrize("size", [(140, 40), (80, 24)])
async def test_with_all_the_room_the_kv_panel_lists_who_holds_how_much(
    tight: Timeline, size: tuple[int, int]
) -> None:
    app = app_at(tight, START + 6 * NS_PER_S)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        if size[0] < 116:
            await pilot.press("v")
        await pilot.press("tab", "m")
        await settle(pilot)
        holders = app.live.kv.holders
        assert [view.blocks for view in holders] == sorted(
            (view.blocks or 0 for view in holders), reverse=True
        )
        assert app.live.snapshot is not None
        assert sum(view.blocks or 0 for view in holders) == app.live.snapshot.engines[0].held
        text = text_of(app)
        for view in holders[:3]:
            row = next(row for row in rows_of(app) if f"{view.id} " in row)
            assert f" {view.blocks} " in row
            assert figures.size((view.blocks or 0) * 16 * 23_040) in row
        assert "holder" in text and "req_21" not in [view.id for view in holders]


async def test_a_paused_screen_can_still_be_maximised(tight: Timeline) -> None:
    feed = FixedFeed(tight.events, START + 6 * NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        await pilot.press("space")
        feed.advance(START + 9 * NS_PER_S)
        await pilot.press("tab", "m")
        await settle(pilot)
        held = [view.blocks for view in app.live.kv.holders]
        assert held and held == sorted(held, key=lambda blocks: -(blocks or 0))
        await pilot.press("m", "tab", "m")
        await settle(pilot)
        assert len(app.live.batch_panel.batch_members) == 6


def test_a_map_of_more_blocks_than_cells_shows_the_most_frequent_state() -> None:
    live, cached, free, chosen = kv_panel.LIVE, kv_panel.CACHED, kv_panel.FREE, kv_panel.CHOSEN
    states = np.array([live] * 6 + [cached] * 4 + [free] * 9 + [chosen], np.uint8)
    folded = kv_panel.fold(states, 5).tolist()
    assert folded == [live, cached, free, chosen]
    assert kv_panel.fold(states, 1) is states
    assert kv_panel.fold(states, 7).tolist()[-1] == kv_panel.CHOSEN


@pytest.mark.parametrize("look", [Look(DARK, UNICODE), Look(ANSI16, UNICODE), Look(MONO, ASCII)])
@pytest.mark.parametrize("blocks", [1, 7, 256, 16_384])
def test_a_map_fills_its_room_at_every_size(look: Look, blocks: int) -> None:
    states = np.arange(blocks, dtype=np.uint8) % 6
    for width in (1, 2, 3, 17, 60, 197):
        for height in (1, 2, 9, 40):
            rows = kv_panel.map_rows(look, states, width, height)
            assert len(rows) == height
            assert {sum(len(segment.text) for segment in row) for row in rows} == {width}


def test_every_state_of_a_block_is_told_by_its_glyph_without_colour() -> None:
    for look in (Look(MONO, UNICODE), Look(MONO, ASCII)):
        states = (kv_panel.FREE, *kv_panel.AGED, kv_panel.LIVE, kv_panel.HIT)
        assert len({kv_panel.block_glyph(look, state) for state in states}) == len(states)
        assert kv_panel.block_style(look, kv_panel.CHOSEN).reverse


@pytest.mark.parametrize("cells", range(1, 40))
def test_the_strip_of_a_prefix_is_as_wide_as_asked(cells: int) -> None:
    for prefix in (
        Prefix(4, 5, 3, 64, 20),
        Prefix(0, 1, 0, 0, None),
        Prefix(9, 0, 0, 144, 9),
        Prefix(0, 0, 0, 0, 0),
    ):
        strip = prefix_strip(Look(), prefix, cells)
        assert sum(len(segment.text) for segment in strip) == cells
        hits = sum(len(segment.text) for segment in strip if "▣" in segment.text)
        total = prefix.prompt + prefix.grown
        assert hits == (round(prefix.hit * cells / total) if total else 0)


# --- batch ---


async def test_the_batch_panel_tells_decode_and_prefill_tokens_apart(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, START + NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=(200, 60)) as pilot:
        seen = set()
        for at in range(1, 60):
            feed.advance(START + NS_PER_S + at * 100 * NS_PER_MS)
            await pilot.pause()
            engine = feed.state.snapshot(limit=0).engines[0]
            if engine.prefill_tokens and engine.step_tokens > engine.prefill_tokens:
                await settle(pilot)
                decode = engine.step_tokens - engine.prefill_tokens
                assert f" {decode} decode " in text_of(app)
                assert f" {engine.prefill_tokens} prefill tokens" in text_of(app)
                seen.add(engine.prefill_tokens)
                if len(seen) == 2:
                    return
        raise AssertionError("no step mixed both")


async def test_the_batch_panel_names_the_limit_and_the_ridge(slots: Timeline) -> None:
    app = app_at(slots, START + 5 * NS_PER_S)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        app.live.draw()
        await settle(pilot)
        text = text_of(app)
        assert "batch slots: next request waits" in text
        assert app.live.batch_panel.ridge == pytest.approx(147.6, abs=0.1)
        assert "compute-bound from batch 148, above all slots" in text


async def test_without_a_known_device_there_is_no_ridge(busy: Timeline) -> None:
    engine = msgspec.structs.replace(ENGINE, device="cuda:0")
    app = app_at(Timeline(20, rate=9.0, engine=engine), START + 2 * NS_PER_S)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        app.live.draw()
        await settle(pilot)
        assert app.live.batch_panel.ridge is None
        assert "ridge" not in text_of(app)


def test_the_ridge_stands_at_its_place_in_the_gauge() -> None:
    look = Look()
    segments = meter(look, [(0.5, Stage.DECODE)], 40)
    from rich.segment import Segment

    row = "".join(
        segment.text for segment in marked(segments, 10, Segment(look.glyphs.ridge, look.warn))
    )
    assert (len(row), row.index("│")) == (40, 10)


@pytest.mark.parametrize("cells", [1, 2, 3, 7, 40])
def test_a_gauge_of_two_parts_is_as_wide_as_asked_and_shows_both_where_there_is_room(
    cells: int,
) -> None:
    look = Look()
    for parts in [
        (0.0, 0.0),
        (0.5, 0.0),
        (0.001, 0.9),
        (1.0, 0.0),
        (0.7, 0.9),
        (3.0, 2.0),
        (0.4, 0.001),
    ]:
        segments = meter(look, [(parts[0], Stage.DECODE), (parts[1], Stage.PREFILL)], cells)
        assert sum(len(segment.text) for segment in segments) == cells
        present = sum(1 for part in parts if part > 0)
        assert sum(1 for segment in segments[:-1] if segment.text) == min(present, cells)


def view(**fields: int) -> EngineView:
    return EngineView("e", "e", "engine", 1, **fields)  # type: ignore[arg-type]


def test_the_ridge_is_told_from_the_side_on_which_the_batch_is() -> None:
    assert (
        ridge_text(147.6, view(batch=200, max_batch=256), 70)
        == "compute-bound from batch 148, reached: one more slows each step"
    )
    assert (
        ridge_text(147.6, view(batch=20, max_batch=256), 70)
        == "compute-bound from batch 148, not reached: one more costs little"
    )
    assert (
        ridge_text(147.6, view(batch=20, max_batch=64), 70)
        == "compute-bound from batch 148, above all slots: one more costs little"
    )
    assert ridge_text(147.6, view(batch=200, max_batch=256), 20) == "from batch 148"


@pytest.mark.parametrize("size", [(140, 40), (80, 24)])
async def test_with_all_the_room_the_batch_panel_lists_its_members(
    busy: Timeline, size: tuple[int, int]
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        if size[0] < 116:
            await pilot.press("v")
        await pilot.press("tab", "tab", "m")
        await settle(pilot)
        members = app.live.batch_panel.batch_members
        assert (
            app.live.snapshot is not None
            and len(members) == app.live.snapshot.engines[0].batch == 9
        )
        assert [v.step_tokens for v in members] == sorted(
            (v.step_tokens or 0 for v in members), reverse=True
        )
        for member in members[:6]:
            row = next(row for row in rows_of(app) if f"{member.id} " in row)
            assert f" {member.step_tokens} " in row
            assert f" {member.computed_tokens:,} " in row


# --- queue ---


async def test_with_all_the_room_the_queue_is_a_table(tight: Timeline) -> None:
    app = app_at(tight, START + 6 * NS_PER_S)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        await pilot.press("tab", "tab", "tab", "m")
        await settle(pilot)
        waits = app.live.queue.waits
        rows = rows_of(app)
        assert f"KV blocks: {len(waits)}" in text_of(app)
        for wait in waits:
            row = next(row for row in rows if f" {wait.id} " in row)
            assert row.split()[0] == str(wait.place)
            ms = (START + 6 * NS_PER_S - wait.since) / 1e6
            assert f"{ms:,.0f}" in row
            if wait.behind:
                assert f"KV blocks (after {wait.behind})" in row
        assert f"{waits[0].needs} blocks" in rows[6] and "×" in rows[6]


def crowd(**changes: int) -> list[Event]:
    """One that runs, one that can never run, one behind."""
    engine = msgspec.structs.replace(ENGINE, num_blocks=40, **changes)
    events: list[Event] = [engine]
    for key, prompt in enumerate((20, 5_000, 30), 1):
        t = START + key * NS_PER_MS
        events += [Received(t, key, f"r{key}"), Queued(t + 1, key, f"r{key}", prompt, 50)]
    t = START + 10 * NS_PER_MS
    events.append(Scheduled(t, 1, t, 0, 0, 2))
    events.append(
        Step(
            t,
            1,
            token=NS_PER_MS,
            end=NS_PER_MS,
            batch=1,
            tokens=20,
            joined=pack_u32([1]),
            odd=pack_u32([1, 20, 1]),
            used=2,
            cached=0,
            free=38,
            waiting=2,
            running=1,
        )
    )
    return events


async def test_one_that_can_never_be_admitted_is_told_apart() -> None:
    app = app_on(FixedFeed(crowd(), START + 100 * NS_PER_MS))
    async with app.run_test(size=(200, 40)) as pilot:
        await settle(pilot)
        rows = right(rows_of(app), 140)
        assert any("r2" in row and "313 blocks, 40 exist" in row for row in rows)
        assert any("r3" in row and "next step" in row for row in rows)


async def test_who_waits_is_not_made_up_where_only_a_count_is_told() -> None:
    events = [
        event for event in crowd() if not (isinstance(event, Received | Queued) and event.key > 1)
    ]
    app = app_on(FixedFeed(events, START + 100 * NS_PER_MS))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        assert "queue 2" in text_of(app)
        assert "requests not reported" in text_of(app)


async def test_an_engine_that_tells_nothing_of_its_cache_gets_no_figures() -> None:
    engine = Engine(START, "plain", "1", "m", "bf16", "cpu")
    t = START + NS_PER_MS
    events: list[Event] = [
        engine,
        Received(t, 1, "r1"),
        Queued(t, 1, "r1", 20, 5),
        Scheduled(t, 1, t),
        Step(
            t,
            1,
            token=NS_PER_MS,
            end=NS_PER_MS,
            batch=1,
            tokens=20,
            joined=pack_u32([1]),
            odd=pack_u32([1, 20, 1]),
        ),
    ]
    app = app_on(FixedFeed(events, START + 50 * NS_PER_MS))
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        assert "not reported by this engine" in text_of(app)
        assert "none reached" in text_of(app)


# --- the Request screen ---


async def test_the_request_screen_shows_the_hits_of_its_prefix_also_when_it_is_over(
    busy: Timeline,
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        for phase in ("decode", "done"):
            found = next(
                v
                for v in app.frozen.feed.state.snapshot().requests
                if v.phase == phase and v.cached_tokens
            )
            app.open_request(found)
            await settle(pilot)
            assert isinstance(app.screen, RequestScreen)
            hit, prompt = (found.cached_tokens or 0) // 16, -(-(found.prompt_tokens or 0) // 16)
            row = next(row for row in rows_of(app) if "prefix hits" in row)
            assert f"{hit} of {prompt} prompt blocks ({found.cached_tokens} tokens)" in row
            assert "▣" in row
            await pilot.press("escape")


@pytest.mark.parametrize("look", [Look(MONO, ASCII), Look(ANSI16, UNICODE)])
async def test_panels_of_any_look_keep_to_their_room_with_all_of_it(
    tight: Timeline, look: Look
) -> None:
    app = app_at(tight, START + 6 * NS_PER_S, look=look)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        for panel in (app.live.kv, app.live.batch_panel, app.live.queue):
            app.set_focus(panel)
            await pilot.press("m")
            await settle(pilot)
            for width in (*range(1, 60, 3), 77, 78, 99, 100, 101, 198):
                for height in (1, 2, 3, 7, 8, 9, 15, 40):
                    for row in panel.paint(width, height):
                        assert sum(cell_width(segment.text) for segment in row) == width, (
                            panel.id,
                            width,
                            height,
                        )
            await pilot.press("m")


async def test_a_block_that_is_given_back_leaves_the_table(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        await pilot.press("tab", "m")
        await settle(pilot)
        first = app.live.kv.holders[0]
        feed.apply(Finished(AT, first.key[1], "stop", 3))
        feed.apply(Released(AT, first.key[1], first.blocks or 0, 0))
        await settle(pilot)
        assert app.live.snapshot is not None
        assert app.live.snapshot.engines[0].holders == 8

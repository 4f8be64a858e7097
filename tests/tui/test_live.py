"""The Live screen: what it says, and what its keys do."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import pytest
from textual.events import Key
from textual.screen import Screen

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import EngineStatus, Gap, HookFault, Queued, Received, SourceGone
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, HEADER, START, Timeline
from tracer.format import figures
from tracer.tui.listing import SORTS
from tracer.tui.screens.help import HelpScreen
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.screens.tabs import Tab
from tracer.tui.toolkit.theme import Look

AT = START + 9_500 * NS_PER_MS


class Log:
    """Lines of an engine."""

    def __init__(self, lines: list[str]) -> None:
        self.lines: deque[str] = deque(lines, 1000)
        self.path = "/tmp/engine.log"


class Traffic:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.rate = 4.0
        self.paused = False
        self.said: list[str] = []

    def faster(self) -> None:
        self.rate *= 2

    def slower(self) -> None:
        self.rate /= 2

    def burst(self) -> None:
        self.said.append("burst")

    def pause(self) -> None:
        self.said.append("pause")
        self.paused = not self.paused

    async def ask(self, prompt: str) -> str:
        self.said.append(prompt)
        return "req_80"


async def test_the_first_lines_qualify_every_figure(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        first, names, values, *_ = rows_of(app)
        for word in (
            "transformers 5.24.0",
            "SmolLM2-135M-Instruct bfloat16",
            "cpu",
            "req/s",
            "open",
            "prefix cache on",
            "chunked on",
            "last 1 min",
            "● LIVE",
        ):
            assert word in first
        for word in (
            "QUEUE ms",
            "PREFILL ms",
            "TTFT ms",
            "ITL ms",
            "OUT tok/s",
            "KV CACHE",
            "WAITING",
            "BATCH",
            "PREEMPTED",
        ):
            assert word in names
        quantiles = app.live.snapshot.timers["ttft"] if app.live.snapshot else None
        assert quantiles is not None
        assert f"{figures.milliseconds(quantiles.p50)} " in values


async def test_every_request_in_sight_has_a_row_with_its_counts_and_clock(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        rows = rows_of(app)
        for view in app.live.listing.rows:
            row = next(row for row in rows if f" {view.id} " in row)
            assert f"{view.prompt_tokens or 0:,}" in row or view.prompt_tokens is None
            ms = view.e2e_ms if view.e2e_ms is not None else (AT - view.received) / 1e6
            assert f"{ms:,.0f}" in row[:110]


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_columns_do_not_jump_as_values_change(busy: Timeline, size: tuple[int, int]) -> None:
    feed = FixedFeed(busy.events, START + NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=size) as pilot:
        headings = set()
        for step in range(12):
            feed.advance(START + (1 + step) * NS_PER_S)
            await settle(pilot)
            rows = rows_of(app)
            headings.add(rows[1][: size[0] * 5 // 8])
            assert rows[4].startswith(" id")
            assert rows[4].index("prompt") == rows_of(app)[4].index("prompt")
        assert len(headings) == 1


async def test_enter_opens_the_newest_or_the_selected_request(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        newest = app.live.listing.rows[-1].id
        await pilot.press("enter")
        assert isinstance(app.screen, RequestScreen)
        assert app.screen.request_id == newest
        await pilot.press("escape")
        await pilot.press("up", "enter")
        assert isinstance(app.screen, RequestScreen)
        assert app.screen.request_id == app.live.listing.rows[-2].id


async def test_selection_is_told_by_a_marker_not_by_colour_alone(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("up")
        await settle(pilot)
        marked = [row for row in rows_of(app)[5:] if row.startswith("▌")]
        assert len(marked) == 1
        assert app.live.listing.current is not None
        assert app.live.listing.current.id in marked[0]


async def test_sort_goes_round_and_shift_turns_it(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        seen = []
        for _ in SORTS:
            await pilot.press("s")
            seen.append(app.live.listing.sort)
            await settle(pilot)
        assert seen == [*SORTS[1:], SORTS[0]]
        await pilot.press("s")
        largest = [view.e2e_ms or (AT - view.received) / 1e6 for view in app.live.listing.rows]
        assert largest == sorted(largest, reverse=True)
        await pilot.press("S")
        smallest = [view.e2e_ms or 0 for view in app.live.listing.rows]
        assert smallest[0] < largest[0]


async def test_the_filter_narrows_as_it_is_typed_and_escape_takes_it_back(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        before = app.live.listing.total
        await pilot.press("slash", *"req_4")
        await settle(pilot)
        assert {view.id for view in app.live.listing.rows} == {
            f"req_4{d}" for d in ["", *range(10)]
        }
        await pilot.press("enter")
        await settle(pilot)
        assert app.live.listing.text == "req_4"
        assert "matching req_4" in text_of(app)
        await pilot.press("slash", "escape")
        await settle(pilot)
        assert app.live.listing.total == before


async def test_what_is_typed_right_after_slash_goes_into_the_filter(busy: Timeline) -> None:
    """Over a slow line keys come in one piece: `/prob` filters, and its `r` starts no recording."""
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        for key in ("slash", *"prob"):
            app.post_message(Key(key, "/" if key == "slash" else key))
        await settle(pilot)
        assert app.live.listing.text == "prob"


async def test_letters_typed_into_the_filter_are_not_keys(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("slash", *"quiz[/red]")
        await settle(pilot)
        assert app.is_running
        assert app.live.listing.text == "quiz[/red]"
        assert "no request matches" in text_of(app)


async def test_pause_freezes_what_is_shown_while_ingest_goes_on(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("space")
        await settle(pilot)
        frozen = text_of(app)
        assert "PAUSED" in frozen
        received = feed.state.received_total
        feed.advance(AT + 3 * NS_PER_S)
        await settle(pilot)
        assert feed.state.received_total > received
        assert text_of(app) == frozen
        await pilot.press("pageup")
        await settle(pilot)
        assert text_of(app) != frozen
        assert "PAUSED" in text_of(app)
        await pilot.press("space", "f")
        await settle(pilot)
        assert "PAUSED" not in text_of(app)
        assert feed.state.request_ids()[-1] in text_of(app)


async def test_panels_stand_beside_the_list_when_wide_and_in_its_place_when_narrow(
    busy: Timeline,
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        assert all(
            word in text_of(app) for word in ("KV cache", "batch 9/16", "queue 0", "requests 83")
        )
        await pilot.press("v")
        await settle(pilot)
        assert "KV cache" not in text_of(app)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert "requests 83" in text_of(app)
        await pilot.press("v")
        await settle(pilot)
        assert "KV cache" in text_of(app)
        assert "requests 83" not in text_of(app)


async def test_m_gives_the_focused_panel_all_the_room(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        await pilot.press("tab", "m")
        await settle(pilot)
        assert app.focused is app.live.kv
        assert app.live.kv.size.width == 140
        assert "requests 83" not in text_of(app)
        await pilot.press("m")
        await settle(pilot)
        assert "requests 83" in text_of(app)


async def test_the_blocks_of_the_selected_request_stand_out_in_the_map(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        running = next(view for view in app.live.listing.rows if view.phase == "decode")
        app.live.listing.choose(running.key)
        await settle(pilot)
        detail = app.frozen.detail(running.id)
        assert detail is not None
        assert len(detail.block_ids) > 0
        assert app.live.kv.chosen == frozenset(detail.block_ids)
        assert f"selected {len(detail.block_ids)}" in text_of(app)


async def test_the_queue_panel_says_who_waits_how_long_and_for_what() -> None:
    engine = msgspec.structs.replace(ENGINE, num_blocks=90)
    tight = Timeline(100, rate=9.0, mean_output=140, engine=engine)
    app = app_at(tight, START + 6 * NS_PER_S)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        text = text_of(app)
        waits = app.live.queue.waits
        assert len(waits) > 5
        assert f"queue {len(waits)}" in text
        rows = [row[142:] for row in rows_of(app)]
        first = next(row for row in rows if row.strip().startswith(f"{waits[0].id} "))
        assert "blocks, " in first
        assert "free" in first
        second = next(row for row in rows if row.strip().startswith(f"{waits[1].id} "))
        assert f"KV blocks (after {waits[0].id})" in second


async def test_preemptions_are_marked_on_the_bar_and_named() -> None:
    engine = msgspec.structs.replace(ENGINE, num_blocks=90)
    tight = Timeline(100, rate=9.0, mean_output=140, engine=engine)
    assert tight.preempted > 0
    app = app_at(tight, START + 6 * NS_PER_S)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        app.live.listing.filter("preempted")
        await settle(pilot)
        views = list(app.live.listing.rows)
        assert views
        for view in views:
            row = next(row for row in rows_of(app) if f" {view.id} " in row)
            assert f"preempted ×{view.preemptions}" in row
            assert "×" in row[60:130]


async def test_before_there_is_data_it_says_what_it_does() -> None:
    feed = FixedFeed([], START, status="connecting…", announce=False)
    app = app_on(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "connecting…" in text_of(app)
        assert "tokeniser called" in text_of(app)
        feed.apply(EngineStatus(START, "loading", "weights, 0.27 GB"))
        await settle(pilot)
        assert "loading: weights, 0.27 GB" in text_of(app)
        feed.apply(EngineStatus(START + 1, "ready"))
        await settle(pilot)
        assert "no request yet" in text_of(app)


async def test_a_dead_engine_shows_a_banner_with_its_reason(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        feed.apply(EngineStatus(AT, "dead", "RuntimeError: the cache has 90 blocks, 120 needed"))
        await settle(pilot)
        assert "transformers is dead: RuntimeError: the cache has 90 blocks, 120 needed" in text_of(
            app
        )
        assert "DEAD" in rows_of(app)[0]


async def test_a_stalled_engine_shows_a_banner() -> None:
    feed = FixedFeed([ENGINE, EngineStatus(START, "ready")], START)
    app = app_on(feed)
    async with app.run_test(size=(120, 24)) as pilot:
        feed.apply(Received(START, 1, "r1"))
        feed.apply(Queued(START + 1000, 1, "r1", prompt_tokens=10))
        feed.advance(START + 12 * NS_PER_S)
        await settle(pilot)
        assert "stalled: admission blocked for" in text_of(app)


async def test_events_whose_time_contradicts_the_others_are_counted_on_screen(
    busy: Timeline,
) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        before = rows_of(app)[0]
        feed.apply(Received(1_790_000_000 * NS_PER_S, 9_999, "odd"))
        await settle(pilot)
        assert "1 event set aside: its time contradicts the others" in text_of(app)
        assert rows_of(app)[0] == before


async def test_losses_and_failed_hooks_are_counted_on_screen(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(120, 30)) as pilot:
        feed.apply(Gap(AT, 1204, "buffer full"))
        feed.apply(HookFault(AT, "Scheduler.schedule", "KeyError: 'x'", 3, True))
        await settle(pilot)
        assert "1,204 events lost, " in text_of(app)
        assert "requests incomplete" in text_of(app)
        assert "hook failed: " in text_of(app)
        assert "▲" in next(row for row in rows_of(app) if " decode" in row)


async def test_a_source_that_is_gone_is_told(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(120, 30)) as pilot:
        feed.apply(SourceGone(AT, "the process ended"))
        await settle(pilot)
        assert "transformers is gone: the process ended" in text_of(app)
        assert "lost" in text_of(app)


async def test_the_engines_log_has_a_pane_of_its_own(busy: Timeline) -> None:
    log = Log(
        [f"INFO line {n}" for n in range(300)] + ["\x1b[31mERROR\x1b[0m [/red]out of memory\r\n"]
    )
    app = app_at(busy, AT, log=log)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "line 299" not in text_of(app)
        await pilot.press("l")
        await settle(pilot)
        text = text_of(app)
        assert "INFO line 299" in text
        assert r"\x1b[31mERROR\x1b[0m [/red]out of memory" in text
        assert "/tmp/engine.log" in text
        app.set_focus(app.live.log_pane)
        await pilot.press("pageup")
        await settle(pilot)
        assert "INFO line 299" not in text_of(app)
        await pilot.press("l")
        await settle(pilot)
        assert "engine log" not in text_of(app)


async def test_without_a_log_or_traffic_their_keys_say_or_do_nothing(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "burst" not in text_of(app)
        await pilot.press("b", "plus", "t", "l")
        await settle(pilot)
        assert isinstance(app.screen, LiveScreen)
        assert not app.live.line.shown


async def test_traffic_keys_change_the_load(busy: Timeline) -> None:
    traffic = Traffic()
    app = app_at(busy, AT, traffic=traffic)
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        await pilot.press("plus")
        assert traffic.rate == 8.0
        await pilot.press("minus", "minus", "b", "z")
        assert traffic.rate == 2.0
        assert traffic.said == ["burst", "pause"]
        await settle(pilot)
        assert "arrivals stopped (z resumes)" in text_of(app)


async def test_a_typed_prompt_is_sent_and_its_request_opened(busy: Timeline) -> None:
    traffic = Traffic()
    app = app_at(busy, AT, traffic=traffic)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("t", *"why?", "enter")
        for _ in range(100):
            await pilot.pause()
            if isinstance(app.screen, RequestScreen):
                break
        assert traffic.said == ["why?"]
        assert isinstance(app.screen, RequestScreen)
        assert app.screen.request_id == "req_80"
        assert app.live.listing.selected == ("engine-1", 80)


async def test_help_names_every_key_of_the_screen(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 60)) as pilot:
        await settle(pilot)
        await pilot.press("question_mark")
        await settle(pilot)
        assert isinstance(app.screen, HelpScreen)
        text = text_of(app)
        for word in (
            "follow the newest",
            "filter",
            "engine log",
            "command palette",
            "freeze the display",
            "admission",
            "handed to the engine until first scheduled",
        ):
            assert word in text
        assert "burst" not in text
        await pilot.press("escape")
        assert isinstance(app.screen, LiveScreen)


async def test_a_screenshot_is_written_and_its_place_told(
    busy: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("ctrl+s")
        await pilot.press("ctrl+s")
        await settle(pilot)
    files = sorted(tmp_path.glob("tracer-*.svg"))
    assert len(files) == 2
    assert all("<svg" in file.read_text(encoding="utf-8") for file in files)


async def test_the_palette_can_be_changed_while_it_runs(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        dark = app.live.waterfall.render_line(5)
        app.use_palette("tracer-light")
        await settle(pilot)
        light = app.live.waterfall.render_line(5)
        assert dark.text == light.text
        assert list(dark) != list(light)


async def test_commands_cover_what_the_keys_do(busy: Timeline) -> None:
    app = app_at(busy, AT, traffic=Traffic(), log=Log([]))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {
            "Help",
            "Pause",
            "Screenshot",
            "Filter",
            "Follow",
            "Sort",
            "Engine log",
            "Burst",
            "Quit",
        } <= titles


async def test_mouse_selects_opens_sorts_and_scrolls(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        await pilot.click("#waterfall", offset=(20, 6))
        await settle(pilot)
        assert app.live.listing.selected == app.live.listing.rows[4].key
        await pilot.click("#waterfall", offset=(14, 1))
        await settle(pilot)
        assert app.live.listing.sort == "prompt"
        await pilot.click("#waterfall", offset=(20, 5), times=2)
        await pilot.pause()
        assert isinstance(app.screen, RequestScreen)


async def test_keys_in_the_last_line_can_be_clicked(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 40)) as pilot:
        await settle(pilot)
        at = rows_of(app)[-1].index("pause")
        await pilot.click("#keys", offset=(at, 0))
        await settle(pilot)
        assert app.frozen.paused


async def test_two_engines_are_counted_and_summed(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    feed.state.add_source(msgspec.structs.replace(HEADER, source="engine-2"))
    feed.state.apply("engine-2", msgspec.structs.replace(ENGINE, num_blocks=256))
    feed.state.add_source(msgspec.structs.replace(HEADER, source="api", role="api"))
    feed.state.apply("api", ENGINE)
    app = app_on(feed)
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot)
        assert "transformers 5.24.0 +1" in rows_of(app)[0]
        assert "9/32" in rows_of(app)[2]


class Second(HelpScreen):
    """Another screen."""

    NAME = "Second"

    def __init__(self, look: Look) -> None:
        super().__init__(look, Screen())


async def test_numbers_switch_between_the_screens_that_exist(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(140, 60)) as pilot:
        await settle(pilot)
        await pilot.press("9")
        assert app.screen is app.live
        app.TABS = (app.TABS[0], Tab(7, "Journey", f"{__name__}:Second"))  # type: ignore[misc]
        await pilot.press("enter", "7")
        assert isinstance(app.screen, Second)
        await pilot.press("1")
        assert app.screen is app.live
        await pilot.press("2")
        assert isinstance(app.screen, RequestScreen)
        await pilot.press("1", "question_mark")
        await settle(pilot)
        assert "Journey" in text_of(app)
        assert "Compare" not in text_of(app)


async def test_quantiles_of_many_seconds_fit_beside_each_other_in_eighty_columns() -> None:
    engine = msgspec.structs.replace(ENGINE, num_blocks=90)
    tight = Timeline(160, rate=9.0, mean_output=140, engine=engine)
    app = app_at(tight, START + 14 * NS_PER_S)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        names, values = rows_of(app)[1:3]
        assert app.live.snapshot is not None
        queue = app.live.snapshot.timers["queue"]
        assert queue.p50 is not None
        assert queue.p50 > 1000
        assert values.startswith(f" {queue.p50 / 1000:.1f}/")
        for name in ("PREFILL", "TTFT", "ITL", "tok/s", "KV", "Q ", "B ", "P "):
            assert values[names.index(name) - 1] == " "

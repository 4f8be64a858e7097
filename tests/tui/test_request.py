"""The Request screen: twelve rows that add up, the axis, the cards, and a request that still
runs."""

from __future__ import annotations

import pytest

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Coverage, Finished, Prompt, Received, Scheduled
from engine_hooks.protocol.stages import STAGES, Stage
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.format import figures
from tracer.state.view import Status
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.screens.request.axis import Scale, axis_of
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.screens.request.shapes import dtype_bytes, kv_bytes_per_token, shapes_of

AT = START + 9_500 * NS_PER_MS


async def opened(pilot: object, app: object, request_id: str) -> RequestScreen:
    view = app.feed.state.detail(request_id).view  # type: ignore[attr-defined]
    app.open_request(view)  # type: ignore[attr-defined]
    await settle(pilot)  # type: ignore[arg-type]
    screen = app.screen  # type: ignore[attr-defined]
    assert isinstance(screen, RequestScreen)
    return screen


@pytest.mark.parametrize("size", [(60, 24), (80, 24), (120, 40), (200, 60)])
async def test_twelve_rows_show_the_durations_that_the_state_tells(
    busy: Timeline, size: tuple[int, int]
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app, "req_57")
        assert screen.detail is not None
        rows = rows_of(app)
        for info, stage in zip(STAGES, screen.detail.view.stages, strict=True):
            row = next(row for row in rows if info.label in row[:18])
            assert figures.milliseconds(stage.ms) in row
            if size[0] >= 80 and stage.share is not None:
                assert f"{figures.percent(stage.share)} %" in row
        assert any("unattributed" in row or " rest " in row for row in rows)


async def test_every_stage_is_seen_on_the_elastic_axis_whatever_its_length(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "req_57")
        assert screen.stages.scale is Scale.ELASTIC
        for info in STAGES:
            row = next(row for row in rows_of(app) if info.label in row[:18])
            assert any(glyph in row[16:62] for glyph in "█░▏▎▍▌▋▊▉"), info.label


async def test_x_goes_through_the_scales(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, "req_57")
        seen = []
        for _ in range(3):
            await pilot.press("x")
            await settle(pilot)
            seen.append(screen.stages.scale)
            decode = next(row for row in rows_of(app) if "decode" in row[:18])
            if screen.stages.scale is Scale.FIRST_TOKEN:
                assert "█" not in decode[16:60]
        assert seen == [Scale.LINEAR, Scale.FIRST_TOKEN, Scale.ELASTIC]


def test_axes_keep_order_and_reach_their_ends(busy: Timeline) -> None:
    state = busy.state()
    for view in state.snapshot().requests[:40]:
        for scale in Scale:
            axis = axis_of(view, state.now, 70, 8, scale)
            assert axis.units == 560
            assert axis.place(view.received) == 0
            instants = sorted(
                t for stage in view.stages for t in (stage.begin, stage.end) if t is not None
            )
            places = [axis.place(t) for t in instants]
            assert places == sorted(places)
            assert places[-1] <= 560
            columns = [tick.column for tick in axis.ticks()]
            assert columns == sorted(set(columns))


async def test_up_and_down_explain_a_stage(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 44)) as pilot:
        await opened(pilot, app, "req_57")
        await pilot.press("down", "down", "down", "down")
        await settle(pilot)
        text = text_of(app)
        assert "admission: request handed to the engine → first scheduled" in text
        assert "of which hop" in text


async def test_prompt_shows_special_tokens_and_the_first_and_last_ids(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(160, 50)) as pilot:
        screen = await opened(pilot, app, "req_57")
        assert screen.detail is not None
        ids = screen.detail.prompt_ids
        text = text_of(app)
        assert "<|im_start|>system" in text
        assert "<|im_end|>" in text
        assert f"ids {ids[0]} {ids[1]}" in text
        assert f"{ids[-2]} {ids[-1]}" in text
        row = next(
            strip
            for strip in (screen.prompt.render_line(y) for y in range(4))
            if "<|im_start|>" in strip.text
        )
        special = next(segment for segment in row if segment.text == "<|im_start|>")
        assert special.style is app.look.special


async def test_texts_scroll_and_an_output_that_grows_is_followed() -> None:
    timeline = Timeline(3, rate=20, mean_output=500, seed=5)
    feed = FixedFeed(timeline.events, START + NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, "req_1")
        screen.card = 1
        screen.place()
        feed.advance(timeline.end)
        await settle(pilot)
        detail = app.frozen.detail("req_1")
        assert detail is not None
        assert detail.output_text is not None
        last = detail.output_text.split()[-2:]
        assert " ".join(last) in text_of(app) or last[-1] in rows_of(app)[-2]
        app.set_focus(screen.output)
        await pilot.press("home")
        await settle(pilot)
        assert " ".join(detail.output_text.split()[:6]) in text_of(app)
        await pilot.press("end")
        await settle(pilot)
        assert " ".join(detail.output_text.split()[:6]) not in text_of(app)


async def test_left_and_right_go_to_the_neighbours_and_escape_back_to_the_row(
    busy: Timeline,
) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = await opened(pilot, app, "req_70")
        await pilot.press("n")
        assert screen.request_id == "req_71"
        await pilot.press("p", "p")
        assert screen.request_id == "req_69"
        await pilot.press("right")
        assert screen.request_id == "req_70"
        await pilot.press("escape")
        await settle(pilot)
        assert isinstance(app.screen, LiveScreen)
        assert app.live.listing.selected == ("engine-1", 70)


async def test_the_ends_of_the_list_are_told(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await settle(pilot)
        screen = await opened(pilot, app, app.live.listing.rows[-1].id)
        before = screen.request_id
        await pilot.press("n")
        await pilot.pause()
        assert screen.request_id == before
        assert "that was the last one" in text_of(app)


async def test_a_running_request_is_updated_until_it_is_done(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, START + 3 * NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=(160, 50)) as pilot:
        live = next(
            view.id for view in feed.state.snapshot(live_only=True, now=feed.now()).requests
        )
        await opened(pilot, app, live)
        assert "so far" in text_of(app)
        for _ in range(60):
            feed.advance(feed.now() + 100 * NS_PER_MS)
            app.screen.draw()  # type: ignore[attr-defined]
            await pilot.pause()
        detail = app.frozen.detail(live)
        assert detail is not None
        assert detail.view.closed is not None
        text = text_of(app)
        assert "so far" not in text
        assert f"E2E {figures.milliseconds(detail.view.e2e_ms)} ms" in text
        assert f"out {detail.view.output_tokens}" in text


async def test_an_unavailable_stage_says_why_in_its_row() -> None:
    timeline = Timeline(2, rate=5, mean_output=20)
    events = [event for event in timeline.events if not isinstance(event, Scheduled)]
    feed = FixedFeed(events, timeline.end)
    feed.apply(
        Coverage(
            timeline.end, int(Stage.KV_ALLOC), "unavailable", "", "CUDA graph: hooks do not fire"
        )
    )
    app = app_on(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, "req_1")
        assert screen.detail is not None
        assert screen.detail.view.stages[Stage.KV_ALLOC - 1].status is Status.UNAVAILABLE
        row = next(row for row in rows_of(app) if "KV alloc" in row[:18])
        assert "unavailable: CUDA graph: hooks do not fire" in row


async def test_a_failed_request_shows_the_engines_reason() -> None:
    feed = FixedFeed([ENGINE, Received(START, 1, "r1")], START)
    feed.apply(Finished(START + NS_PER_MS, 1, "failed", 0, "CUDA out of memory"))
    app = app_on(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, app, "r1")
        assert "CUDA out of memory" in rows_of(app)[0]


async def test_text_that_was_not_recorded_is_said_to_be_absent() -> None:
    app = app_at(Timeline(3, text=False), START + 60 * NS_PER_S)
    async with app.run_test(size=(160, 50)) as pilot:
        await opened(pilot, app, "req_1")
        assert "the prompt's text was not recorded" in text_of(app)
        assert "the output's text was not recorded" in text_of(app)


async def test_on_a_small_screen_cards_are_chosen_one_at_a_time(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(80, 28)) as pilot:
        await opened(pilot, app, "req_57")
        seen = []
        for _ in range(6):
            await pilot.press("c")
            await settle(pilot)
            seen.append(text_of(app))
        assert "token 2" in seen[1]
        assert "layers" in seen[2]
        assert "residual stream" in seen[3]
        assert "prefill " in seen[4]
        assert "<|im_start|>system" in seen[5]


async def test_a_request_that_is_no_longer_kept_is_told_not_an_error(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await opened(pilot, app, "req_57")
        screen.request_id = "req_gone"
        screen.detail = None
        await settle(pilot)
        assert "req_gone is no longer kept" in text_of(app)


def test_shapes_follow_from_the_engines_facts(busy: Timeline) -> None:
    state = busy.state()
    detail = state.detail("req_57")
    assert detail is not None
    engine = state.snapshot(limit=0).engines[0]
    view = detail.view
    assert view.prompt_tokens is not None
    fresh = view.prompt_tokens - (view.cached_tokens or 0)
    shapes = {(shape.stage, shape.what): shape for shape in shapes_of(detail, engine)}
    assert kv_bytes_per_token(engine) == 2 * 30 * 3 * 64 * 2
    assert shapes[Stage.TOKENISE, "token ids"].size == view.prompt_tokens * 4
    assert shapes[Stage.EMBED, "residual stream"].size == fresh * 576 * 2
    assert shapes[Stage.PREFILL, "keys and values"].size == fresh * 23_040
    assert shapes[Stage.LM_HEAD, "logits"].size == 49_152 * 2
    assert shapes[Stage.SAMPLE, "token id"].size == 4
    assert shapes[Stage.DECODE, "token ids out"].size == view.output_tokens * 4


def test_what_the_engine_did_not_tell_is_left_out_not_guessed() -> None:
    feed = FixedFeed([Received(START, 1, "r1"), Prompt(START, 1, "hi", 2)], START)
    detail = feed.state.detail("r1")
    assert detail is not None
    assert [shape.what for shape in shapes_of(detail, None)] == ["prompt text"]
    assert dtype_bytes("torch.bfloat16") == 2
    assert dtype_bytes("mystery") is None

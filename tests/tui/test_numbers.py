"""The Numbers screen: the figures of the document, the plots that tell causes apart, keys, sizes,
and what it sends."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Received, Step
from tests.effort import thinned
from tests.state.test_counters import slow
from tests.tui.stage import (
    CapturingDriver,
    FixedFeed,
    Terminal,
    app_at,
    app_on,
    flushed,
    repainted,
    rows_of,
    settle,
    text_of,
)
from tests.tui.timeline import START, Timeline
from tracer.export.jsondoc import document
from tracer.format import figures
from tracer.replay.cursor import load
from tracer.state.metrics.numbers import DIMENSIONS, Ask
from tracer.state.metrics.slo import parse
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.screens.numbers.plots import cause_of, word_of
from tracer.tui.screens.numbers.screen import NumbersScreen
from tracer.tui.toolkit.theme import ASCII, MONO, UNICODE, Look

RECORDINGS = sorted((Path(__file__).parents[2] / "recordings").glob("*.trace"))
AT = START + 9_500 * NS_PER_MS


class StateFeed:
    """A state that stands still."""

    def __init__(self, state: TraceState) -> None:
        self.state = state
        self.status = "● LIVE"

    def now(self) -> int:
        """The last event."""
        return self.state.now

    async def run(self) -> None:
        """Nothing comes."""
        await asyncio.Event().wait()


async def opened(pilot: Pilot[int], app: TracerApp) -> NumbersScreen:
    await pilot.pause()
    await pilot.press("3")
    await settle(pilot)
    assert isinstance(app.screen, NumbersScreen)
    return app.screen


async def pressed(pilot: Pilot[int], app: TracerApp, *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
    await pilot.pause()
    screen = app.screen
    if isinstance(screen, NumbersScreen):
        screen.redraw()
    await pilot.pause()


def cells_of(rows: list[str], name: str) -> str:
    return next(row for row in rows if row.strip().startswith(name))


@pytest.mark.parametrize("path", thinned(RECORDINGS, 4), ids=lambda path: path.stem)
async def test_every_figure_on_the_screen_is_the_one_in_the_document(path: Path) -> None:
    """What `tracer show --json` prints of the same recording, as the screen writes it."""
    state = load(path)
    app = TracerApp(StateFeed(state), look=Look())
    app.slo = parse("ttft=2s,itl=400ms")
    app.frozen.window_s = math.inf
    told = json.loads(json.dumps(document(state.snapshot(numbers=Ask(slo=app.slo)))))["numbers"]
    async with app.run_test(size=(200, 60)) as pilot:
        await opened(pilot, app)
        rows = rows_of(app)
        for place, window in enumerate(told["windows"]):
            figure = window["all"]
            for name, label in (
                ("queue", "QUEUE"),
                ("prefill", "PREFILL"),
                ("ttft", "TTFT"),
                ("itl", "ITL"),
                ("tpot", "TPOT"),
                ("e2e", "E2E"),
            ):
                timer = figure["timers"][name]
                cells = cells_of(rows, f"{label} ms")[12 + 46 * place :][:44].split()
                quantiles = [timer[key] for key in ("p50_ms", "p95_ms", "p99_ms")]
                wanted = [figures.milliseconds(value) for value in quantiles] + [
                    figures.short_count(timer["count"])
                ]
                assert cells == (wanted if timer["count"] else [figures.UNKNOWN]), (
                    name,
                    window["window_s"],
                )

            def cell(name: str, place: int = place) -> str:
                return cells_of(rows, name)[12 + 46 * place :][:45].strip()

            assert (
                cell("REQUESTS")
                == f"{figures.count(figure['requests'])}  {figures.rate(figure['request_rate'])}/s"
            )
            into, out = (
                figures.short_count(figure["tokens_in"]),
                figures.short_count(figure["tokens_out"]),
            )
            assert cell("TOKENS") == f"in {into}/s  out {out}/s"
            assert cell("PREEMPTED") == figures.count(figure["preemptions"])
            if window["budget_use"] is not None:
                assert cell("BUDGET").startswith(f"{figures.percent(window['budget_use'])} %")
            if figure["hit_share"] is not None:
                assert cell("HITS").startswith(f"{figures.percent(figure['hit_share'])} %")
            if figure["ended"]:
                assert cell("ENDED").startswith(figures.count(figure["ended"]))
                assert cell("PROMPT tok").split()[0] == figures.short_count(figure["prompt"]["p50"])
                assert cell("OUTPUT tok").split()[-1] == figures.short_count(
                    figure["output"]["max"]
                )
            if figure["slo"]["share"] is not None:
                assert cell("GOODPUT").startswith(f"{figure['slo']['goodput']:.2f}/s")
        gauges = told["gauges"]
        assert f"KV live {figures.percent(gauges['kv_live'])} %" in rows[1]
        assert f"queue {figures.count(gauges['waiting'])}" in rows[1]
        assert isinstance(app.screen, NumbersScreen)
        shown = app.screen.numbers
        assert shown is not None
        document_of_screen = document(app.frozen.numbers(Ask(slo=app.slo)))["numbers"]
        assert json.loads(json.dumps(document_of_screen))["windows"] == told["windows"]
        assert [point["count"] for point in document_of_screen["itl_by_batch"]["points"]] == [
            point.count for point in shown.by_batch.points
        ]


@pytest.mark.parametrize(
    ("by", "words", "said"),
    [("batch", ("slower", "flat"), "compute-bound"),
     ("position", ("flat", "slower"), "cache reads"),
     ("neither", ("flat", "flat"), "look at the CPU")],
)  # fmt: skip
async def test_the_three_causes_of_slow_tokens_look_different(
    by: str, words: tuple[str, str], said: str
) -> None:
    app = TracerApp(StateFeed(slow(by)), look=Look())
    app.frozen.window_s = math.inf
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await opened(pilot, app)
        assert screen.numbers is not None
        assert (word_of(screen.numbers.by_batch), word_of(screen.numbers.by_position)) == words
        assert said in cause_of(screen.numbers) and said in rows_of(app)[-1]
        heights = [
            [cells.count("█") for cells in zip(*(strip.text[9:] for strip in
             (plot.render_line(y) for y in range(1, plot.size.height - 2))), strict=False)]
            for plot in (screen.by_batch, screen.by_position)
        ]  # fmt: skip
        for tall, word in zip(heights, words, strict=True):
            drawn = [height for height in tall if height]
            assert (max(drawn) > 1.5 * drawn[0]) == (word == "slower")


async def test_a_stall_is_marked_where_it_was(busy: Timeline) -> None:
    late = [event for event in busy.events if isinstance(event, Step)][300].t
    moved = [
        msgspec.structs.replace(event, t=event.t + 900 * NS_PER_MS) if event.t >= late else event
        for event in busy.events
    ]
    app = app_on(FixedFeed(moved, AT))
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await opened(pilot, app)
        top = screen.steps.render_line(1).text
        assert "▲" in top and "stalled: members waited up to 9" in text_of(app)
    app = app_at(busy, AT)
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await opened(pilot, app)
        assert "▲" not in screen.steps.render_line(1).text and "no stall" in text_of(app)


async def test_groups_are_cycled_chosen_and_filtered_by() -> None:
    timeline = Timeline(60, rate=9)
    for event in timeline.events:
        if isinstance(event, Received):
            event.tenant = "team-a" if event.key % 3 else "team-b\x1b[31m"
    app = app_at(timeline, AT)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        await pressed(pilot, app, "G", "G", "G")
        assert (
            screen.dimension == "tenant"
            and "team-a" in text_of(app)
            and "\\x1b[31m" in text_of(app)
        )
        await pressed(pilot, app, "down", "enter")
        assert screen.numbers is not None and screen.text
        assert {group.name for group in screen.numbers.window(60).groups["tenant"]} == {screen.text}
        await pressed(pilot, app, "escape")
        assert screen.text == ""
        await pressed(pilot, app, "slash", *"team-b")
        assert screen.text == "team-b"
        counted = screen.numbers.window(60).all.requests
        assert counted == sum(event.key % 3 == 0 for event in timeline.events
                              if isinstance(event, Received) and event.t <= AT)  # fmt: skip
        await pressed(pilot, app, "enter", "G")
        assert screen.dimension == DIMENSIONS[0] and "transformers" in text_of(app)


async def test_windows_and_plots_are_cycled(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        seen = []
        for _ in range(4):
            await pressed(pilot, app, "w")
            seen.append(screen.numbers.window_s if screen.numbers else None)
        assert seen == [600.0, math.inf, 10.0, 60.0]
        shown = set()
        for _ in range(6):
            await pressed(pilot, app, "c")
            shown.add(screen.card)
            assert screen.cards[screen.card].is_on_screen
        assert shown == set(range(6))


async def test_targets_are_typed_and_a_wrong_one_is_refused_in_words(busy: Timeline) -> None:
    app = app_at(busy, AT)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        screen = await opened(pilot, app)
        await pressed(pilot, app, "o", *"ttft=fast", "enter")
        assert not app.slo and "is no target" in text_of(app)
        screen.line.value = ""
        await pressed(pilot, app, *"ttft=50ms", "enter")
        assert str(app.slo) == "ttft=50ms" and "GOODPUT" in text_of(app)


async def test_a_paused_screen_stands_still_while_events_come_in(busy: Timeline) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, app)
        await pressed(pilot, app, "space")
        before = rows_of(app)
        feed.advance(AT + 4 * NS_PER_S)
        await pressed(pilot, app)
        assert rows_of(app) == before
        await pressed(pilot, app, "space")
        assert rows_of(app) != before


@pytest.mark.parametrize(
    ("size", "look"),
    [
        ((200, 60), Look(MONO, ASCII)),
        ((120, 40), Look(MONO, UNICODE)),
        ((80, 24), Look(MONO, ASCII)),
        ((60, 16), Look()),
        ((30, 8), Look()),
        ((8, 3), Look(MONO, ASCII)),
    ],
)
async def test_any_size_and_look_is_drawn_to_its_edges(
    busy: Timeline, size: tuple[int, int], look: Look
) -> None:
    app = app_at(busy, AT, look=look)
    async with app.run_test(size=size) as pilot:
        await opened(pilot, app)
        rows = rows_of(app)
        assert len(rows) == size[1] and all(len(row) == size[0] for row in rows)
        if look.glyphs is ASCII:
            assert "".join(rows).isascii()


async def test_an_empty_state_says_that_there_is_nothing_yet() -> None:
    app = app_on(FixedFeed([], START, announce=False))
    async with app.run_test(size=(200, 60)) as pilot:
        await opened(pilot, app)
        assert "no request has ended yet" in text_of(app) and "0.00" not in text_of(app)


async def test_what_is_sent_in_pieces_is_the_whole_and_nothing_while_nothing_happens(
    busy: Timeline,
) -> None:
    feed = FixedFeed(busy.events, AT)
    app = app_on(feed)
    app.driver_class = CapturingDriver
    terminal = Terminal(160, 50)
    async with app.run_test(headless=False, size=(160, 50)) as pilot:
        screen = await opened(pilot, app)
        driver = app._driver
        assert isinstance(driver, CapturingDriver)
        await flushed(pilot)
        for step in range(1, 6):
            terminal.feed(driver.sent.replace("\n", ""))
            driver.sent = ""
            feed.advance(AT + step * 500 * NS_PER_MS)
            screen.redraw()
            await flushed(pilot)
            assert 0 < len(driver.sent) < 20_000
        terminal.feed(driver.sent.replace("\n", ""))
        assert terminal.cells() == repainted(app).cells()
        driver.sent = ""
        for _ in range(3):
            screen.redraw()
            await flushed(pilot)
        assert driver.sent == ""


def test_numbers_at_160_by_50(busy: Timeline, snap_compare: Callable[..., bool]) -> None:
    async def rest(pilot: Pilot[int]) -> None:
        await flushed(pilot)
        await pilot.press("3")
        await flushed(pilot)

    app = app_at(busy, AT)
    app.slo = parse("ttft=200ms,itl=50ms")
    assert snap_compare(app, terminal_size=(160, 50), run_before=rest)

"""A replay on the screen: its timeline, the line to type a place, marks and findings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from engine_hooks.protocol.blocks import Mark
from engine_hooks.protocol.events import Received
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import S, beats, record, some
from tests.state.traces import header
from tests.tui.stage import rows_of, text_of
from tracer.replay.player import Player
from tracer.tui.app import TracerApp
from tracer.tui.replay.app import FindFindings, ReplayApp
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.toolkit.theme import ASCII, DARK, UNICODE, Look


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "story.trace"
    record(path, some(4, requests=8, split=True))
    return path


@pytest.fixture
def path(story: Path, tmp_path: Path) -> Path:
    """A copy that a test may keep marks beside."""
    copy = tmp_path / "story.trace"
    copy.write_bytes(story.read_bytes())
    return copy


@asynccontextmanager
async def replaying(
    path: Path,
    *,
    size: tuple[int, int] = (110, 30),
    find: FindFindings | None = None,
    look: Look | None = None,
) -> AsyncIterator[tuple[Pilot[Any], ReplayApp]]:
    player = Player.open(path, paused=True)
    app = ReplayApp(player, look=look or Look(DARK, UNICODE), find_findings=find)
    async with app.run_test(size=size) as pilot:
        await drawn(pilot)
        yield pilot, app
    player.close()


async def drawn(pilot: Pilot[Any]) -> None:
    """Let the player come to where it is sent, and the screen show it."""
    app = pilot.app
    assert isinstance(app, ReplayApp)
    for _ in range(200):
        await pilot.pause()
        if app.player.target is None:
            break
        app.player.tick()
    app.tick()
    app._redraw()
    await pilot.pause()


def line_of(app: TracerApp) -> str:
    """The row of the timeline."""
    return rows_of(app)[-2]


async def press(pilot: Pilot[Any], *keys: str) -> None:
    await pilot.press(*keys)
    await drawn(pilot)


async def test_the_timeline_tells_place_length_speed_and_share(path: Path) -> None:
    async with replaying(path) as (pilot, app):
        assert line_of(app).startswith(" ‖ 1x  0:00.0 / 0:0")
        assert line_of(app).rstrip().endswith("0 %")
        await press(pilot, "dollar_sign", "plus")
        assert "2x" in line_of(app) and line_of(app).rstrip().endswith("100 %")
        track = line_of(app).split("s ")[-1]
        assert track.count("●") == 1 and "━" in track
        await press(pilot, "circumflex_accent")
        assert "━" not in line_of(app)


@pytest.mark.parametrize(
    ("size", "look"), [((80, 24), UNICODE), ((44, 16), UNICODE), ((200, 50), ASCII)]
)
async def test_it_fits_any_screen_and_stands_above_the_keys(
    path: Path, size: tuple[int, int], look: Any
) -> None:
    async with replaying(path, size=size, look=Look(DARK, look)) as (pilot, app):
        await press(pilot, "dollar_sign")
        await press(pilot, "enter")
        assert isinstance(app.screen, RequestScreen)
        rows = rows_of(app)
        assert (
            len(rows) == size[1]
            and "0:0" in rows[-2]
            and "100 %" in rows[-2]
            and "help" in rows[-1]
        )
        if look is ASCII:
            assert rows[-2].isascii()


@pytest.mark.parametrize(
    ("typed", "share"), [("50%", 0.5), ("100%", 1.0), ("0", 0.0), ("9:59:59", 1.0), ("0%", 0.0)]
)
async def test_a_place_is_typed(path: Path, typed: str, share: float) -> None:
    async with replaying(path) as (pilot, app):
        await press(pilot, "colon")
        assert "go to" in text_of(app) and isinstance(app.focused, Input)
        app.focused.value = typed
        await press(pilot, "enter")
        assert app.player.fraction == pytest.approx(share, abs=0.001)
        assert app.focused is app.live.waterfall and "go to" not in rows_of(app)[-2]


async def test_what_is_typed_in_one_piece_goes_there(path: Path) -> None:
    """Over a slow line all keys are there before the line is; each of these does something else on
    a screen."""
    async with replaying(path) as (pilot, app):
        for key, character in (
            ("colon", ":"),
            ("5", "5"),
            ("0", "0"),
            ("percent_sign", "%"),
            ("enter", "\r"),
        ):
            app.post_message(Key(key, character))
        await drawn(pilot)
        assert app.screen is app.live and app.line is None
        assert app.player.fraction == pytest.approx(0.5, abs=0.001)
        for key in ("slash", *"r1q"):
            app.post_message(Key(key, "/" if key == "slash" else key))
        await drawn(pilot)
        assert app.screen is app.live and app.live.listing.text == "r1q"


async def test_a_request_is_gone_to_by_its_id_and_nonsense_is_told(path: Path) -> None:
    async with replaying(path) as (pilot, app):
        app.player.seek_fraction(1.0)
        await drawn(pilot)
        wanted = app.player.state.requests.order[3]
        assert app.go_to(wanted.id).endswith(f"where {wanted.id} was received")
        await drawn(pilot)
        assert app.player.now() == wanted.order[0]
        assert app.go_to("\x1b[2Jnobody").startswith("no request")
        await drawn(pilot)
        assert "\x1b" not in text_of(app)
        await press(pilot, "ctrl+g", "escape")
        assert app.focused is app.live.waterfall


async def test_a_click_on_the_track_goes_there(path: Path) -> None:
    async with replaying(path) as (pilot, app):
        row = line_of(app)
        begin, end = row.index("●"), row.rindex("─")
        await pilot.click(offset=((begin + end) // 2, 28))
        await drawn(pilot)
        assert app.player.fraction == pytest.approx(0.5, abs=0.02)


async def test_marks_are_kept_beside_the_trace_and_the_trace_is_not_touched(path: Path) -> None:
    before = path.read_bytes()
    async with replaying(path) as (pilot, app):
        await press(pilot, "full_stop", "full_stop", "B")
        t = app.player.now()
        await press(pilot, "dollar_sign")
        assert "▼" in line_of(app)
    assert path.read_bytes() == before
    async with replaying(path) as (pilot, app):
        await press(pilot, "apostrophe")
        assert app.player.now() == t
        await press(pilot, "B")
    assert not path.with_name("story.trace.marks").exists()


async def test_a_file_of_marks_that_is_none_of_ours_is_said_and_left_alone(path: Path) -> None:
    marks = path.with_name("story.trace.marks")
    marks.write_text("not ours")
    async with replaying(path) as (pilot, app):
        assert "left alone" in text_of(app)
        await press(pilot, "B")
        assert len(app.player.bookmarks) == 1
    assert marks.read_text() == "not ours"


async def test_findings_are_on_the_timeline_and_one_key_away(path: Path) -> None:
    player = Player.open(path)
    middle = (player.trace.begin + player.trace.end) // 2
    player.close()

    async def find() -> Sequence[Mark]:
        return [Mark(middle, "the queue was full")]

    async with replaying(path, find=find) as (pilot, app):
        await asyncio.sleep(0)
        await press(pilot)
        assert "▲" in line_of(app)
        await press(pilot, "exclamation_mark")
        assert app.player.now() == middle
        assert "the queue was full" in rows_of(app)[-1]
        await press(pilot, "circumflex_accent")
        assert "the queue was full" in app.go_to("finding")


async def test_findings_that_cannot_be_told_are_said(path: Path) -> None:
    async def find() -> Sequence[Mark]:
        raise OSError("no Python to ask")

    async with replaying(path, find=find) as (pilot, app):
        await press(pilot, "exclamation_mark")
        assert "no Python to ask" in rows_of(app)[-1]


async def test_idle_stretches_are_dotted_and_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "idle.trace"
    recorder = Recorder(path)
    recorder.write(Delivery("engine", header("engine"), [Received(1_000 * S, 1, "a", "/v1")]))
    for delivery in beats("engine", 1_001 * S, 59):
        recorder.write(delivery)
    recorder.write(Delivery("engine", None, [Received(1_060 * S, 2, "b", "/v1")]))
    for delivery in beats("engine", 1_061 * S, 2):
        recorder.write(delivery)
    recorder.close()
    async with replaying(path) as (pilot, app):
        assert "····" in line_of(app)
        await press(pilot, "I")
        assert "····" not in line_of(app) and "idle stretches are shown" in rows_of(app)[-1]


@pytest.mark.parametrize("feed", ["live", "replayed"])
async def test_a_frame_that_is_due_while_the_app_leaves_is_not_drawn(path: Path, feed: str) -> None:
    player = Player.open(path, paused=True)
    app = ReplayApp(player) if feed == "replayed" else TracerApp(player)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
    assert not app.screen_stack
    app.tick()
    player.close()


def test_the_keys_of_the_player_are_none_of_the_screens() -> None:
    ours = {key for binding in ReplayApp.BINDINGS for key in binding.key.split(",")}
    assert len(ours) == sum(len(binding.key.split(",")) for binding in ReplayApp.BINDINGS)
    for screen in (LiveScreen, RequestScreen):
        theirs = {
            key for b in screen.BINDINGS if isinstance(b, Binding) for key in b.key.split(",")
        }
        assert not ours & theirs


async def test_help_names_the_keys_and_there_is_none_to_record(path: Path) -> None:
    async with replaying(path, size=(160, 50)) as (pilot, app):
        await press(pilot, "question_mark")
        shown = text_of(app)
        for words in (
            ": ^g",
            "go to a time",
            "mark this place",
            "to the next finding",
            "10 s back",
            "next token",
        ):
            assert words in shown
        assert "recording" not in shown
        await press(pilot, "escape", "r")
        assert "REC" not in text_of(app)


async def test_what_is_wrong_with_the_file_is_in_the_banner(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])
    async with replaying(path) as (_, app):
        assert "story.trace was cut at byte" in text_of(app)

"""The Diagnosis screen: what was found live and in a recording, its evidence, and where its keys
lead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.diagnosis.scenario import Ask, Lab, Told, fold, ns, poisson
from tests.diagnosis.words import chatml, prose
from tests.state.traces import header
from tests.tui.stage import rows_of, settle, text_of
from tracer.analysis.diagnosis import Diagnosis, ObservedState, diagnose
from tracer.monitor.live_findings import LiveDiagnosis
from tracer.recording.excerpt import Excerpts, excerpt
from tracer.recording.trace_file import TraceFile
from tracer.replay.player import Player
from tracer.tui.app import TracerApp
from tracer.tui.replay.app import ReplayApp
from tracer.tui.screens.diagnosis.screen import DiagnosisScreen
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.screens.numbers.screen import NumbersScreen
from tracer.tui.screens.request.screen import RequestScreen
from tracer.tui.toolkit.theme import ASCII, DARK, MONO, UNICODE, Look
from tracer.tui.watch import FileWatch, LiveWatch


class LabFeed:
    """A lab's events up to an instant that only a test moves."""

    def __init__(self, record: Told, at: float) -> None:
        self.state = ObservedState()
        self.state.add_source(header("engine"))
        self.status = "● LIVE"
        self._events: Iterator[tuple[int, str, Any]] = iter(record)
        self._next = next(self._events, None)
        self._at = 0
        self.advance(at)

    def now(self) -> int:
        return self._at

    def advance(self, to: float) -> None:
        """Move the clock to so many seconds."""
        self._at = ns(to)
        while self._next is not None and self._next[0] <= self._at:
            self.state.apply(self._next[1], self._next[2])
            self._next = next(self._events, None)

    async def run(self) -> None:
        await asyncio.Event().wait()


def slow_sampler(until: float = 1e9) -> Told:
    """Fine for 20 s, then a slow sampler, until so many seconds."""
    lab = Lab(sample_ms=lambda t: 40 if 20 <= t < until else 0.4)
    return lab.record([Ask(t, 100, 40) for t in poisson(1.5, 100)])


@pytest.fixture(scope="module")
def record() -> Told:
    return slow_sampler()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a slow sampler and a template that doubles its BOS."""
    texts = ["<|im_start|>" + chatml(("user", prose(n, 20))) for n in range(90)]
    lab = Lab(sample_ms=lambda t: 40 if t >= 12 else 0.4)
    asks = [Ask(t, text, 40) for t, text in zip(poisson(1.5, 40), texts, strict=False)]
    path = tmp_path_factory.mktemp("traces") / "slow.trace"
    at = ns(0)
    recorder = Recorder(path, with_text=True, now=lambda: at)
    recorder.write(Delivery("engine", header("engine"), []))
    for at, source, event in lab.record(asks):  # noqa: B007  (read by the recorder's clock)
        recorder.write(Delivery(source, None, [event]))
    recorder.close()
    return path


async def look(app: TracerApp, times: int = 2) -> None:
    """Have the state looked at, as a worker does every two seconds."""
    watch = app.diagnosis
    assert isinstance(watch, LiveWatch)
    live = lives.setdefault(app, LiveDiagnosis())
    for _ in range(times):
        await watch.check(live)


lives: WeakKeyDictionary[TracerApp, LiveDiagnosis] = WeakKeyDictionary()


def live_app(feed: LabFeed, **options: Any) -> TracerApp:
    options.setdefault("look", Look(DARK, UNICODE))
    return TracerApp(feed, **options)


async def opened(pilot: Any, app: TracerApp) -> DiagnosisScreen:
    await pilot.press("4")
    await settle(pilot)
    assert isinstance(app.screen, DiagnosisScreen)
    return app.screen


@pytest.mark.parametrize(
    ("size", "look_of"),
    [
        ((80, 24), Look(DARK, UNICODE)),
        ((200, 60), Look(DARK, UNICODE)),
        ((120, 40), Look(MONO, ASCII)),
    ],
)
async def test_a_finding_is_shown_with_stage_time_lost_begin_and_what_to_check(
    record: Told, size: tuple[int, int], look_of: Look
) -> None:
    app = live_app(LabFeed(record, 50), look=look_of)
    async with app.run_test(size=size) as pilot:
        await look(app)
        await opened(pilot, app)
        text = text_of(app)
        finding = app.diagnosis.findings[0]
        assert finding.rule == "sampler"
        row = next(row for row in rows_of(app) if f"{finding.lost_ms:,.0f} ms" in row)
        assert (
            "sampler" in row
            and "9 sample" in row
            and "90 %" in row
            and "0:20" in row
            and "now" in row
        )
        assert "stage 9, sample: sampling takes" in text
        assert "logprobs, penalties" in text
        assert "thresholds used" in text and "5 ms a step" not in text
        if size[0] >= 120:
            assert "evidence" in text and "sampling" in text and "ms a step" in text
            assert finding.affected[0] in text
            assert "can't tell" in text
        await pilot.press("x")
        app.screen.set_focus(app.screen.query_one("#finding"))
        await pilot.press("m")
        await settle(pilot)
        assert "5 ms a step: a sampler takes" in text_of(app)
        for glyph in "●▌█" if look_of.glyphs is ASCII else "":
            assert glyph not in text


async def test_the_cards_follow_the_tabs_on_a_small_screen(record: Told) -> None:
    app = live_app(LabFeed(record, 50))
    async with app.run_test(size=(80, 24)) as pilot:
        await look(app)
        await opened(pilot, app)
        await pilot.press("c")
        await settle(pilot)
        assert "ms a step" in text_of(app)
        await pilot.press("c")
        await settle(pilot)
        assert app.diagnosis.findings[0].affected[0] in text_of(app)
        await pilot.press("c")
        await settle(pilot)
        assert "nothing: all checks" in text_of(app) or "record" in text_of(app)


async def test_nothing_wrong_is_said_in_words(record: Told) -> None:
    app = live_app(LabFeed(record, 18))
    async with app.run_test(size=(100, 30)) as pilot:
        await look(app)
        await opened(pilot, app)
        assert "no fault found in" in text_of(app) and "nothing is wrong" in text_of(app)
        await pilot.press("enter", "e")
        await settle(pilot)
        assert isinstance(app.screen, DiagnosisScreen)


async def test_a_new_finding_is_told_once_on_the_live_screen_and_stays_among_the_keys(
    record: Told,
) -> None:
    app = live_app(LabFeed(record, 50))
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        assert "diagnosis" not in rows_of(app)[-1]
        await look(app)
        app.tick()
        await settle(pilot)
        assert "new finding: stage 9 sample (press 4)" in rows_of(app)[-1]
        app.note = ""
        await look(app, 1)
        app.tick()
        await settle(pilot)
        assert "4 diagnosis (1)" in rows_of(app)[-1] and "9 sample" not in rows_of(app)[-1]
        await pilot.press("4")
        assert isinstance(app.screen, DiagnosisScreen)


async def test_a_finding_that_is_over_keeps_its_place_with_an_end() -> None:
    feed = LabFeed(slow_sampler(until=45), 44)
    app = live_app(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        watch, live = app.diagnosis, LiveDiagnosis()
        assert isinstance(watch, LiveWatch)
        for second in range(44, 56):
            feed.advance(second)
            await watch.check(live)
        await opened(pilot, app)
        assert "0:20 → 0:45" in " ".join(text_of(app).split())
        assert "1 ended" in text_of(app)


async def test_enter_opens_the_request_and_escape_comes_back(record: Told) -> None:
    app = live_app(LabFeed(record, 50))
    async with app.run_test(size=(120, 40)) as pilot:
        await look(app)
        screen = await opened(pilot, app)
        await pilot.press("enter")
        await pilot.pause(0.1)
        assert isinstance(app.screen, RequestScreen)
        assert app.screen.request_id == app.diagnosis.findings[0].affected[0]
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is screen
        app.screen.set_focus(screen.touched)
        await pilot.press("down", "enter")
        await pilot.pause(0.1)
        assert isinstance(app.screen, RequestScreen)
        assert app.screen.request_id == app.diagnosis.findings[0].affected[1]


async def test_escape_leads_back_to_the_live_screen(record: Told) -> None:
    app = live_app(LabFeed(record, 50))
    async with app.run_test(size=(120, 40)) as pilot:
        await look(app)
        await opened(pilot, app)
        await pilot.press("m")
        await settle(pilot)
        await pilot.press("escape")
        await settle(pilot)
        assert isinstance(app.screen, DiagnosisScreen)
        await pilot.press("escape")
        assert isinstance(app.screen, LiveScreen)


async def test_without_anything_kept_e_says_so(record: Told) -> None:
    app = live_app(LabFeed(record, 50))
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await look(app)
        await opened(pilot, app)
        await pilot.press("e")
        await pilot.pause()
        assert "no events are kept here" in text_of(app)


async def test_a_rule_that_fails_is_told_and_ends_nothing(
    record: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracer.tui.watch.CHECK_S", 0.01)

    def broken(self: LiveDiagnosis, evidence: object) -> Diagnosis:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(LiveDiagnosis, "judge", broken)
    app = live_app(LabFeed(record, 50))
    async with app.run_test(size=(100, 30)) as pilot:
        for _ in range(200):
            await pilot.pause(0.02)
            if "ZeroDivisionError" in app.diagnosis.verdict:
                break
        await opened(pilot, app)
        assert "the diagnosis failed: ZeroDivisionError: a defect" in text_of(app)


# --- a recording ----------------------------------------------------------------------------------


def replayed(trace: Path, diagnose_it: Any) -> ReplayApp:
    player = Player.open(trace, paused=True)
    app = ReplayApp(player, title="slow", look=Look(DARK, UNICODE))
    app.diagnosis = FileWatch(player, diagnose_it)
    return app


def by_hand(trace: Path) -> Any:
    """What a process of its own would find."""

    async def of_file() -> Diagnosis:
        state = ObservedState(keep_finished=20_000)
        with TraceFile(trace) as file:
            for delivery in file.deliveries():
                if delivery.header is not None:
                    state.add_source(delivery.header)
                for event in delivery.events:
                    state.apply(delivery.source, event)
        return diagnose(state)

    return of_file


async def test_a_recording_is_diagnosed_when_somebody_looks_and_enter_goes_to_the_time(
    trace: Path,
) -> None:
    app = replayed(trace, by_hand(trace))
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, app)
        watch = app.diagnosis
        assert isinstance(watch, FileWatch)
        await watch.ask()
        await settle(pilot)
        text = text_of(app)
        assert "the whole recording" in text and "doubled-bos" in text and "0:12" in text
        finding = watch.findings[0]
        assert finding.rule == "sampler" and app.player.now() < finding.start
        await pilot.press("enter")
        for _ in range(500):
            await pilot.pause(0.02)
            if isinstance(app.screen, RequestScreen):
                break
        assert app.player.now() == finding.start
        assert isinstance(app.screen, RequestScreen)


async def test_a_finding_opens_nothing_over_a_screen_to_which_the_user_went_meanwhile(
    record: Told,
) -> None:
    app = live_app(LabFeed(record, 50))
    arrived = asyncio.Event()

    async def long_way(t: int) -> bool:
        return await arrived.wait()

    app.seek_to = long_way  # type: ignore[method-assign]
    async with app.run_test(size=(120, 40)) as pilot:
        await look(app)
        await opened(pilot, app)
        await pilot.press("enter", "3")
        arrived.set()
        await settle(pilot)
        assert isinstance(app.screen, NumbersScreen)


def went_to(player: Player, t: int) -> None:
    """Send a player to the instant `t` (ns), and let it come there."""
    player.seek(t)
    while player.target is not None:
        player.tick()


async def test_a_finding_is_told_when_the_playhead_gets_to_it(trace: Path) -> None:
    app = replayed(trace, by_hand(trace))
    async with app.run_test(size=(120, 40)) as pilot:
        watch = app.diagnosis
        assert isinstance(watch, FileWatch)
        await watch.ask()
        went_to(app.player, watch.findings[0].start - 1)
        assert watch.news() is None or watch.findings[0].rule != "sampler"
        went_to(app.player, watch.findings[0].start + 1)
        assert watch.news() is watch.findings[0]
        assert watch.news() is None
        await settle(pilot)


async def test_a_recording_that_cannot_be_diagnosed_says_why(trace: Path) -> None:
    async def of_file() -> Diagnosis:
        raise OSError("no memory\x1b[31m left")

    app = replayed(trace, of_file)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, app)
        await pilot.pause()
        await settle(pilot)
        assert "was not diagnosed: no memory\\x1b[31m left" in text_of(app)


async def test_e_cuts_the_recording_around_the_finding(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = replayed(trace, by_hand(trace))
    app.evidence = Excerpts(trace, app.player.trace.end)
    async with app.run_test(size=(160, 40)) as pilot:
        await opened(pilot, app)
        assert isinstance(app.diagnosis, FileWatch)
        finding = (await app.diagnosis.ask()).findings[0]
        await settle(pilot)
        await pilot.press("e")
        for _ in range(500):
            await pilot.pause(0.02)
            if app.note:
                break
        assert "slow-sampler.trace" in app.note
    with TraceFile(tmp_path / "slow-sampler.trace") as cut:
        assert [mark.t for mark in cut.marks()] == [finding.start]
        assert finding.start - 7_000_000_000 < cut.begin < finding.start
    again = (await by_hand(tmp_path / "slow-sampler.trace")()).findings
    assert "sampler" in [found.rule for found in again]


def test_an_excerpt_is_whole_from_its_first_event_on(trace: Path, tmp_path: Path) -> None:
    with TraceFile(trace) as file:
        begin, end = file.begin + 15_000_000_000, file.begin + 25_000_000_000
    excerpt(trace, tmp_path / "cut.trace", begin, end, mark=begin, why="x\x1b[31m")
    state = fold([])
    with TraceFile(tmp_path / "cut.trace") as cut:
        assert cut.end <= end + 1_000_000_000 and not cut.problems
        for delivery in cut.deliveries():
            if delivery.header is not None:
                state.add_source(delivery.header)
            for event in delivery.events:
                state.apply(delivery.source, event)
    assert state.unknown == 0
    running = [
        request
        for request in state.requests.order
        if request.first_seen < begin and not request.incomplete
    ]
    assert running and all(request.received is not None for request in running)

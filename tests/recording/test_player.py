"""Playing a file: the state at the playhead is the live one, whichever way one came there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.events import Heartbeat, Received, Sent, Step
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.effort import examples
from tests.recording.story import MS, Clock, S, beats, record, some, states
from tests.state.traces import header
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import Cursor, load
from tracer.replay.folding import fold as fold_file
from tracer.replay.player import SPEEDS, Player
from tracer.replay.snapshot_file import SnapshotFile
from tracer.tui.feed import Feed

DELIVERIES = some(11, requests=14, split=True, blocks=60)
STATES = states(DELIVERIES, with_text=False)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same trace beside a cache with snapshots of it, an empty one, and one whose snapshots are
    damaged."""
    folder = tmp_path_factory.mktemp("traces")
    made = {kind: folder / kind / "a.trace" for kind in ("folded", "new", "damaged")}
    for kind, path in made.items():
        path.parent.mkdir()
        record(path, DELIVERIES, with_text=False, block_ns=S // 25)
        if kind != "new":
            found = snapshots_of(path)
            if kind == "damaged":
                spoil(found)
    return made


def snapshots_of(path: Path) -> Path:
    """Fold a recording into the cache beside it; the file with its snapshots."""
    with pytest.MonkeyPatch.context() as patch, TraceFile(path) as trace:
        patch.setenv("TRACER_CACHE", str(path.parent))
        snapshots = SnapshotFile.of(trace)
        assert snapshots is not None
        fold_file(snapshots, apart_s=0)
        return snapshots.path


def spoil(path: Path) -> None:
    """Change a byte of what each snapshot holds, and of none of their headers."""
    data = bytearray(path.read_bytes())
    begin = data.find(b"SNAP")
    while begin >= 0:
        end = data.find(b"SNAP", begin + 4)
        end = len(data) if end < 0 else end
        data[end - (end - begin) // 3] ^= 0x41
        begin = end if end < len(data) else -1
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """These traces are short: snapshots are used for every seek all the same. A tick takes as long
    as it takes: how busy this machine is must not matter."""
    monkeypatch.setattr("tracer.replay.cursor.NEAR_NS", 0)
    monkeypatch.setattr("tracer.replay.player.SLICE_NS", 60 * S)
    monkeypatch.setattr("tracer.replay.player.SEEK_NS", 60 * S)


@pytest.fixture(params=["folded", "new", "damaged"])
def path(
    request: pytest.FixtureRequest, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    path = paths[request.param]
    monkeypatch.setenv("TRACER_CACHE", str(path.parent))
    return path


def settle(player: Player) -> Player:
    """Let it come to where it was sent."""
    for _ in range(10_000):
        if not player.status.startswith("seeking") and player.status != "searching":
            return player
        player.tick()
    raise AssertionError(player.status)


@pytest.fixture
def player(path: Path) -> Player:
    return Player.open(path, now=Clock(), paused=True)


def test_the_state_at_any_instant_is_the_one_that_a_live_viewer_had(player: Player) -> None:
    pick = random.Random(1)
    for begin, until, digest in [pick.choice(STATES) for _ in range(40)] + [STATES[0], STATES[-1]]:
        player.seek(pick.choice([begin, (begin + until - 1) // 2, until - 1]))
        assert settle(player).state.digest() == digest
        assert player.now() <= player.trace.end
    player.close()


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.one_of(
    st.tuples(st.just("seek"), st.floats(0, 1)), st.tuples(st.just("play"), st.floats(0, 2)),
    st.tuples(st.sampled_from(["event", "step", "token", "stage", "back"]), st.just(0.0)),
), max_size=12))  # fmt: skip
def test_whichever_way_one_comes_to_an_instant_the_state_is_the_same(
    paths: dict[str, Path], ways: list
) -> None:
    clock = Clock()
    player = Player.open(paths["folded"], now=clock, idle_s=None)
    for what, amount in ways:
        match what:
            case "seek":
                player.seek_fraction(amount)
            case "play":
                player.play()
                clock.t += int(amount * S)
                player.tick()
            case "event":
                player.step_event()
            case "step":
                player.step_step()
            case "token":
                player.step_token()
            case "stage":
                player.step_stage()
            case "back":
                player.back_step()
        settle(player)
    here, digest = player.now(), player.state.digest()
    known = [seen for begin, until, seen in STATES if begin <= here < until]
    if known != [digest]:  # stepping stops between two things that became known at the same instant
        assert ways[-1][0] not in ("seek", "play")
        player.seek(here)
        assert [settle(player).state.digest()] == known
    player.close()


def test_playing_takes_its_pace_from_the_viewers_clock(path: Path) -> None:
    clock = Clock(77 * S)
    player = Player.open(path, now=clock, idle_s=None)
    begin = player.now()
    assert begin == player.trace.begin and player.status == "replay 1x"
    for speed, seconds in ((1.0, 0.5), (2.0, 0.25), (0.1, 1.0)):
        player.speed = speed
        before = player.now()
        clock.t += int(seconds * S)
        player.tick()
        assert player.now() - before == int(seconds * speed * S)
        (expected,) = [digest for start, until, digest in STATES if start <= player.now() < until]
        assert player.state.digest() == expected
    player.pause()
    clock.t += 5 * S
    player.tick()
    player.toggle()
    before = player.now()
    player.tick()
    assert player.now() == before
    clock.t += 3600 * S  # a stopped terminal: no jump
    player.tick()
    assert player.now() - before <= S
    player.close()


def test_it_ends_at_the_end_and_begins_again_when_asked(path: Path) -> None:
    clock = Clock()
    player = Player.open(path, now=clock, at=1 << 62)
    assert settle(player).now() == player.trace.end
    assert player.state.digest() == STATES[-1][2] == load(path).digest()
    clock.t += S
    player.tick()
    assert player.ended and player.status == "replay ended" and player.fraction == 1.0
    player.toggle()
    assert settle(player).now() == player.trace.begin and not player.ended and not player.paused
    player.loop = True
    player.seek_fraction(1.0)
    settle(player)
    clock.t += S
    player.tick()
    assert settle(player).now() == player.trace.begin and not player.ended
    player.close()


def test_speeds_go_up_and_down_and_have_bounds(player: Player) -> None:
    seen = []
    for _ in range(12):
        player.faster()
        seen.append(player.speed)
    assert seen == [*SPEEDS[4:], *[100.0] * 6]
    player.speed = 3.0
    player.slower()
    assert player.speed == 2.0
    for speed, kept in (
        (1e9, 100.0),
        (0.0, 0.1),
        (-5.0, 0.1),
        (float("nan"), 1.0),
        (float("inf"), 100.0),
    ):
        player.speed = speed
        assert player.speed == kept
    player.close()


def test_steps_go_to_the_next_event_step_token_and_stage(player: Player) -> None:
    state = player.state
    core = state.sources["core"].batch
    steps = core.count
    player.step_step()
    assert settle(player).paused and player.state.sources["core"].batch.count == steps + 1
    before = player.now()
    player.back_step()
    player.back_step()
    assert settle(player).now() <= before
    player.seek_fraction(0.3)
    settle(player)
    produced = player.state.sources["core"].batch.produced
    player.step_token()
    assert settle(player).state.sources["core"].batch.produced > produced
    request_id = next(
        r.id for r in player.state.requests.live.values() if r.first_token is not None
    )
    view = player.state.detail(request_id)
    assert view is not None
    player.step_token(request_id)
    after = settle(player).state.detail(request_id)
    assert after is not None and after.view.output_tokens == view.view.output_tokens + 1
    phases = [after.view.phase]
    for _ in range(30):
        player.step_stage(request_id)
        seen = settle(player).state.detail(request_id)
        assert seen is not None
        phases.append(seen.view.phase)
        if player.ended:
            break
    assert phases[-1] == "done"
    player.seek(player.trace.begin)
    settle(player)
    for _ in range(5):
        player.step_stage()
        assert not settle(player).ended
    player.step_event()
    assert settle(player).paused
    player.close()


def test_events_that_never_come_leave_it_at_the_end(player: Player) -> None:
    player.step_token("nobody")
    assert settle(player).ended and player.now() == player.trace.end
    player.close()


def test_it_goes_to_a_request_by_any_of_its_ids(player: Player) -> None:
    state = load(player.trace.path)
    request = state.requests.order[len(state.requests.order) // 2]
    for name in (request.id, *request.names):
        player.seek(player.trace.begin)
        settle(player)
        assert player.seek_request(name)
        assert settle(player).now() == request.received
    assert player.seek_request(request.id)
    here = player.now()
    assert (
        not player.seek_request("nobody")
        and not player.seek_request("")
        and not player.seek_request("\ud800")
    )
    assert player.now() == here
    player.close()


def test_findings_and_bookmarks_are_gone_to_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    recorder = Recorder(path)
    recorder.write(Delivery("engine", header("engine"), []))
    for second in range(1, 20):
        recorder.write(Delivery("engine", None, [Sent(second * S, 1, second, second)]))
    recorder.mark(5 * S, "it got slow")
    recorder.close()
    player = Player.open(path, now=Clock(), paused=True, findings=[12 * S, 8 * S])
    assert not player.bookmark("here") or player.bookmarks[0].t == S
    assert not player.bookmark()  # takes it away again
    player.seek(15 * S)
    assert player.bookmark("later") and [mark.text for mark in player.bookmarks] == [
        "it got slow",
        "later",
    ]
    went = []
    for _ in range(3):
        assert player.next_bookmark()
        went.append(player.now() // S)
    assert went == [5, 15, 5]
    went = []
    for _ in range(3):
        assert player.next_finding()
        went.append(player.now() // S)
    assert went == [8, 12, 8]
    player.findings, player.bookmarks = [], []
    assert not player.next_finding() and not player.next_bookmark()
    player.close()


def _with_gap(path: Path) -> Path:
    """A second of events, ten minutes of nothing but signs of life, another second of events."""
    recorder = Recorder(path)
    recorder.write(Delivery("engine", header("engine"), [Received(S, 1, "r1")]))
    for n in range(10):
        recorder.write(Delivery("engine", None, [Sent(S + n * 100 * MS, 1, n, n)]))
    for beat in beats("engine", 2 * S, 600):
        recorder.write(beat)
    for n in range(10):
        recorder.write(Delivery("engine", None, [Sent(602 * S + n * 100 * MS, 1, 20 + n, n)]))
    recorder.close()
    return path


def test_a_long_gap_is_jumped_over_and_the_clock_stays_true(tmp_path: Path) -> None:
    path = _with_gap(tmp_path / "gap.trace")
    clock = Clock()
    player = Player.open(path, now=clock)
    shown: list[int] = []
    said: list[str] = []
    for _ in range(200):
        clock.t += S // 20
        player.tick()
        shown.append(player.now())
        said.append(player.status)
        snapshot = player.state.snapshot(now=player.now())
        assert snapshot.now == player.now() and player.state.now <= player.now()
        if player.ended:
            break
    assert player.ended and 2.5 * S < clock.t < 5 * S
    jumps = [(a, b) for a, b in pairwise(shown) if b - a > S]
    assert jumps == [(shown[shown.index(jumps[0][0])], 602 * S - 500 * MS)]
    assert player.skipped == jumps[0][1] - max(jumps[0][0], 1_900 * MS + 500 * MS)
    assert "replay 1x, skipped 9:59.1" in said
    assert player.state.digest() == load(path).digest()
    player.close()


def test_a_seek_into_a_gap_shows_the_instant_asked_for(tmp_path: Path) -> None:
    path = _with_gap(tmp_path / "gap.trace")
    clock = Clock()
    player = Player.open(path, now=clock, paused=True)
    player.seek(300 * S)
    assert player.now() == 300 * S and player.state.now == 300 * S
    player.seek_fraction(0.5)
    assert player.now() == player.trace.begin + (player.trace.end - player.trace.begin) // 2
    player.bookmark()
    player.play()
    clock.t += S
    player.tick()
    assert player.now() == 602 * S - 500 * MS
    assert player.next_bookmark() and 301 * S < player.now() < 303 * S
    every = Player.open(path, now=clock, idle_s=None)
    every.seek(300 * S)
    clock.t += S
    every.tick()
    assert every.now() == 301 * S and every.skipped == 0
    player.close()
    every.close()


def test_a_clock_that_jumps_back_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "back.trace"
    recorder = Recorder(path)
    recorder.write(Delivery("engine", header("engine"), [Received(10 * S, 1, "r1")]))
    for n in range(100):
        recorder.write(
            Delivery("engine", None, [Sent((11 * S if n < 50 else 8 * S) + n * 50 * MS, 1, n, n)])
        )
    recorder.close()
    clock = Clock()
    player = Player.open(path, now=clock, idle_s=None)
    shown = []
    while not player.ended:
        clock.t += S // 20
        player.tick()
        shown.append(player.now())
        assert len(shown) < 1_000
    assert shown == sorted(shown)
    assert player.state.digest() == load(path).digest()
    for t in (9 * S, 12 * S, 13 * S + 450 * MS):
        player.seek(t)
        assert player.now() == max(t, player.trace.begin)
    player.close()


def test_two_sources_apart_in_time_are_played_as_they_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "two.trace"
    deliveries = [Delivery("a", header("a"), []), Delivery("b", header("b"), [])]
    for n in range(40):
        t = 10 * S + n * 100 * MS
        deliveries += [
            Delivery("a", None, [Sent(t, 1, n, n)]),
            Delivery("b", None, [Sent(t - 1_500 * MS, 1, n, n)]),
        ]
    recorder = Recorder(path)
    for delivery in deliveries:
        recorder.write(delivery)
    recorder.close()
    player = Player.open(path, now=Clock(), paused=True)
    for begin, until, digest in states(deliveries)[::7]:
        player.seek((begin + until) // 2)
        assert player.state.digest() == digest
    player.close()


async def test_it_feeds_a_screen(path: Path) -> None:
    feed: Feed = Player.open(path, speed=100.0)
    running = asyncio.create_task(feed.run())
    for _ in range(500):
        await asyncio.sleep(0.01)
        if feed.status == "replay ended":
            break
    assert feed.state.digest() == STATES[-1][2]
    feed.seek(0)  # type: ignore[attr-defined]
    await asyncio.sleep(0.1)
    assert feed.status != "replay ended" or feed.now() > 0
    feed.status = "stopped"
    assert feed.status == "stopped"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_paused_player_that_has_nothing_to_do_does_nothing(paths: dict[str, Path]) -> None:
    class Counting(Player):
        ticks = 0

        def tick(self) -> None:
            self.ticks += 1
            super().tick()

    player = Counting.open(paths["folded"], paused=True)
    running = asyncio.create_task(player.run())
    await asyncio.sleep(0.3)
    assert player.ticks <= 2
    player.toggle()
    async with asyncio.timeout(30):
        while player.ticks <= 2:
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    player.close()


def test_a_far_seek_in_a_file_that_was_not_folded_takes_several_ticks(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracer.replay.player.SEEK_NS", 0)
    monkeypatch.setattr("tracer.replay.player.SLICE_NS", 0)
    monkeypatch.setenv("TRACER_CACHE", str(paths["new"].parent))
    player = Player.open(paths["new"], now=Clock(), paused=True)
    settle(player)
    player.seek(player.trace.end)
    statuses = [player.status]
    while player.status.startswith("seeking"):
        player.tick()
        statuses.append(player.status)
    shares = [int(status.split()[1]) for status in statuses[:-1]]
    assert len(shares) > 3 and shares == sorted(shares) and shares[-1] <= 100
    assert player.state.digest() == STATES[-1][2]
    player.close()


def test_a_seek_starts_at_the_nearest_snapshot(paths: dict[str, Path]) -> None:
    with TraceFile(paths["folded"]) as trace:
        snapshots = SnapshotFile(trace, snapshots_of(trace.path))
        assert snapshots.complete and snapshots.reached == trace.end
        assert len(snapshots.entries) == len(trace.blocks)
        cursor = Cursor(trace, snapshots)
        for entry in (snapshots.entries[-1], snapshots.entries[0], snapshots.entries[-2]):
            cursor.jump(entry.last + 1)
            assert cursor.due == entry.last
        assert cursor.reseated == 3
        cursor.jump(trace.end)
        assert cursor.advance(trace.end) and cursor.state.digest() == STATES[-1][2]
        assert cursor.step() is None and cursor.next_activity() is None


def test_load_gives_the_state_at_an_instant_or_at_the_end(path: Path) -> None:
    for begin, until, digest in STATES[:: max(1, len(STATES) // 12)]:
        assert load(path, until=(begin + until) // 2).digest() == digest
        assert load(path, until=(begin + until) // 2, snapshots=False).digest() == digest
    assert load(path).digest() == STATES[-1][2]
    few = load(path, keep_finished=2)
    assert (
        len(few.requests.over) == 2
        and few.requests.finished_total == load(path).requests.finished_total
    )
    with pytest.raises(TraceFileError, match="cannot read"):
        load(path.with_name("none.trace"))


@pytest.mark.parametrize("kind", ["empty block", "no events"])
def test_little_is_played_too(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    recorder = Recorder(path)
    recorder.write(
        Delivery("engine", header("engine"), [] if kind == "empty block" else [Heartbeat(S)])
    )
    recorder.close()
    clock = Clock()
    player = Player.open(path, now=clock)
    moves: list[Callable[[], object]] = [
        player.tick,
        player.step_event,
        player.step_step,
        player.step_token,
        player.step_stage,
        player.back_event,
        lambda: player.seek(5),
        lambda: player.seek_fraction(0.5),
        lambda: player.seek_by(-S),
        player.toggle,
        lambda: player.bookmark(),
        player.tick,
        player.tick,
    ]
    for move in moves:
        clock.t += S
        move()
        settle(player).state.snapshot(now=player.now())
    assert player.ended and player.fraction == 1.0
    player.close()


def test_a_step_is_known_at_its_end(tmp_path: Path) -> None:
    """A screen must not show the end of a step that is still running at the playhead."""
    path = tmp_path / "a.trace"
    recorder = Recorder(path)
    recorder.write(
        Delivery(
            "engine", header("engine"), [Received(S, 1, "r"), Step(2 * S, 0, token=S, end=2 * S)]
        )
    )
    recorder.close()
    player = Player.open(path, now=Clock(), paused=True)
    player.seek(4 * S - 1)
    assert player.state.sources["engine"].batch.count == 0
    player.seek(4 * S)
    assert player.state.sources["engine"].batch.count == 1
    player.close()


def test_what_is_shown_on_the_way_to_a_far_place_is_of_one_instant(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request was received after the instant that the screen names, whichever way it goes."""
    monkeypatch.setattr("tracer.replay.player.SEEK_NS", 0)
    monkeypatch.setattr("tracer.replay.player.SLICE_NS", 0)
    monkeypatch.setenv("TRACER_CACHE", str(paths["new"].parent))
    player = Player.open(paths["new"], now=Clock(), paused=True)
    seen = set()
    for t in (player.trace.end, player.trace.begin, player.trace.end):
        player.seek(t)
        while player.target is not None:
            assert player.now() >= player.state.now
            views = player.state.snapshot(now=player.now()).requests
            assert all(view.received <= player.now() for view in views)
            seen.add(player.now())
            player.tick()
        assert player.now() == t
    assert len(seen) > 4
    player.seek_by(-S)
    player.seek_by(-S // 2)
    settle(player)
    assert player.now() == max(player.trace.begin, player.trace.end - 3 * S // 2)
    player.close()

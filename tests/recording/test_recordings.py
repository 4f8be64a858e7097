"""The recordings that come with the project: each opens at once, without an engine, and shows what
the table says."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.effort import examples
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import Cursor, load
from tracer.replay.folding import fold as fold_file
from tracer.replay.snapshot_file import SnapshotFile
from tracer.state.trace_state import TraceState

FOLDER = Path(__file__).resolve().parents[2] / "recordings"
RECORDINGS = sorted(FOLDER.glob("*.trace"))
PLACES = examples(50)

PROBE = """
import contextlib, io, json, sys, time
for name in ("torch", "transformers", "vllm"):
    sys.modules[name] = None
from tracer.cli.main import main
from tracer.replay.player import Player
told = {}
for path in sys.argv[1:]:
    begin = time.process_time()
    player = Player.open(path, paused=True)
    player.state.snapshot(now=player.now(), limit=50)
    player.seek_fraction(1.0)
    while player.target is not None:
        player.tick()
    player.state.snapshot(now=player.now(), limit=50)
    spent = time.process_time() - begin
    player.close()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["show", path, "--json"])
    told[path] = [spent, code, json.loads(out.getvalue())]
print(json.dumps(told))
"""


@cache
def opened() -> dict[str, Any]:
    """Each recording, opened in a process that has no engine: seconds of CPU, exit code and
    document of `show`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, RECORDINGS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_there_is_one_for_each_story_and_engine_and_the_table_names_them_all() -> None:
    names = {path.stem for path in RECORDINGS}
    assert {
        f"{engine}-{story}" for engine in ("transformers", "vllm") for story in SHOWS
    } | OTHERS == names
    table = (FOLDER / "README.md").read_text()
    assert all(f"`{name}.trace`" in table for name in names)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_it_opens_at_once_without_an_engine(path: Path) -> None:
    spent, code, document = opened()[str(path)]
    assert code == 0 and spent < 1.0
    assert document["requests"] and document["engine"]
    assert path.stat().st_size < 1_000_000
    with TraceFile(path) as trace:
        assert trace.verify() == [] and not trace.with_text


def cold(state: TraceState) -> bool:
    (request,) = state.requests.order
    return request.cached_tokens == 0 and request.output_tokens == 48


def shared_prefix(state: TraceState) -> bool:
    first, *others = state.requests.order
    return first.cached_tokens == 0 and all(
        request.cached_tokens > request.prompt_tokens // 2 for request in others
    ) and len(others) == 4  # fmt: skip


def loaded(state: TraceState) -> bool:
    queues = [view.queue_ms or 0.0 for view in state.snapshot().requests]
    return len(queues) == 24 and max(queues) > 1_000 and max(_sizes(state)) >= 6


def long_prompt(state: TraceState) -> bool:
    return max(_prefills(state)) > 1_800 and all(
        len(request.passes) == 1 for request in state.requests.order
    )


def long_prompt_chunked(state: TraceState) -> bool:
    return max(_prefills(state)) <= 256 and len(state.requests.order[-1].passes) >= 7


def preemption(state: TraceState) -> bool:
    return any(request.preemptions for request in state.requests.order) and sum(
        engine.preempted for engine in state.snapshot().engines
    ) > 0  # fmt: skip


def hang_up(state: TraceState) -> bool:
    return [request.disconnected for request in state.requests.order] == [False, True, True, True]


SHOWS: dict[str, Callable[[TraceState], bool]] = {
    "cold": cold, "shared-prefix": shared_prefix, "loaded": loaded, "long-prompt": long_prompt,
    "long-prompt-chunked": long_prompt_chunked, "preemption": preemption, "hang-up": hang_up,
}  # fmt: skip
OTHERS = {"transformers-mixed", "h100-reference"}


def _prefills(state: TraceState) -> list[int]:
    return [tokens for source in state.sources.values() for tokens in source.batch.history.prefills]


def _sizes(state: TraceState) -> list[int]:
    return [size for source in state.sources.values() for size in source.batch.history.sizes]


@pytest.mark.parametrize(
    "path", [path for path in RECORDINGS if path.stem not in OTHERS], ids=lambda path: path.stem
)
def test_it_shows_what_the_table_says(path: Path) -> None:
    assert SHOWS[path.stem.partition("-")[2]](load(path))


def test_the_modelled_one_says_that_it_was_not_measured_and_has_the_reference_figures() -> None:
    state = load(FOLDER / "h100-reference.trace")
    (engine,) = state.snapshot().engines
    assert "modelled, not measured" in engine.title
    (request,) = state.snapshot().requests
    assert request.output_tokens == 300 and request.prompt_tokens == 2_000
    assert request.e2e_ms == pytest.approx(1_883, rel=0.01) and request.ttft_ms == pytest.approx(
        89, rel=0.01
    )


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_live_replay_and_reread_are_one_at_any_place(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and backwards, through snapshots and without: what a live viewer had at that
    instant."""
    monkeypatch.setattr("tracer.replay.cursor.NEAR_NS", 0)
    with TraceFile(path) as trace:
        snapshots = SnapshotFile(trace, tmp_path / "snapshots")
        fold_file(snapshots, apart_s=0)
        snapshots.refresh()
        assert snapshots.complete
        pick = random.Random(path.stem)
        places = [trace.begin, *(pick.randint(trace.begin, trace.end) for _ in range(PLACES))]
        cursor = Cursor(trace)
        expected: dict[int, str] = {}
        for t in sorted(places):
            assert cursor.advance(t)
            expected[t] = cursor.state.digest()
        jumping = Cursor(trace, snapshots)
        for t in (*sorted(places, reverse=True), *places):
            jumping.jump(t)
            assert jumping.advance(t)
            assert jumping.state.digest() == expected[t]
        assert jumping.reseated > len(places) // 2
        live = TraceState()
        for delivery in trace.deliveries():
            live.feed(delivery)
        jumping.jump(trace.end)
        assert jumping.advance(trace.end) and jumping.state.digest() == live.digest()

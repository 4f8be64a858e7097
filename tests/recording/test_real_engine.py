"""A real engine under real traffic, recorded through a socket and a bus: the file tells what a live
viewer saw."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import fold
from tracer.recording import event_columns
from tracer.recording.flight import FlightRecorder
from tracer.recording.trace_file import TraceFile
from tracer.recording.triggers import parse
from tracer.replay.cursor import load
from tracer.replay.folding import fold as fold_file
from tracer.replay.player import Player
from tracer.replay.snapshot_file import SnapshotFile
from tracer.state.trace_state import TraceState
from tracer.transport.bus import Bus
from tracer.transport.sources import DirectorySource

PATIENCE_S = 240.0


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A socket folder with a path that is short enough."""
    with tempfile.TemporaryDirectory(prefix="tracer-") as name:
        yield Path(name)


def start(model: Path, sockets: Path, record: Path) -> subprocess.Popen[bytes]:
    """The demonstration, which records itself too."""
    env = {**os.environ, "TRACER_SOCKET_DIR": str(sockets), "TRACER_RECORD": str(record)}
    options = ["--headless", "--seconds", "14", "--rate", "2", "--model", str(model)]
    command = [sys.executable, "-m", "tracer", "demo", *options]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def folded(deliveries: AsyncIterator[Delivery], state: TraceState) -> None:
    async for delivery in deliveries:
        fold([delivery], state)


async def run_folder(sockets: Path) -> Path:
    """The folder that the demonstration's run makes for its processes."""
    while not (found := [path for path in sockets.glob("run-*") if path.is_dir()]):
        await asyncio.sleep(0.05)
    return found[0]


@pytest.mark.slow
async def test_a_recording_of_a_real_engine_is_what_was_seen_live(
    model_dir: Path, sockets: Path, tmp_path: Path
) -> None:
    path, itself = tmp_path / "live.trace", tmp_path / "itself"
    itself.mkdir()
    process = start(model_dir, sockets, itself)
    state = TraceState()
    try:
        async with asyncio.timeout(PATIENCE_S):
            bus = Bus()
            bus.add(DirectorySource(await run_folder(sockets), poll_s=0.05))
            recorder = Recorder(path, with_text=True, encode=event_columns.encode)
            flight = FlightRecorder(tmp_path / "flight.trace", 1.0, [parse("live>0")], after_s=2)
            tasks = [
                asyncio.create_task(recorder.run(bus.subscribe())),
                asyncio.create_task(flight.run(bus.subscribe())),
                asyncio.create_task(folded(bus.subscribe(), state)),
            ]
            running = asyncio.create_task(bus.run())
            while process.poll() is None:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            await bus.aclose()
            await asyncio.gather(running, *tasks)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    assert not recorder.error and recorder.missed == 0
    live = state.snapshot()
    assert live.total >= 5 and live.losses.events == 0 and state.unknown == 0
    assert load(path).digest() == state.digest()
    with TraceFile(path) as trace:
        assert trace.problems == []
        snapshots = SnapshotFile(trace, tmp_path / "snapshots")
        fold_file(snapshots, apart_s=0)
        snapshots.refresh()
        assert snapshots.complete and len(snapshots.entries) > 5
        before = TraceState()
        for number, block in enumerate(trace.blocks):
            fold(trace.read(block), before)
            place = snapshots.before(block.last)
            assert place is not None
            if place.block == number + 1:
                assert place.state.digest() == before.digest()
    player = Player.open(path, now=lambda: 0, paused=True)
    player.seek_fraction(1.0)
    while player.status.startswith("seeking"):
        player.tick()
    assert player.state.digest() == state.digest()
    player.close()
    (own,) = itself.iterdir()
    told = {view.id for view in load(own).snapshot().requests}
    # The engine's process was killed: what it wrote itself lacks the last second.
    assert {view.id for view in live.requests if view.received < live.now - 2 * NS_PER_S} <= told
    assert load(own).detail(live.requests[0].id).prompt_text is None  # type: ignore[union-attr]
    (first, *_) = flight.files
    with TraceFile(first) as trace:
        assert trace.problems == [] and trace.marks()[0].text.startswith("live ")

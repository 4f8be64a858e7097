"""Snapshots in the user's cache: right or not used, private, bounded, and never needed."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.frames import SequenceCheck
from engine_hooks.protocol.recorder import Recorder
from tests.effort import examples
from tests.recording.story import Clock, S, fold, record, some
from tracer.recording import event_columns
from tracer.recording.trace_file import TraceFile
from tracer.replay import folding, snapshot_file
from tracer.replay.cursor import load
from tracer.replay.folding import Folding
from tracer.replay.folding import fold as fold_file
from tracer.replay.snapshot_file import SnapshotFile, SnapshotWriter
from tracer.state.trace_state import TraceState

DELIVERIES = some(5, requests=12, split=True, blocks=60)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACER_CACHE", str(folder))
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> TraceFile:
    path = tmp_path / "a.trace"
    record(path, DELIVERIES, with_text=False, block_ns=S // 25)
    return TraceFile(path)


def folded(trace: TraceFile) -> SnapshotFile:
    snapshots = SnapshotFile.of(trace)
    assert snapshots is not None
    fold_file(snapshots, apart_s=0)
    snapshots.refresh()
    return snapshots


def digests_of(trace: TraceFile) -> list[str]:
    """Digests of the fold before the first block and after each."""
    state, checks = TraceState(), dict[str, SequenceCheck]()
    found = [state.digest()]
    for block in trace.blocks:
        fold(trace.checked(block, checks), state)
        found.append(state.digest())
    return found


def check(trace: TraceFile, snapshots: SnapshotFile, digests: list[str] | None = None) -> int:
    """Check that each snapshot that can be read is what was folded; return how many there are."""
    digests = digests_of(trace) if digests is None else digests
    found = set()
    for block in trace.blocks:
        place = snapshots.before(block.last)
        if place is not None:
            assert place.state.digest() == digests[place.block]
            found.add(place.block)
    return len(found)


def test_a_snapshot_after_each_block_is_what_was_folded(trace: TraceFile) -> None:
    snapshots = folded(trace)
    assert snapshots.complete and len(snapshots.entries) == len(trace.blocks)
    assert check(trace, snapshots) > len(trace.blocks) // 2, "some blocks end at one instant"
    again = SnapshotFile.of(trace)
    assert again is not None and again.complete and again.entries == snapshots.entries


def test_nobody_else_may_read_them(trace: TraceFile, cache: Path) -> None:
    path = folded(trace).path
    assert path.parent == cache / "snapshots"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["open to others", "a link", "a file", "not writable"])
def test_a_folder_that_is_not_ours_alone_is_not_used(
    trace: TraceFile, cache: Path, tmp_path: Path, what: str
) -> None:
    cache.mkdir()
    folder = cache / "snapshots"
    match what:
        case "open to others":
            folder.mkdir()
            folder.chmod(0o770)
        case "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "a file":
            folder.touch()
        case "not writable":
            folder.write_bytes(b"")
            folder.chmod(0o400)
    snapshots = folded(trace)
    assert folder not in snapshots.path.parents
    assert stat.S_IMODE(snapshots.path.parent.stat().st_mode) == 0o700
    assert check(trace, snapshots) > 5
    snapshots.close()
    assert not snapshots.path.parent.exists()


def test_a_file_of_snapshots_of_another_user_is_not_read(
    trace: TraceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folded(trace).path
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert SnapshotFile(trace, path).entries == []


def test_what_people_wrote_does_not_stay_in_the_cache(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text.trace"
    record(path, DELIVERIES, with_text=True)
    with TraceFile(path) as trace:
        snapshots = folded(trace)
        assert check(trace, snapshots) and cache not in snapshots.path.parents
        snapshots.close()
    assert not snapshots.path.parent.exists() and not cache.exists()


def test_other_code_makes_its_own(trace: TraceFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folded(trace).path
    monkeypatch.setattr(snapshot_file, "code_version", lambda: b"another version")
    other = SnapshotFile.of(trace)
    assert other is not None and other.path != path and other.entries == []


def test_those_of_another_trace_with_the_same_start_are_not_used(
    trace: TraceFile, tmp_path: Path
) -> None:
    """A recording that was cut and goes on otherwise: they are good up to there."""
    folded(trace)
    keep = len(trace.blocks) // 2
    data = bytearray(trace.path.read_bytes())
    del data[trace.blocks[keep].offset : trace.blocks[keep + 1].offset]
    other = tmp_path / "other.trace"
    other.write_bytes(data)
    with TraceFile(other) as changed:
        snapshots = SnapshotFile.of(changed)
        assert snapshots is not None
        assert 0 < len(snapshots.entries) <= keep + 1
        assert check(changed, snapshots) > 3


def test_a_recording_that_grows_keeps_its_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "live.trace"
    recorder = Recorder(path, encode=event_columns.encode, now=Clock())
    half = len(DELIVERIES) // 2
    for delivery in DELIVERIES[:half]:
        recorder.write(delivery)
        recorder.flush()
    with TraceFile(path) as growing:
        first = folded(growing)
        count = len(first.entries)
        assert first.complete and count > 3
    for delivery in DELIVERIES[half:]:
        recorder.write(delivery)
        recorder.flush()
    recorder.close()
    with TraceFile(path) as whole:
        snapshots = SnapshotFile.of(whole)
        assert snapshots is not None and not snapshots.complete
        assert snapshots.path == first.path and len(snapshots.entries) == count
        assert folded(whole).complete
        snapshots.refresh()
        assert len(snapshots.entries) == len(whole.blocks)
        assert check(whole, snapshots) > 5


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 1 << 32))
def test_damage_is_found_or_harmless(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    pick = random.Random(seed)
    path, data, digests = _kept(tmp_path_factory)
    with TraceFile(path) as trace:
        broken = bytearray(data)
        for _ in range(pick.choice((1, 3, 20))):
            broken[pick.randrange(len(broken))] = pick.randrange(256)
        if pick.random() < 0.3:
            del broken[pick.randrange(len(broken)) :]
        file = path.with_suffix(".damaged")
        file.write_bytes(broken)
        snapshots = SnapshotFile(trace, file)
        check(trace, snapshots, digests)
        fold_file(snapshots, apart_s=0)
        found = SnapshotFile(trace, file)
        assert found.entries == sorted(found.entries, key=lambda entry: entry.block)
        check(trace, found, digests)


_made: list[tuple[Path, bytes, list[str]]] = []


def _kept(factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[str]]:
    if not _made:
        path = factory.mktemp("kept") / "a.trace"
        record(path, DELIVERIES, with_text=False, block_ns=S // 5)
        with TraceFile(path) as trace:
            _made.append((path, folded(trace).path.read_bytes(), digests_of(trace)))
    return _made[0]


def test_two_that_fold_at_once_do_not_disturb_each_other(trace: TraceFile) -> None:
    snapshots = SnapshotFile.of(trace)
    assert snapshots is not None
    with SnapshotWriter(snapshots), pytest.raises(BlockingIOError):
        fold_file(snapshots)
    fold_file(snapshots, apart_s=0)
    snapshots.refresh()
    assert check(trace, snapshots) > 5


def test_a_full_disk_leaves_what_was_written(
    trace: TraceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(file: int, data: bytes) -> int:
        if os.fstat(file).st_size > 60_000:
            real(file, bytes(data)[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(snapshot_file.os, "write", write)
    snapshots = SnapshotFile.of(trace)
    assert snapshots is not None
    with pytest.raises(OSError, match="No space left"):
        fold_file(snapshots, apart_s=0)
    snapshots.refresh()
    assert 0 < len(snapshots.entries) < len(trace.blocks)
    assert check(trace, snapshots)


def test_the_cache_is_bounded_and_the_oldest_go(
    trace: TraceFile, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "snapshots"
    folder.mkdir(parents=True, mode=0o700)
    for age in range(5):
        path = folder / f"{age}.snapshots"
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - age * 100 - 50,) * 2)
    own = folded(trace).path
    size = own.stat().st_size
    monkeypatch.setattr(snapshot_file, "ROOM", size + 2_500)
    fold_file(SnapshotFile(trace, own))
    left = sorted(path.name for path in folder.iterdir() if path != own)
    assert left == ["0.snapshots", "1.snapshots"] and own.exists()


def test_a_viewer_folds_in_another_process_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.trace"
    record(path, some(6, requests=300, split=True, output=40), with_text=False)
    with TraceFile(path) as trace:
        assert trace.events > folding.FEW
        snapshots = SnapshotFile.of(trace)
        assert snapshots is not None
        work = Folding(snapshots)
        assert work.going
        work.wait()
        assert not work.going
        snapshots.refresh()
        assert snapshots.complete
        place = snapshots.before(trace.end)
        assert place is not None and place.state.digest() == load(path, snapshots=False).digest()
        assert not Folding(snapshots).going
        snapshots.path.unlink()
        other = SnapshotFile.of(trace)
        assert other is not None
        work = Folding(other)
        work.close()
        assert not work.going


FOLLOWED = """
import sys, time
from pathlib import Path
from engine_hooks.protocol.frames import SequenceCheck
from engine_hooks.protocol.recorder import Recorder
from tests.recording.story import some
from tracer.recording import event_columns
from tracer.replay.folding import start_following

path = Path(sys.argv[1])
recorder = Recorder(path, encode=event_columns.encode)
start_following(path)
for delivery in some(6, requests=300, split=True, output=40):
    recorder.write(delivery)
recorder.close()
"""


def test_a_recording_is_folded_when_its_viewer_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "live.trace"
    subprocess.run([sys.executable, "-c", FOLLOWED, str(path)], check=True, timeout=120)
    with TraceFile(path) as trace:
        deadline = time.monotonic() + 60
        complete = False
        while not complete and time.monotonic() < deadline:
            time.sleep(0.1)
            snapshots = SnapshotFile.of(trace)
            complete = snapshots is not None and snapshots.complete
        assert snapshots is not None and complete
        place = snapshots.before(trace.end)
        assert place is not None
        assert place.state.digest() == fold(list(trace.deliveries())).digest()

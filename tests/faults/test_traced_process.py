"""What can go wrong with a traced process or around it: it goes on, or its end is told, and what is
lost is counted."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import HookFault, Received, Sent
from engine_hooks.protocol.sockets import scan
from tests.cli.commands import Commands
from tests.effort import thinned
from tests.transport.processes import Emitter, Wire, emitter, eventually
from tracer.recording.trace_file import TraceFile, TraceFileError
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase
from tracer.transport.bus import Bus
from tracer.transport.follow import follow
from tracer.transport.sources import LiveSource, discover

MIB = 1024 * 1024


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a path short enough for a unix address."""
    with tempfile.TemporaryDirectory(prefix="tracer-test-") as name:
        yield Path(name)


def attach_at_once(process: Emitter, viewers: int) -> None:
    """So many viewers, each until it has been told everything, that all leave then."""
    wires = [Wire(process.path) for _ in range(viewers)]
    for wire in wires:
        wire.read(lambda wire=wire: wire.first_seq >= 0)  # type: ignore[misc]
    for wire in wires:
        wire.connection.close()


def sents(path: Path) -> int:
    """Events of one kind in a file."""
    with contextlib.suppress(TraceFileError), TraceFile(path) as trace:
        return sum(type(event) is Sent for one in trace.deliveries() for event in one.events)
    return 0


def fill_up(pid: int, path: Path) -> None:
    """The disk takes little more: no file of that process may grow by more than a few bytes beyond
    this one."""
    size = path.stat().st_size + 300
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
def test_a_thousand_attaches_leave_nothing_behind(directory: Path) -> None:
    with emitter(directory) as process:
        for key in range(20):
            process.ask("live", key)
        process.ask("text", 20, 2_000)
        for _ in range(10):
            attach_at_once(process, 10)
        eventually(lambda: process.ask("status")["viewers"] == 0)
        before = process.ask("status")
        for _ in range(100):
            attach_at_once(process, 10)
        eventually(lambda: process.ask("status")["viewers"] == 0)
        after = process.ask("status")
        assert (after["fds"], after["threads"], after["error"]) == (
            before["fds"],
            before["threads"],
            "",
        )
        assert after["rss"] - before["rss"] < 2 * MIB
        assert scan(directory) == [process.path]


@pytest.mark.parametrize(
    ("how", "code"),
    thinned(
        [("segfault", -signal.SIGSEGV), ("abort", -signal.SIGABRT), ("exit", 3), ("exception", 1)],
        2,
    ),
)
async def test_an_engine_that_crashes_in_the_middle_of_tracing_is_told_to_have_ended(
    directory: Path, how: str, code: int
) -> None:
    """As a C extension, an assertion of a library, or an error of its own ends it. Its frames are
    whole up to there."""
    process = await asyncio.to_thread(
        Emitter,
        directory,
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.dup2(os.open(os.devnull, "
        "os.O_WRONLY), 2)",
    )
    source = LiveSource(process.path)
    state = TraceState()
    try:
        assert process.process.stdin is not None
        process.process.stdin.write(f'["crash", "{how}", 0.4]\n')
        process.process.stdin.flush()
        bus = Bus()
        bus.add(source)
        await asyncio.wait_for(follow(bus, state), 60)
        assert await asyncio.to_thread(process.process.wait, 60) == code
    finally:
        process.close()
    snapshot = state.snapshot(now=now() + 60 * NS_PER_S)
    [engine] = snapshot.engines
    assert not engine.alive
    assert engine.reason.startswith(f"process {process.pid} ended")
    assert snapshot.live == 0
    assert {view.phase for view in snapshot.requests} == {Phase.LOST} and len(
        snapshot.requests
    ) == 2
    assert snapshot.losses.unknown == 0 and snapshot.losses.events == source.missing
    discover(directory)
    assert scan(directory) == [], "a socket of the dead is swept away by whoever looks"


def test_forks_under_load_cost_the_parent_no_event(directory: Path) -> None:
    with emitter(directory) as process:
        wire = Wire(process.path)
        wire.read(lambda: wire.first_seq >= 0)
        with wire.following():
            assert process.ask("forks", 25) == [7] * 25
            final = process.ask("finish")
        assert wire.next_seq == final["emitted"]
        assert len(wire.events) + wire.missing == wire.next_seq - wire.first_seq
        assert wire.missing == final["dropped"] == 0
        assert final["error"] == ""
        assert discover(directory) == scan(directory) == [], "children leave nothing in the way"


@pytest.mark.parametrize("shift_s", [-7_200, 7_200, 5 * 365 * 86_400])
async def test_a_step_of_the_wall_clock_moves_no_event(directory: Path, shift_s: int) -> None:
    """The clock of the machine was set between the engine's start and the viewer's: theirs differ
    by so much. Events are stamped with the monotonic clock, which nobody sets."""
    step = f"import time\nreal = time.time_ns\ntime.time_ns = lambda: real() + {shift_s * NS_PER_S}"
    process = await asyncio.to_thread(Emitter, directory, step)
    state = TraceState()
    try:
        before = now()
        await asyncio.to_thread(process.ask, "live", 1)
        bus = Bus()
        bus.add(LiveSource(process.path))
        following = asyncio.create_task(follow(bus, state))
        while not state.request_ids():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(process.ask, "end", 1)
        while state.snapshot().live:
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    finally:
        await asyncio.to_thread(process.close)
    snapshot = state.snapshot(now=now())
    [view] = snapshot.requests
    assert before <= view.received <= (view.closed or 0) <= now()
    assert (view.phase, view.incomplete, snapshot.losses.events) == (Phase.DONE, False, 0)
    assert view.e2e_ms is not None and 0 <= view.e2e_ms < 60_000


@pytest.mark.slow
def test_an_engine_that_records_itself_onto_a_full_disk_goes_on_and_says_so(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_RECORD", str(tmp_path / "engine.trace"))
    with emitter(directory) as process:
        path = tmp_path / f"engine-{process.pid}.trace"
        wire = Wire(process.path)
        wire.read(lambda: wire.first_seq >= 0)
        process.ask("sent", 100)
        eventually(lambda: path.exists() and sents(path) == 100)
        fill_up(process.pid, path)

        def told() -> list[HookFault]:
            return [event for event in wire.events if isinstance(event, HookFault)]

        def more() -> bool:
            process.ask("sent", 2_000)
            return bool(told())

        wire.read(more)
        [fault] = told()
        assert (fault.hook, fault.disabled) == (
            "recording",
            True,
        ) and "file too large" in fault.message
        process.ask("live", 7)
        wire.read(
            lambda: any(isinstance(event, Received) and event.key == 7 for event in wire.events)
        )
        wire.connection.close()
        assert process.ask("finish")["error"] == ""
    assert sents(path) >= 100


@pytest.mark.slow
def test_record_onto_a_full_disk_ends_with_a_sentence_and_a_file_that_opens(
    directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.trace"
    with emitter(directory) as process:
        command = [sys.executable, "-m", "tracer", "record", str(process.pid), "-o", str(path)]
        env = Commands(directory, tmp_path).environment()
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as recorder:
            eventually(lambda: process.ask("sent", 10) or (path.exists() and sents(path)))
            fill_up(recorder.pid, path)
            eventually(lambda: process.ask("sent", 2_000) or recorder.poll() is not None)
            assert recorder.stderr is not None
            said = recorder.stderr.read()
        assert recorder.returncode == 2
        assert process.ask("status")["error"] == "", "it is not the engine's disk"
    assert "Traceback" not in said
    assert f"recording to {path} stopped: file too large" in said
    assert "events were left out" in said
    assert sents(path) > 0


@pytest.mark.slow
def test_a_recorder_that_is_out_of_descriptors_says_so_in_one_line(
    directory: Path, tmp_path: Path
) -> None:
    """As many as Python itself needs to start, and a few more."""
    with emitter(directory) as process:
        for room in (6, 9):
            code = (
                f"import os, resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, ({room}, "
                f"{room}))\n"
                "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
            )
            path = tmp_path / f"{room}.trace"
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    code,
                    "-m",
                    "tracer",
                    "record",
                    str(process.pid),
                    "-o",
                    str(path),
                    "--seconds",
                    "1",
                ],
                env=Commands(directory, tmp_path).environment(),
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            assert "Traceback" not in done.stderr, done.stderr
            assert (
                done.returncode == 0 or "no file descriptor is left: raise the limit" in done.stderr
            )
            assert done.returncode in (0, 2), done.stderr
        assert process.ask("status")["error"] == ""

"""The publisher: real processes on a real socket; nothing that a viewer does reaches the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import (
    Closed,
    Event,
    Finished,
    Heartbeat,
    Output,
    Queued,
    Received,
    Sent,
)
from engine_hooks.protocol.sockets import connect, scan
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import MAX_VIEWERS, Publisher
from engine_hooks.publish.viewer_queue import PATIENCE, ROOM
from tracer.transport.sources import discover

from .processes import Emitter, Wire, emitter, eventually, viewer_process

pytestmark = pytest.mark.slow


def attach(process: Emitter) -> Wire:
    """A viewer that has the header and the snapshot."""
    wire = Wire(process.path)
    wire.read(lambda: wire.first_seq >= 0)
    return wire


def assert_all_accounted(wire: Wire, emitted: int) -> None:
    """Every event from the snapshot on has come or is known to be missing."""
    assert wire.first_seq + len(wire.events) + wire.missing == wire.next_seq == emitted


def last_line(viewer: subprocess.Popen[str]) -> dict[str, int | str]:
    """The last thing a viewer process said before it ended."""
    output, _ = viewer.communicate(timeout=30)
    return dict(json.loads(output.splitlines()[-1]))


def test_a_viewer_gets_header_snapshot_and_every_event(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        assert wire.header is not None
        assert (wire.header.source, wire.header.pid, wire.header.role) == (
            process.source,
            process.pid,
            "engine",
        )
        process.ask("sent", 5000)
        process.ask("live", 3)
        wire.read(lambda: wire.next_seq >= 5000)
        final = process.ask("finish")
        wire.read_to_end()
    assert wire.missing == 0
    assert_all_accounted(wire, final["emitted"])
    assert [event.chunks for event in wire.events if isinstance(event, Sent)] == list(range(5000))
    assert {Received, Queued} <= {type(event) for event in wire.events}
    assert scan(directory) == []


def test_a_late_viewer_is_told_of_live_requests_and_only_those(directory: Path) -> None:
    with emitter(directory) as process:
        for key in (1, 2):
            process.ask("live", key)
        process.ask("text", 3, 10)
        process.ask("end", 2)
        wire = attach(process)
        told: list[Event] = wire.snapshot
        assert [event.key for event in told if isinstance(event, Queued)] == [1, 2]
        assert [event.key for event in told if isinstance(event, (Finished, Closed))] == [2, 2]
        assert [event.offset for event in told if isinstance(event, Output)] == [0, 10, 20]
        process.ask("end", 1)
        wire.read(lambda: any(isinstance(event, Closed) for event in wire.events))
        wire.connection.close()


def test_viewers_come_and_go_and_see_the_same(directory: Path) -> None:
    with emitter(directory) as process:
        first = attach(process)
        process.ask("sent", 1000)
        second = attach(process)
        passing = attach(process)
        passing.connection.close()
        process.ask("sent", 1000)
        final = process.ask("finish")
        first.read_to_end()
        second.read_to_end()
    assert_all_accounted(first, final["emitted"])
    assert_all_accounted(second, final["emitted"])
    assert second.first_seq >= 1000
    assert first.events[-len(second.events) :] == second.events


def test_a_flood_is_dropped_oldest_first_and_counted(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        process.ask("threads", 4, 40_000)
        emitted = process.ask("status")["emitted"]
        wire.read(lambda: wire.next_seq >= emitted)
        final = process.ask("finish")
        wire.read_to_end()
    assert final["emitted"] >= 160_000
    assert_all_accounted(wire, final["emitted"])
    assert wire.missing == final["dropped"]


def test_killing_a_viewer_costs_the_engine_nothing(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        with wire.following(), viewer_process(process.path) as viewer:
            assert viewer.stdout is not None and viewer.stdout.readline()
            assert process.ask("status")["viewers"] == 2
            process.ask("text", 200, 10_000)
            viewer.send_signal(signal.SIGKILL)
            process.ask("sent", 1000)
            eventually(lambda: process.ask("status")["viewers"] == 1)
            process.ask("sent", 1000)
            final = process.ask("finish")
    assert_all_accounted(wire, final["emitted"])
    assert wire.missing == 0


@pytest.mark.slow
def test_a_stopped_viewer_loses_the_oldest_and_the_engine_neither_waits_nor_grows(
    directory: Path,
) -> None:
    with emitter(directory) as process, viewer_process(process.path) as viewer:
        assert viewer.stdout is not None and viewer.stdout.readline()
        quick = attach(process)
        with quick.following():
            before = process.ask("status")
            viewer.send_signal(signal.SIGSTOP)
            for _ in range(40):  # 40 MB, five times the room
                process.ask("text", 100, 10_000)
                time.sleep(0.06)
            stopped = process.ask("status")
            viewer.send_signal(signal.SIGCONT)
            eventually(
                lambda: (
                    process.ask("steps", 20, 0.01) is None
                    and _caught_up(viewer, stopped["emitted"])
                )
            )
            final = process.ask("finish")
            last = last_line(viewer)
    assert_all_accounted(quick, final["emitted"])
    assert quick.missing == 0
    assert isinstance(last["missing"], int) and last["missing"] > 1000
    in_snapshot = 1  # the heartbeat that it was told of when it attached
    assert last["received"] + last["missing"] in (final["emitted"], final["emitted"] - in_snapshot)  # type: ignore[operator]
    assert stopped["rss"] - before["rss"] < ROOM + 24 * 2**20


def _caught_up(viewer: subprocess.Popen[str], emitted: int) -> bool:
    assert viewer.stdout is not None
    line = json.loads(viewer.stdout.readline())
    return bool(line["received"] + line["missing"] >= emitted - 1)


def test_a_viewer_that_never_reads_does_not_hold_up_the_end(directory: Path) -> None:
    with emitter(directory) as process:
        idle = Wire(process.path)
        quick = attach(process)
        with quick.following():
            process.ask("text", 1000, 10_000)
            final = process.ask("finish")
        assert_all_accounted(quick, final["emitted"])
        idle.read_to_end()
        assert idle.next_seq <= final["emitted"]


def test_a_viewer_that_talks_is_hung_up_on(directory: Path) -> None:
    with emitter(directory) as process, connect(process.path) as connection:
        connection.setblocking(True)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(100_000):
                connection.sendall(b"GET / HTTP/1.1\r\n" * (PATIENCE // 1024))
        eventually(lambda: process.ask("status")["viewers"] == 0)


def test_viewers_are_limited(directory: Path) -> None:
    with emitter(directory) as process:
        crowd = [attach(process) for _ in range(MAX_VIEWERS)]
        surplus = Wire(process.path)
        surplus.read_to_end()
        assert surplus.header is None
        assert process.ask("status")["viewers"] == MAX_VIEWERS
        for wire in crowd:
            wire.connection.close()
        eventually(lambda: process.ask("status")["viewers"] == 0)
        attach(process).connection.close()


def test_a_heartbeat_comes_without_anything_else(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        wire.read(lambda: any(isinstance(event, Heartbeat) for event in wire.events))
        beats = [event for event in wire.snapshot + wire.events if isinstance(event, Heartbeat)]
        assert 0.5e9 < beats[1].t - beats[0].t < 20e9
        assert 0 < beats[0].cpu_ns <= beats[1].cpu_ns and beats[0].rss > 2**20
        assert beats[0].step_age == -1
        process.ask("steps", 1, 0)
        wire.read(lambda: isinstance(wire.events[-1], Heartbeat) and wire.events[-1].step_age >= 0)
        wire.connection.close()


def test_a_late_role_reaches_viewers_old_and_new(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        process.ask("role", "core", "the core")
        wire.read(lambda: wire.headers == 2)
        assert wire.header is not None and (wire.header.role, wire.header.title) == (
            "core",
            "the core",
        )
        assert wire.header.source == process.source
        late = attach(process)
        assert late.header is not None and late.header.role == "core"
        late.connection.close()
        wire.connection.close()


def test_a_role_that_comes_before_the_snapshot_reaches_the_viewer(directory: Path) -> None:
    """A viewer that connected a moment before the role was known kept the old one for ever."""
    publisher = Publisher(EventBuffer(), role="api", title="t", directory=directory)
    publisher.start()
    assert publisher.path is not None
    wire = Wire(publisher.path)
    eventually(lambda: publisher.viewers == 1)
    publisher.set_role("core", "the core")
    wire.read(lambda: wire.header is not None and wire.header.role == "core")
    publisher.stop()
    wire.read_to_end()


def test_a_forked_child_speaks_for_itself(directory: Path) -> None:
    with emitter(directory) as process:
        parent = attach(process)
        process.ask("sent", 100)
        child_pid = process.ask("fork", 50, 60)
        try:
            [path] = eventually(lambda: [path for path in scan(directory) if path != process.path])
            child = Wire(path)
            child.read(lambda: child.first_seq >= 0)
            assert child.header is not None and parent.header is not None
            assert child.header.pid == child_pid and child.header.parent == process.pid
            assert child.header.source != parent.header.source
            assert 50 <= child.first_seq + len(child.events) <= 53
            final = process.ask("finish")
            parent.read_to_end()  # ends although the child lives: it holds nothing of its parent's
            assert_all_accounted(parent, final["emitted"])
            assert sum(isinstance(event, Sent) for event in parent.events) == 100
            assert path in scan(directory)
        finally:
            os.kill(child_pid, signal.SIGKILL)
        child.read_to_end()


def test_a_forked_child_that_emits_nothing_costs_nothing(directory: Path) -> None:
    with emitter(directory) as process:
        child_pid = process.ask("fork", 0, 60)
        try:
            time.sleep(0.2)
            assert len(list(Path(f"/proc/{child_pid}/task").iterdir())) == 1
            assert scan(directory) == [process.path]
        finally:
            os.kill(child_pid, signal.SIGKILL)


def test_a_worker_of_multiprocessing_hands_over_its_last_events(directory: Path) -> None:
    with emitter(directory) as process:
        assert process.process.stdin is not None
        process.process.stdin.write(json.dumps(["multiprocessing", 300]) + "\n")
        process.process.stdin.flush()
        [path] = eventually(lambda: [path for path in scan(directory) if path != process.path])
        wire = Wire(path)
        wire.read_to_end()
        assert sum(isinstance(event, Queued) for event in wire.snapshot + wire.events) == 300
        assert process._answer() is None
        assert scan(directory) == [process.path]


@pytest.mark.slow
def test_a_daemon_that_closes_all_descriptors_gets_a_new_socket_and_clean_files(
    directory: Path,
) -> None:
    scratch = directory / "files"
    scratch.mkdir()
    with emitter(directory) as process:
        parents = attach(process)
        child_pid = process.ask("daemon", str(scratch), 60)
        try:
            eventually(lambda: len(list(scratch.iterdir())) == 20)
            [found] = eventually(
                lambda: [one for one in discover(directory) if one.pid == child_pid and one.header]
            )
            wire = Wire(found.path)
            wire.read(lambda: len(wire.events) > 100)
            wire.connection.close()
        finally:
            os.kill(child_pid, signal.SIGKILL)
        assert len(list(scratch.iterdir())) == 20
        assert {file.stat().st_size for file in scratch.iterdir()} == {0}
        assert process.ask("status")["viewers"] == 1
        process.ask("sent", 100)
        final = process.ask("finish")
        parents.read_to_end()
        assert_all_accounted(parents, final["emitted"])
        assert sum(isinstance(event, Sent) for event in parents.events) == 100


def test_a_socket_that_a_cleaner_removed_comes_back(directory: Path) -> None:
    with emitter(directory) as process:
        process.path.unlink()
        [path] = eventually(lambda: scan(directory))
        wire = Wire(path)
        wire.read(lambda: wire.first_seq >= 0)
        assert wire.header is not None and wire.header.source == process.source
        wire.connection.close()


def test_running_out_of_descriptors_is_survived(directory: Path) -> None:
    with emitter(directory) as process:
        process.ask("exhaust")
        waiting = Wire(process.path)
        used = process.ask("status")["cpu"]
        eventually(lambda: process.ask("status")["error"])
        assert "OSError" in process.ask("status")["error"]
        time.sleep(0.5)
        assert process.ask("status")["cpu"] - used < 0.3  # it does not spin at the door
        process.ask("relax")
        waiting.read(lambda: waiting.first_seq >= 0)
        waiting.connection.close()


def test_a_killed_engine_is_noticed_and_its_socket_removed_when_listing(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        process.process.kill()
        wire.read_to_end()
        process.process.wait()
        assert scan(directory) == [process.path]
        assert discover(directory) == []
        assert scan(directory) == []


def test_an_engine_that_exits_sends_its_last_events(directory: Path) -> None:
    with emitter(directory) as process:
        wire = attach(process)
        process.ask("sent", 100)
        process.close()
        wire.read_to_end()
        assert process.process.returncode == 0
    assert sum(isinstance(event, Sent) for event in wire.events) == 100
    assert scan(directory) == []


def test_a_directory_that_is_not_private_is_an_error_in_words_and_nothing_more(
    directory: Path,
) -> None:
    directory.chmod(0o777)
    publisher = Publisher(EventBuffer(), role="engine", title="t", directory=directory)
    publisher.start()
    assert publisher.path is None
    assert "chmod 700" in publisher.error
    publisher.stop()
    directory.chmod(0o700)


def test_a_consumer_gets_every_drain_and_is_let_go_when_it_fails(directory: Path) -> None:
    buffer = EventBuffer()
    publisher = Publisher(buffer, role="engine", title="t", directory=directory)
    taken: list[tuple[int, int]] = []

    def broken(_seq: int, _events: list[Event]) -> None:
        raise ValueError("broken consumer")

    publisher.add_consumer(broken)
    publisher.add_consumer(lambda seq, events: taken.append((seq, len(events))))
    publisher.start()
    for _ in range(100):
        buffer.emit(Sent(now(), 1, 0, 0))
    eventually(lambda: sum(count for _, count in taken) >= 101)
    assert "broken consumer" in publisher.error
    publisher.stop()
    expected = 0
    for seq, count in taken:
        assert seq == expected
        expected += count
    assert expected == buffer.emitted


def test_an_event_that_cannot_be_encoded_is_a_gap_and_the_rest_goes_on(directory: Path) -> None:
    buffer = EventBuffer()
    publisher = Publisher(buffer, role="engine", title="t", directory=directory)
    publisher.start()
    assert publisher.path is not None
    wire = Wire(publisher.path)
    wire.read(lambda: wire.first_seq >= 0)
    buffer.emit(Sent(now(), object(), 0, 0))  # type: ignore[arg-type]
    buffer.emit(Sent(now(), 1, 7, 0))
    wire.read(lambda: any(isinstance(event, Sent) for event in wire.events))
    publisher.stop()
    wire.read_to_end()
    assert wire.missing == 1
    assert_all_accounted(wire, buffer.emitted)


def test_start_and_stop_may_be_called_again(directory: Path) -> None:
    publisher = Publisher(EventBuffer(), role="engine", title="t", directory=directory)
    publisher.start()
    publisher.start()
    assert len(scan(directory)) == 1
    publisher.stop()
    publisher.stop()
    publisher.start()
    assert scan(directory) == []


def test_a_viewer_that_knocks_at_the_last_moment_hears_the_last_words(directory: Path) -> None:
    buffer = EventBuffer()
    publisher = Publisher(buffer, role="engine", title="t", directory=directory)
    publisher.start()
    assert publisher.path is not None
    buffer.emit_lifecycle(Queued(now(), 1, "r1"))
    wire = Wire(publisher.path)
    publisher.stop()
    wire.read_to_end()
    assert wire.header is not None
    assert sum(isinstance(event, Queued) for event in wire.snapshot + wire.events) == 1

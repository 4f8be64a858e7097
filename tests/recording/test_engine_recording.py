"""An engine that records itself, without any viewer, and is not troubled by it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol import zstd_frames
from engine_hooks.protocol.events import (
    Event,
    Gap,
    Heartbeat,
    HookFault,
    Output,
    Prompt,
    Received,
    Sent,
)
from engine_hooks.publish.engine_recording import EngineRecording, from_environment, path_of
from tests.recording.story import S
from tests.state.traces import header
from tests.transport.processes import Wire, emitter, eventually
from tracer.recording.trace_file import TraceFile, repair
from tracer.replay.cursor import load

pytestmark = pytest.mark.slow


@pytest.fixture
def directory() -> Iterator[Path]:
    """A socket folder with a path that is short enough."""
    with tempfile.TemporaryDirectory(prefix="tracer-") as name:
        yield Path(name)


def events_of(path: Path) -> list[Event]:
    with TraceFile(path) as trace:
        return [event for delivery in trace.deliveries() for event in delivery.events]


def test_an_engine_records_itself_with_no_viewer_there(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_RECORD", str(tmp_path / "engine.trace"))
    with emitter(directory) as engine:
        engine.ask("live", 1)
        engine.ask("sent", 500)
        engine.ask("end", 1)
        done = engine.ask("finish")
        pid = engine.pid
    path = tmp_path / f"engine-{pid}.trace"
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    with TraceFile(path) as trace:
        assert trace.problems == [] and not trace.with_text
        (head,) = trace.sources.values()
        assert (head.pid, head.title, head.source) == (pid, "test engine", done["source"])
    events = events_of(path)
    assert len(events) == done["emitted"] and done["dropped"] == 0
    assert sum(type(event) is Sent for event in events) == 500
    snapshot = load(path).snapshot()
    assert [view.id for view in snapshot.requests] == ["r1"] and snapshot.losses.events == 0


def test_what_was_recorded_a_second_ago_is_there_when_the_engine_is_killed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_RECORD", str(tmp_path))
    with emitter(directory) as engine:
        engine.ask("sent", 100)
        path = tmp_path / f"trace-{engine.pid}.trace"
        eventually(lambda: path.exists() and path.stat().st_size > 100)
        engine.process.kill()
        engine.process.wait()
    assert sum(type(event) is Sent for event in events_of(path)) == 100
    with TraceFile(path) as trace:
        assert trace.problems == [
            "was not closed by its writer: up to a second may be missing at its end"
        ]
    assert len(repair(path)) == 1 and repair(path) == []


def test_text_is_left_out_unless_asked_for(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for with_text in ("0", "1"):
        monkeypatch.setenv("TRACER_RECORD", str(tmp_path / f"{with_text}.trace"))
        monkeypatch.setenv("TRACER_RECORD_TEXT", with_text)
        with emitter(directory) as engine:
            engine.ask("text", 3, 100)
            engine.ask("finish")
            pid = engine.pid
        outputs = sum(
            type(event) is Output for event in events_of(tmp_path / f"{with_text}-{pid}.trace")
        )
        assert outputs == (3 if with_text == "1" else 0)


def test_each_process_of_a_fork_has_a_file_of_its_own(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_RECORD", str(tmp_path / "engine.trace"))
    with emitter(directory) as engine:
        engine.ask("sent", 10)
        own = tmp_path / f"engine-{engine.pid}.trace"
        eventually(own.exists)
        child = engine.ask("fork", 30, 2.5)
        other = tmp_path / f"engine-{child}.trace"
        eventually(lambda: other.exists() and other.stat().st_size > 100)
        engine.ask("sent", 5)
        engine.ask("finish")
    assert sum(type(event) is Sent for event in events_of(own)) == 15
    assert sum(type(event) is Sent for event in events_of(other)) == 30
    with TraceFile(own) as mine, TraceFile(other) as its:
        assert mine.problems == [] and mine.sources.keys().isdisjoint(its.sources or {"": None})
        assert {delivery.source for delivery in mine.deliveries()}.isdisjoint(
            d.source for d in its.deliveries()
        )


def test_a_daemon_that_closes_every_file_writes_into_no_other_one(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TRACER_RECORD", str(tmp_path / "engine.trace"))
    with emitter(directory) as engine:
        child = engine.ask("daemon", str(scratch), 1.5)
        eventually(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))
        engine.ask("finish")
    assert [path.read_bytes() for path in scratch.iterdir()] == [b""] * 20


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_recording_that_cannot_begin_is_told_to_viewers_and_costs_nothing_else(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_RECORD", str(tmp_path / "missing" / "engine.trace"))
    with emitter(directory) as engine:
        engine.ask("sent", 10)
        viewer = Wire(engine.path)
        viewer.read(
            lambda: any(type(event) is HookFault for event in viewer.snapshot + viewer.events)
        )
        (fault,) = [event for event in viewer.snapshot + viewer.events if type(event) is HookFault]
        assert fault.hook == "recording" and fault.disabled
        assert (
            fault.message.startswith("cannot record to ")
            and "no such file or directory" in fault.message
        )
        engine.ask("sent", 7)
        viewer.read(lambda: sum(type(event) is Sent for event in viewer.events) >= 7)
        viewer.connection.close()
        assert list(tmp_path.iterdir()) == []


def test_an_engine_without_the_zstandard_package_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd_frames, "_package", lambda: None)
    recording = EngineRecording(tmp_path / "a.trace", lambda: header("engine"))
    events: list[Event] = [Received(S, 1, "r1"), *[Sent(S + n, 1, n, n) for n in range(300)]]
    recording(0, events)
    recording.close()
    monkeypatch.undo()
    (path,) = tmp_path.iterdir()
    assert events_of(path) == events


def test_the_recorder_brings_nothing_into_an_engine_that_it_does_not_have() -> None:
    code = (
        "import sys; sys.modules['zstandard'] = None; sys.modules['numpy'] = None\n"
        "import engine_hooks.publish.engine_recording\n"
        "loaded = {name.partition('.')[0] for name in sys.modules} & {'textual', 'rich', "
        "'platformdirs', 'torch'}\n"
        "print(loaded, any(name.startswith('tracer.state') for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set() False"


def test_what_the_engines_buffer_lost_is_a_gap(tmp_path: Path) -> None:
    recording = EngineRecording(tmp_path / "a.trace", lambda: header("engine"))
    recording(0, [Heartbeat(S)])
    recording(1, [Heartbeat(2 * S)])
    recording(50, [Heartbeat(3 * S)])
    recording.close()
    assert events_of(path_of(tmp_path / "a.trace", os.getpid())) == [
        Heartbeat(S),
        Heartbeat(2 * S),
        Gap(3 * S, 48, "the engine's buffer overflowed"),
        Heartbeat(3 * S),
    ]


def test_a_process_that_turns_out_to_be_something_else_is_introduced_again(tmp_path: Path) -> None:
    heads = [header("engine", "engine"), header("engine", "worker")]
    recording = EngineRecording(tmp_path / "a.trace", lambda: heads[0])
    recording(0, [Prompt(S, 1, "secret", 6)])
    recording(1, [Heartbeat(S)])
    del heads[0]
    recording(2, [Heartbeat(2 * S)])
    recording.close()
    (path,) = tmp_path.iterdir()
    with TraceFile(path) as trace:
        told = [
            delivery.header.role for delivery in trace.deliveries() if delivery.header is not None
        ]
    assert told == ["engine", "worker"]


def test_names_carry_the_pid_and_no_file_is_overwritten(tmp_path: Path) -> None:
    assert path_of(tmp_path / "a.b.trace", 7).name == "a.b-7.trace"
    assert (
        path_of(tmp_path / "a", 7).name == "a-7.trace"
        and path_of(tmp_path, 7).name == "trace-7.trace"
    )
    for _ in range(3):
        recording = EngineRecording(tmp_path / "a.trace", lambda: header("engine"))
        recording(0, [Heartbeat(S)])
        recording.close()
    pid = os.getpid()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"a-{pid}-2.trace", f"a-{pid}-3.trace", f"a-{pid}.trace"]


def test_without_the_variable_nothing_is_recorded(tmp_path: Path) -> None:
    assert from_environment(lambda: header("engine"), environment={}) is None
    assert from_environment(lambda: header("engine"), environment={"TRACER_RECORD": ""}) is None
    made = from_environment(lambda: header("engine"), environment={"TRACER_RECORD": str(tmp_path)})
    assert made is not None and list(tmp_path.iterdir()) == []

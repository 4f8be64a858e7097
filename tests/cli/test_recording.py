"""Recording as a user does it: a key on the live screen, and a flight recorder that waits for
something to happen."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.commands import Commands, traced, wait_until
from tests.cli.terminal import Terminal
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import load

pytestmark = pytest.mark.slow

Open = Callable[..., Terminal]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder in which the commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def terminal(tracer: Commands, here: Path) -> Iterator[Open]:
    """Opens `tracer` commands in the folder `here`, on terminals of their own."""
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        command = shlex.join([sys.executable, "-m", "tracer", *arguments])
        environment = tracer.environment(XDG_CACHE_HOME=str(here.parent / "cache"))
        opened.append(
            Terminal(["sh", "-c", f"cd {shlex.quote(str(here))} && exec {command}"], environment)
        )
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def recorded(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.trace"))


def test_a_key_records_what_is_shown_with_what_was_true_before_it(
    terminal: Open, here: Path
) -> None:
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    assert "REC" not in shown.text
    shown.type("r")
    shown.wait_for_text("●REC")
    shown.wait_for_text("recording to")
    (path,) = recorded(here)
    shown.type("r")
    shown.wait_for(lambda: "REC" not in shown.text, "the end of the recording")
    shown.wait_for_text("recorded")
    state = load(path)
    assert [request.client_id for request in state.requests.order] == ["over-1", "waits-2"]
    assert next(iter(state.sources.values())).engine is not None
    shown.type("q")
    assert shown.wait_for_end() == 0


def test_a_recording_that_goes_on_is_whole_when_the_screen_is_left(
    terminal: Open, here: Path
) -> None:
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    shown.type("r")
    shown.wait_for_text("●REC")
    shown.type("q")
    assert shown.wait_for_end() == 0
    (path,) = recorded(here)
    with TraceFile(path) as trace:
        assert trace.problems == []
    assert f"kB to {path.name}".encode() in bytes(shown.raw).rpartition(b"\x1b[?1049l")[2]


@pytest.mark.slow
def test_where_the_folder_takes_no_file_the_cache_folder_does(terminal: Open, here: Path) -> None:
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    here.rmdir()  # nothing can be made in a folder that is gone, whoever one is
    shown.type("r")
    shown.wait_for_text("●REC")
    (path,) = recorded(here.parent / "cache" / "tracer")
    shown.type("q")
    shown.wait_for_end()
    assert load(path).requests.order


@pytest.mark.slow
def test_what_the_flight_recorder_kept_is_written_on_a_signal(
    tracer: Commands, tmp_path: Path
) -> None:
    running = tracer.start(
        "run",
        "--headless",
        "--record",
        str(tmp_path / "flights"),
        "--flight-recorder",
        "1m",
        "--on",
        "finding",
        "--",
        *traced("tinyengine", "for", "600"),
    )
    flights = tmp_path / "flights"
    wait_until(lambda: any(tracer.sockets.rglob("*.sock")), "the engine")
    wait_until(lambda: _signalled(running.pid, flights), "the flight recording")
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    (path, *_) = recorded(flights)
    assert f"flight recording {path}: SIGUSR1" in err
    with TraceFile(path) as trace:
        assert [mark.text for mark in trace.marks()][:1] == ["SIGUSR1"]
    assert "waits-2" in [request.client_id for request in load(path).requests.order]


def _signalled(pid: int, folder: Path) -> bool:
    """Ask until something could be written: what is kept is made into blocks once a second."""
    if not recorded(folder):
        os.kill(pid, signal.SIGUSR1)
    return bool(recorded(folder))


def test_a_rule_writes_what_was_before_it_fired(tracer: Commands, tmp_path: Path) -> None:
    engine = tracer.start("run", "--headless", "--", *traced("tinyengine", "for", "600"))
    wait_until(lambda: any(tracer.sockets.rglob("*.sock")), "the engine")
    recording = tracer.start("record", f"python-{engine.pid}", "-o", str(tmp_path / "queue.trace"),
                             "--flight-recorder", "90s", "--on", "live>0")  # fmt: skip
    wait_until(lambda: recorded(tmp_path), "the flight recording")
    recording.send_signal(signal.SIGINT)
    _, err = recording.communicate(timeout=60)
    engine.send_signal(signal.SIGTERM)
    engine.communicate(timeout=60)
    assert recording.returncode == 0 and "Traceback" not in err
    (path,) = recorded(tmp_path)
    assert path.name.startswith("queue-")
    with TraceFile(path) as trace:
        (mark,) = trace.marks()
    assert mark.text == "live 1, rule live>0"
    assert mark.t > load(path).requests.order[0].order[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--flight-recorder", "5m", "--on", "ttft>>2"), "'ttft>>2' is no rule"),
        (("--flight-recorder", "5m", "--on", "speed>2"), "no such figure as speed"),
        (("--flight-recorder", "5"), "must be a duration such as 90s, 5m or 1h"),
        (("--flight-recorder", "0s"), "must be a duration such as"),
        (("--on", "preemption"), "add for example --flight-recorder 5m"),
        (
            ("--flight-recorder", "5m", "-o", "/proc/flights/"),
            "cannot make the folder /proc/flights",
        ),
        ((), "nothing called 999999 runs"),
    ],
)
def test_wrong_use_is_told_in_one_line(
    tracer: Commands, options: tuple[str, ...], reason: str
) -> None:
    done = tracer.run(
        "record", "999999", *(() if "-o" in options else ("-o", "unused.trace")), *options
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1

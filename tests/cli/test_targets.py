"""`tracer attach` and `tracer show` without a terminal: what can be joined, and what it tells."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import ClockAnchor
from engine_hooks.protocol.events import Header
from tests.cli.commands import Commands, traced, wait_until
from tracer.transport.sources import Found
from tracer.transport.targets import choose, group


def seen(pid: int, host: str, inner: int, parent: int, title: str) -> tuple[Found, None]:
    """A process that we see as `pid` and that has other numbers within its container."""
    header = Header(
        1, title, inner, "engine", title, host, "boot", ClockAnchor(0, 0), parent=parent
    )
    return Found(Path(f"/run/tracer/{inner}-{host}.sock"), pid, header), None


def test_processes_of_a_container_are_one_engine_although_we_see_other_pids() -> None:
    processes = [
        seen(901, "a", 1, 0, "api"),
        seen(950, "a", 11, 1, "core"),
        seen(990, "a", 21, 11, "worker"),
    ]
    (target,) = group(processes)
    assert target.name == "901" and [one.pid for one in target.processes] == [901, 950, 990]


def test_two_containers_with_the_same_pids_are_two_engines_with_names_of_their_own() -> None:
    processes = [
        seen(1, "a", 1, 0, "one"),
        seen(11, "a", 11, 1, "one core"),
        seen(1, "b", 1, 0, "two"),
    ]
    first, second = group(processes)
    assert [len(first.processes), len(second.processes)] == [2, 1]
    assert first.name != second.name
    assert (
        choose([first, second], first.name) is first
        and choose([first, second], second.name) is second
    )


@dataclass(frozen=True)
class Running:
    """A traced engine under `tracer run`, and how to run commands beside it."""

    tracer: Commands
    process: subprocess.Popen[str]

    @property
    def socket(self) -> Path:
        """Where it publishes."""
        (socket,) = self.tracer.sockets.glob("run-*/*.sock")
        return socket

    @property
    def pid(self) -> str:
        """Of the engine itself."""
        return self.socket.name.partition("-")[0]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``tracer ARGUMENTS``."""
        return self.tracer.run(*arguments, **env)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all tests: they only look."""
    with tempfile.TemporaryDirectory(prefix="tracer-test-") as sockets:
        tracer = Commands(Path(sockets), tmp_path_factory.mktemp("logs"))
        process = tracer.start("run", "--headless", "--", *traced("tinyengine", "for", "600"))
        try:
            wait_until(lambda: list(tracer.sockets.glob("run-*/*.sock")), "the socket")
            yield Running(tracer, process)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            tracer.finish()


def test_with_nothing_to_join_it_says_how_to_start(tracer: Commands) -> None:
    for arguments in (("attach",), ("attach", "--list")):
        done = tracer.run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "tracer attach: nothing runs with the hooks on; start an engine with: tracer run -- "
            "CMD …\n"
        )


def test_a_socket_folder_that_is_refused_is_the_reason(tracer: Commands) -> None:
    tracer.sockets.chmod(0o755)
    reason = f"the socket directory {tracer.sockets} is open to other users: chmod 700"
    for arguments in (("attach",), ("attach", "--list"), ("web",)):
        done = tracer.run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"tracer {arguments[0]}: {reason}")
    assert reason in tracer.run("show", "4711").stderr
    assert reason in tracer.run("doctor").stdout
    tracer.sockets.chmod(0o700)


def test_list_names_what_runs(engine: Running) -> None:
    done = engine.run("attach", "--list")
    assert done.returncode == 0
    heading, row = done.stdout.splitlines()
    assert heading.split() == ["NAME", "PID", "ROLE", "ENGINE", "MODEL", "SINCE"]
    name, pid, role, *what, number, unit = row.split()
    assert name.endswith(f"-{engine.process.pid}")
    assert pid == engine.pid
    assert (role, what) == ("engine", ["tinyengine", "1.2", "tiny-model"])
    assert number.isdigit()
    assert unit in ("s", "min")


def test_several_without_a_terminal_are_listed(engine: Running) -> None:
    other = engine.tracer.start("run", "--headless", "--", *traced("otherengine", "for", "600"))
    wait_until(lambda: len(list(engine.tracer.sockets.glob("run-*/*.sock"))) == 2, "two sockets")
    done = engine.run("attach")
    assert (done.returncode, done.stdout) == (2, "")
    assert "tinyengine 1.2" in done.stderr
    assert "otherengine 1.2" in done.stderr
    assert (
        "several engines run: name one, for example: tracer attach" in done.stderr.splitlines()[-1]
    )
    other.send_signal(signal.SIGTERM)
    other.communicate(timeout=60)


def test_attach_needs_a_terminal(engine: Running) -> None:
    done = engine.run("attach", engine.pid)
    assert done.returncode == 2
    assert "no terminal to show" in done.stderr
    assert "tracer show" in done.stderr


@pytest.mark.parametrize("how", ["pid", "run", "name", "beginning", "title", "socket"])
def test_show_finds_an_engine_by(engine: Running, how: str) -> None:
    name = engine.socket.parent.name.removeprefix("run-")
    wanted = {
        "pid": engine.pid,
        "run": name.rpartition("-")[2],
        "name": name,
        "beginning": name[:6],
        "title": "TINYengine",
        "socket": str(engine.socket),
    }[how]
    done = engine.run("show", wanted, "--json")
    assert done.returncode == 0, done.stderr
    ids = [request["id"] for request in json.loads(done.stdout)["requests"]]
    assert ids == ["over-1", "waits-2"]


def test_show_prints_plain_text(engine: Running) -> None:
    done = engine.run("show", "tinyengine")
    assert done.returncode == 0
    assert "over-1" in done.stdout
    assert "tinyengine" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_show_prints_ascii_where_nothing_else_fits(engine: Running) -> None:
    done = engine.run("show", "tinyengine", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "over-1" in done.stdout


def test_show_says_when_there_is_no_such_target(engine: Running) -> None:
    done = engine.run("show", "nothing\x1b[31m-like-this")
    assert (done.returncode, done.stdout) == (2, "")
    reason = (
        "tracer show: nothing called nothing\\x1b[31m-like-this runs with the hooks on; running: "
    )
    assert done.stderr.startswith(reason)
    assert done.stderr.count("\n") == 1


def test_show_prints_one_request(engine: Running) -> None:
    done = engine.run("show", "tinyengine", "--request", "over-1")
    assert done.returncode == 0
    assert "over-1" in done.stdout
    assert "waits-2" not in done.stdout
    missing = engine.run("show", "tinyengine", "--request", "none-of-these")
    assert missing.returncode == 2
    assert "no request none-of-these" in missing.stderr


def test_a_dead_engine_s_socket_is_no_target(tracer: Commands) -> None:
    process = tracer.start("run", "--headless", "--", *traced("tinyengine", "for", "600"))
    wait_until(lambda: list(tracer.sockets.glob("run-*/*.sock")), "the socket")
    (socket,) = tracer.sockets.glob("run-*/*.sock")
    copy = tracer.sockets / "1-00000000.sock"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(str(copy))
    assert not socket.exists()
    done = tracer.run("attach", "--list")
    assert done.returncode == 2
    assert not copy.exists(), "what a dead process left is removed"


def test_doctor_tells_versions_sockets_and_coverage(engine: Running) -> None:
    done = engine.run("doctor")
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any(line.startswith("Python ") for line in lines)
    assert f"{engine.tracer.sockets}: private, runs: 1" in lines
    assert any(line.startswith("tinyengine 1.2, tiny-model") and "ready" in line for line in lines)
    assert any(line.split() == ["4", "admission", "measured", "scheduler:add"] for line in lines)
    assert any(
        line.split() == ["6", "embed", "unavailable", "model:embed:", "compiled"] for line in lines
    )


def test_doctor_works_with_nothing_running(tracer: Commands) -> None:
    done = tracer.run("doctor", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "none; start an engine with: tracer run -- CMD" in done.stdout

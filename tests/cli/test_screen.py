"""`tracer run` and `tracer attach` on a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.commands import Commands, python, traced, wait_until
from tests.cli.terminal import Terminal

pytestmark = pytest.mark.slow

Open = Callable[..., Terminal]

ALTERNATE_SCREEN_ON, ALTERNATE_SCREEN_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def terminal(tracer: Commands) -> Iterator[Open]:
    """Opens `tracer` commands on terminals of their own."""
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        opened.append(Terminal([sys.executable, "-m", "tracer", *arguments], tracer.environment()))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def state_of(pid: int) -> str:
    """The letter that Linux has for what a process does: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def assert_restored(terminal: Terminal) -> None:
    """The terminal is as it was found: modes, alternate screen, cursor, mouse, bracketed paste."""
    assert termios.tcgetattr(terminal.slave) == terminal.before
    raw = bytes(terminal.raw)
    assert raw.rfind(ALTERNATE_SCREEN_OFF) > raw.rfind(ALTERNATE_SCREEN_ON) >= 0
    for mode in (b"1000", b"1003", b"1006", b"2004"):
        assert raw.rfind(b"\x1b[?%sl" % mode) >= raw.rfind(b"\x1b[?%sh" % mode), mode
    assert raw.rfind(b"\x1b[?25h") > raw.rfind(b"\x1b[?25l")


def test_shows_the_requests_of_its_command_and_ends_it_on_q(terminal: Open) -> None:
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("over-1")
    shown.wait_for_text("waits-2")
    shown.type("q")
    assert shown.wait_for_end() == 0
    assert_restored(shown)


def test_the_screen_is_painted_before_the_command_starts(terminal: Open, tracer: Commands) -> None:
    """The command stops the tracer as its first act: what is painted then was painted before."""
    marker = tracer.logs.parent / "started"
    code = (
        "import os, pathlib, signal, time\n"
        "os.kill(int(os.environ['TRACER_RUN'].rpartition('-')[2]), signal.SIGSTOP)\n"
        f"pathlib.Path({str(marker)!r}).touch(); time.sleep(600)"
    )
    shown = terminal("run", "--", *python(code))
    shown.wait_for(marker.exists, "the command to start")
    shown.read(0.5)
    assert "receive" in shown.text
    shown.process.send_signal(signal.SIGCONT)
    shown.type("q")
    shown.wait_for_end()
    assert_restored(shown)


def test_ctrl_z_gives_the_terminal_back_and_going_on_takes_it_again(terminal: Open) -> None:
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    shown.type("\x1a")
    shown.wait_for(lambda: state_of(shown.process.pid) == "T", "the stop")
    assert_restored(shown)
    shown.process.send_signal(signal.SIGCONT)
    shown.wait_for(
        lambda: termios.tcgetattr(shown.slave) != shown.before, "the terminal to be taken again"
    )
    shown.type("?")
    shown.wait_for_text("open the request")
    shown.type("?")
    shown.wait_for(lambda: "open the request" not in shown.text, "the help to go")
    shown.type("q")
    shown.wait_for_end()
    assert_restored(shown)


def test_a_stop_without_a_word_leaves_keys_and_the_terminal_whole(terminal: Open) -> None:
    """Were the terminal taken a second time without being given back, two threads would share the
    keys."""
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    for _ in range(3):
        shown.process.send_signal(signal.SIGSTOP)
        shown.wait_for(lambda: state_of(shown.process.pid) == "T", "the stop")
        shown.process.send_signal(signal.SIGCONT)
        shown.read(0.3)
    for _ in range(10):
        shown.type("?")
        shown.wait_for_text("open the request")
        shown.type("?")
        shown.wait_for(lambda: "open the request" not in shown.text, "the help to go")
    shown.type("q")
    shown.wait_for_end()
    assert_restored(shown)


def test_nothing_of_the_command_is_painted_over_the_screen(
    terminal: Open, tracer: Commands
) -> None:
    """Neither what it writes to its streams nor what it tries to write to the terminal behind our
    back."""
    script = (
        "for n in $(seq 500); do echo SPILL-$n; echo SPILL-$n >&2; done; echo SPILL > /dev/tty; "
        "exec " + " ".join(traced("tinyengine", "for", "600"))
    )
    shown = terminal("run", "--", "sh", "-c", script)
    shown.wait_for_text("waits-2")
    shown.read(1)
    assert b"SPILL" not in shown.raw
    (log,) = tracer.logs.glob("*.log")
    assert log.read_text().count("SPILL-500") == 2, "all of it is in the log"
    shown.type("q")
    shown.wait_for_end()


def test_a_command_that_fails_at_once_shows_its_last_words(terminal: Open) -> None:
    code = "import sys\nfor n in range(100): print('line', n)\nsys.exit('no model \\x1b[31mhere')"
    shown = terminal("run", "--", *python(code))
    assert shown.wait_for_end() == 1
    assert_restored(shown)
    last = bytes(shown.raw).rpartition(ALTERNATE_SCREEN_OFF)[2].decode()
    assert "line 99" in last
    assert "no model \\x1b[31mhere" in last
    assert "line 1\r\n" not in last, "the last lines, not all"
    assert "ended with code 1 after" in last


def test_a_command_that_is_not_there_is_told_after_the_screen_is_gone(terminal: Open) -> None:
    shown = terminal("run", "--", "no-such-program-here")
    assert shown.wait_for_end() == 127
    assert_restored(shown)
    last = bytes(shown.raw).rpartition(ALTERNATE_SCREEN_OFF)[2]
    assert b"tracer: cannot run no-such-program-here: no such file or directory\r\n" in last


def test_the_screen_stays_when_a_traced_command_ends(terminal: Open) -> None:
    """What there is to see can be looked at; the exit code is the command's."""
    shown = terminal("run", "--", *traced("tinyengine", "exit", "6"))
    shown.wait_for_text("over-1")
    shown.wait_for_text("ended")
    shown.read(1)
    assert shown.process.poll() is None
    shown.type("q")
    assert shown.wait_for_end() == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal_and_reaches_the_command(
    terminal: Open, number: signal.Signals
) -> None:
    script = f"trap 'exit 41' {number.name[3:]}; echo up; while :; do sleep 0.05; done"
    shown = terminal("run", "--", "sh", "-c", script)
    shown.wait_for(lambda: ALTERNATE_SCREEN_ON in shown.raw, "the screen")
    shown.read(1.5)
    shown.process.send_signal(number)
    assert shown.wait_for_end() == 41
    assert_restored(shown)


def test_everything_goes_when_the_terminal_goes(terminal: Open, tracer: Commands) -> None:
    """A closed window: the fixture looks for what is left."""
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    shown.process.send_signal(signal.SIGHUP)
    os.close(shown.master)
    shown.master = os.open(os.devnull, os.O_RDWR)
    shown.process.wait(timeout=60)
    assert shown.process.returncode != 0


@pytest.mark.parametrize("pause_s", [0.0, 0.05, 0.2])
def test_a_terminal_that_goes_while_the_screen_is_being_left_keeps_nothing_alive(
    terminal: Open, tracer: Commands, pause_s: float
) -> None:
    shown = terminal("run", "--", *traced("tinyengine", "for", "600"))
    shown.wait_for_text("waits-2")
    shown.type("q")
    shown.read(pause_s)
    os.close(shown.master)
    os.close(shown.slave)
    shown.master, shown.slave = os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDWR)
    shown.process.send_signal(signal.SIGHUP)
    shown.process.wait(timeout=60)


def test_attach_joins_the_only_engine_and_leaves_it_alone(terminal: Open, tracer: Commands) -> None:
    process = tracer.start("run", "--headless", "--", *traced("tinyengine", "for", "600"))
    wait_until(lambda: list(tracer.sockets.glob("run-*/*.sock")), "the socket")
    shown = terminal("attach")
    shown.wait_for_text("waits-2")
    shown.type("q")
    assert shown.wait_for_end() == 0
    assert_restored(shown)
    assert process.poll() is None, "the engine goes on"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_attach_asks_which_one(terminal: Open, tracer: Commands) -> None:
    both = [
        tracer.start("run", "--headless", "--", *traced(name, "for", "600"))
        for name in ("first", "second")
    ]
    wait_until(lambda: len(list(tracer.sockets.glob("run-*/*.sock"))) == 2, "two sockets")
    shown = terminal("attach")
    shown.wait_for_text("which one?")
    assert "first 1.2" in shown.text
    assert "second 1.2" in shown.text
    name = next(
        folder.name.removeprefix("run-") for folder in tracer.sockets.glob(f"run-*-{both[1].pid}")
    )
    shown.type(name + "\n")
    shown.wait_for_text("waits-2")
    assert "second" in shown.text
    shown.type("q")
    assert shown.wait_for_end() == 0
    for process in both:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_beside_a_screen_metrics_are_served_and_an_alert_is_seen_and_logged(
    terminal: Open, tracer: Commands, tmp_path: Path
) -> None:
    alerts = tmp_path / "alerts.toml"
    alerts.write_text('[[alert]]\nname = "queue"\nrule = "waiting>0"\nseverity = "critical"\n')
    shown = terminal(
        "run", "--metrics", "0", "--alerts", str(alerts), "--", *traced("tinyengine", "for", "600")
    )  # fmt: skip
    shown.wait_for_text("alert: queue: waiting 1, rule waiting>0")
    shown.wait_for(lambda: re.search(r"cores [0-9.]+", shown.text) is not None, "the device strip")
    urls = re.findall(rb"http://127\.0\.0\.1:\d+/metrics", bytes(shown.raw))
    with urllib.request.urlopen(urls[0].decode(), timeout=60) as answer:
        assert b'tracer_alert_firing{alert="queue",severity="critical"} 1.0' in answer.read()
    shown.type("l")
    shown.wait_for_text("alert: critical: queue: waiting 1")
    shown.type("q")
    assert shown.wait_for_end() == 0, "with a screen an alert does not change the exit code"
    assert_restored(shown)
    assert "alert: critical: queue" not in next(iter(tracer.logs.glob("*.log"))).read_text(), (
        "the file is the engine's"
    )

"""On a real pseudo-terminal: it is left as it was found, however the program ends, and sent what it
can show."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from struct import pack

import pyte
import pytest

pytestmark = pytest.mark.slow

LEFT = (b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l", b"\x1b[?1003l", b"\x1b[?2004l")
"""Alternate screen, hidden cursor, mouse and bracketed paste are given back."""


class Session:
    """A program on a pseudo-terminal of 100×30."""

    def __init__(self, *arguments: str, **environment: str | None) -> None:
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, pack("HHHH", 30, 100, 0, 0))
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        env.pop("NO_COLOR", None)
        for name, value in environment.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.shown", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.sent = b""
        self.encoding = "ascii" if "PYTHONIOENCODING" in environment else "utf-8"

    def read(self, seconds: float) -> None:
        """Take in what comes for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                try:
                    self.sent += os.read(self.master, 65_536)
                except OSError:
                    return

    def wait(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Read until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.text
            self.read(0.05)

    @property
    def text(self) -> str:
        """The screen as it is seen."""
        screen = pyte.Screen(100, 30)
        stream = pyte.Stream(screen)
        plain = (
            self.sent.decode(self.encoding, "replace")
            .replace("\x1b[>", "\x1b[")
            .replace("\x1b[<", "\x1b[")
        )
        stream.feed("\x1b[?7l" + plain.split("\x1b[?1049l")[0])
        return "\n".join(screen.display)

    def started(self) -> None:
        """Wait for the list."""
        self.wait(lambda: "req_" in self.text and "? help" in self.text)

    def ended(self, seconds: float = 60) -> int:
        """Wait for the end; the exit status."""
        self.wait(lambda: self.process.poll() is not None, seconds)
        self.read(0.1)
        return int(self.process.returncode)

    def close(self) -> None:
        """Clear up."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for descriptor in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def sessions() -> Iterator[Callable[..., Session]]:
    opened: list[Session] = []

    def open_session(*arguments: str, **environment: str | None) -> Session:
        opened.append(Session(*arguments, **environment))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


def restored(session: Session) -> bool:
    """Whether the terminal is as it was."""
    return (
        all(sequence in session.sent for sequence in LEFT)
        and termios.tcgetattr(session.slave) == session.before
    )


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_quitting_restores_the_terminal(sessions: Callable[..., Session], key: bytes) -> None:
    session = sessions()
    session.started()
    os.write(session.master, key)
    assert session.ended() == 0
    assert restored(session)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_restore_the_terminal(
    sessions: Callable[..., Session], number: signal.Signals
) -> None:
    session = sessions()
    session.started()
    session.process.send_signal(number)
    assert session.ended() == 128 + number
    assert restored(session)


def test_a_defect_restores_the_terminal(sessions: Callable[..., Session]) -> None:
    session = sessions("--crash")
    session.started()
    os.write(session.master, b"?")
    assert session.ended() != 0
    assert restored(session)
    assert b"a defect in a widget" in session.sent


def test_a_terminal_that_vanishes_ends_the_program(sessions: Callable[..., Session]) -> None:
    session = sessions()
    session.started()
    os.close(session.slave)
    os.close(session.master)
    assert session.process.wait(60) != 0


def test_a_terminal_that_takes_nothing_does_not_block_quitting_for_ever(
    sessions: Callable[..., Session],
) -> None:
    session = sessions()
    session.started()
    for _ in range(40):
        os.write(session.master, b"s")
        time.sleep(0.02)
    time.sleep(1.0)
    os.write(session.master, b"q")
    assert session.ended() == 0
    assert restored(session)


def test_no_color_sends_no_colours(sessions: Callable[..., Session]) -> None:
    session = sessions(NO_COLOR="1")
    session.started()
    assert b"38;2" not in session.sent
    assert b"48;2" not in session.sent
    assert b"38;5" not in session.sent
    os.write(session.master, b"k")
    session.wait(lambda: "▌req_" in session.text)


def test_sixteen_colours_are_named_ones(sessions: Callable[..., Session]) -> None:
    session = sessions(TERM="linux", COLORTERM=None)
    session.started()
    assert b"38;2" not in session.sent
    assert b"38;5" not in session.sent
    assert b"\x1b[34" in session.sent or b";34" in session.sent


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "TERM": "vt100"}],
)
def test_an_ascii_terminal_is_sent_ascii(
    sessions: Callable[..., Session], environment: dict[str, str]
) -> None:
    session = sessions(**environment)
    session.started()
    os.write(session.master, b"k\r")
    session.wait(lambda: "twelve stages" in session.text)
    os.write(session.master, b"\x1b")
    session.wait(lambda: "? help  q quit" in session.text)
    os.write(session.master, b"\x10")
    session.wait(lambda: "Search for commands" in session.text)
    assert all(byte < 128 for byte in session.sent)
    rows = session.text.splitlines()
    assert all(len(row) == 100 for row in rows)


def test_a_terminal_that_is_resized_over_and_over_shows_the_whole_screen_in_the_end(
    sessions: Callable[..., Session],
) -> None:
    session = sessions()
    session.started()
    session.read(0.5)
    before = session.text
    draw = random.Random(5)
    for _ in range(40):
        ioctl(
            session.master,
            termios.TIOCSWINSZ,
            pack("HHHH", draw.randint(1, 80), draw.randint(1, 250), 0, 0),
        )
        session.read(0.02)
    ioctl(session.master, termios.TIOCSWINSZ, pack("HHHH", 30, 100, 0, 0))
    session.wait(lambda: session.text == before)
    os.write(session.master, b"q")
    assert session.ended() == 0


def test_a_latin_1_terminal_is_sent_nothing_that_it_cannot_show(
    sessions: Callable[..., Session],
) -> None:
    session = sessions(PYTHONIOENCODING="latin-1", LC_ALL="C")
    session.started()
    assert session.process.poll() is None
    assert all(byte < 128 for byte in session.sent)


def test_what_our_own_process_warns_logs_or_prints_is_never_painted_over_the_screen(
    sessions: Callable[..., Session],
) -> None:
    session = sessions("--noise")
    session.started()
    os.write(session.master, b"?")
    session.wait(lambda: "open the request" in session.text)
    session.read(0.5)
    screen = session.sent.split(b"\x1b[?1049l")[0]
    assert screen and b"SPILL" not in screen
    os.write(session.master, b"q")
    session.wait(lambda: "? help" in session.text)
    os.write(session.master, b"q")
    assert session.ended() == 0
    assert restored(session)


def test_the_first_paint_does_not_wait_for_data(sessions: Callable[..., Session]) -> None:
    session = sessions()
    session.wait(lambda: b"\x1b[?1049h" in session.sent)
    session.started()
    assert session.process.poll() is None

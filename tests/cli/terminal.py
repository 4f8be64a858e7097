"""A command on a terminal of its own, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

import pyte

WIDTH, HEIGHT = 120, 36


class Terminal:
    """Runs a command on a pseudo-terminal; `screen` holds what it shows."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], size: tuple[int, int] = (WIDTH, HEIGHT)
    ) -> None:
        self.screen = pyte.Screen(*size)
        self.raw = bytearray()
        self._stream = pyte.ByteStream(self.screen)
        self.master, slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def read(self, seconds: float = 0.1) -> None:
        """Take in what is written within so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                return
            try:
                data = os.read(self.master, 65_536)
            except OSError:  # nobody holds the other end any more
                return
            self.raw += data
            # pyte knows no private sequences of this kind
            self._stream.feed(data.replace(b"\x1b[>", b"\x1b["))

    def type(self, keys: str) -> None:
        """Type something."""
        os.write(self.master, keys.encode())

    def resize(self, width: int, height: int) -> None:
        """Another size, of which the command is told."""
        self.screen.resize(height, width)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    @property
    def text(self) -> str:
        """The rows as they are seen."""
        return "\n".join(row.rstrip() for row in self.screen.display)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Read until `condition()`; fails with the screen otherwise."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited {seconds:g} s for {what}; the screen:\n{self.text}"
            )
            self.read(0.02)

    def wait_for_text(self, text: str, seconds: float = 60) -> None:
        """Read until the screen shows `text`."""
        self.wait_for(lambda: text in self.text, repr(text), seconds)

    def wait_for_end(self, seconds: float = 60) -> int:
        """Read until the command has ended; its exit code."""
        self.wait_for(lambda: self.process.poll() is not None, "the end", seconds)
        self.read()
        return int(self.process.returncode)

    def close(self) -> None:
        """Hang up."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)

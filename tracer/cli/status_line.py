"""The tracer's own lines while it works: on stderr, or on the screen while there is one."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from tracer.cli.output import knows_sequences
from tracer.format.text import clean, fit

PASSING_PERIOD_S: Final = 2.0
"""Seconds between two passing lines where a line cannot be written over."""

OnScreen = Callable[[str, bool], None]
"""Takes (text, passing) while a screen is shown."""


class StatusLine:
    """Reports one line at a time. On a terminal a passing one (progress) is written over by the
    next."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.on_screen: OnScreen | None = None
        """Set while the terminal belongs to a screen: nothing is written to the stream then."""
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty() and knows_sequences()
        self._passing = False
        self._last_passing = float("-inf")

    def report(self, text: str, *, passing: bool = False) -> None:
        """Write one line of our own."""
        if self.on_screen is not None:
            self.on_screen(text, passing)
            return
        line = clean(f"tracer: {text}")
        if not passing:
            self._write(line + "\n")
        elif self._terminal:
            width = shutil.get_terminal_size().columns
            self._write(fit(line, width - 1).rstrip() + "\x1b[K", passing=True)
        elif time.monotonic() - self._last_passing >= PASSING_PERIOD_S:
            self._last_passing = time.monotonic()
            self._write(line + "\n")

    def pass_on(self, text: str) -> None:
        """Write one line of the engine's output."""
        if self.on_screen is None:
            self._write(clean(text) + "\n")

    def _write(self, text: str, *, passing: bool = False) -> None:
        text = ("\r\x1b[K" if self._passing else "") + text
        self._passing = passing
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone; the run goes on
            return


def report(text: str) -> None:
    """Write one line of our own on stderr."""
    StatusLine().report(text)

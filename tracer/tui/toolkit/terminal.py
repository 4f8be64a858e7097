"""A terminal that may go away at any moment (a closed window, a lost SSH connection) or come back
to a program that was stopped.

Textual writes from a thread of its own. When the terminal is gone that thread dies of the error,
its queue fills, and the next write blocks the program for ever; and the thread that reads keys
reads the end over and over, because restoring the terminal fails before it is told to stop. Here
writing to nobody succeeds, and both threads end.

Textual takes the terminal again on every SIGCONT, also after a SIGSTOP before which it was not
given back: a second thread then reads keys beside the first, either may wait for ever for a key
that the other got, and the modes to be restored in the end are lost. And it does so within the
signal's handler, where a lock of the writer's queue may be held. Here the loop does it, and the
terminal is given back before it is taken again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import IO, Any

from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver


class PatientFile:
    """A text file whose reader may have gone: what is written then goes nowhere."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._written = 0
        self.flushed = 0
        """How many of the writes have reached the terminal."""

    def write(self, text: str) -> int:
        self._written += 1
        try:
            return self._file.write(text)
        except (OSError, ValueError):  # ValueError: the file was closed
            return len(text)

    def flush(self) -> None:
        written = self._written
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()
        self.flushed = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TerminalDriver(LinuxDriver):
    """Textual's driver on a terminal that may go away, and for a program that may be stopped."""

    _stopping = False
    """Whether it stops because we say so, with the terminal given back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patient = PatientFile(self._file or sys.stderr)
        self._file = self._patient  # type: ignore[assignment]
        self._asked = 0

    def write(self, data: str) -> None:
        self._asked += 1
        super().write(data)

    @property
    def at_rest(self) -> bool:
        """True once everything written has reached the terminal."""
        return self._patient.flushed >= self._asked

    def _sigtstp_application(self, *_: object) -> None:
        """Give the terminal back and stop, as soon as the loop is idle."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._auto_restart:
            self.suspend_application_mode()
        self._stopping = True
        os.kill(os.getpid(), signal.SIGSTOP)
        self._stopping = False  # here when it goes on
        if self._auto_restart:
            self._must_signal_resume = True
            self.resume_application_mode()

    def _sigcont_application(self, *_: object) -> None:
        """Start the terminal again after SIGSTOP: another program may have used it meanwhile."""
        if not self._stopping:
            self._loop.call_soon_threadsafe(self._take_again)

    def _take_again(self) -> None:
        if self._auto_restart and not self.exit_event.is_set():
            self.suspend_application_mode()
            self._must_signal_resume = True
            self.resume_application_mode()
            self._app.refresh(layout=True)

    def start_application_mode(self) -> None:
        self.exit_event.clear()
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def stop_application_mode(self) -> None:
        """Restore the terminal; whatever comes of that, stop reading keys."""
        try:
            super().stop_application_mode()
        finally:
            self.exit_event.set()


def patient(chosen: type[Driver]) -> type[Driver]:
    return TerminalDriver if chosen is LinuxDriver else chosen

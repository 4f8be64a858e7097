"""A terminal that may go away at any moment: a closed window, a lost SSH connection.

Textual writes from a thread of its own. When the terminal is gone that thread dies of the error, its queue fills, and
the next write blocks the program for ever; and the thread that reads keys reads the end over and over, because
restoring the terminal fails before it is told to stop. Here writing to nobody succeeds, and both threads end.
"""

from __future__ import annotations

from typing import IO, Any

from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver


class PatientFile:
    """A text file whose reader may have gone: what is written then goes nowhere."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write, or drop the text when nobody is there."""
        try:
            return self._file.write(text)
        except (OSError, ValueError):  # ValueError: the file was closed
            return len(text)

    def flush(self) -> None:
        """Flush, as far as anybody is there."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TerminalDriver(LinuxDriver):
    """Textual's driver on a terminal that may go away."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._file is not None:
            self._file = PatientFile(self._file)  # type: ignore[assignment]

    def stop_application_mode(self) -> None:
        """Restore the terminal; whatever comes of that, no key is read any more."""
        try:
            super().stop_application_mode()
        finally:
            self.exit_event.set()


def patient(chosen: type[Driver]) -> type[Driver]:
    """The driver to use where Textual would use `chosen`."""
    return TerminalDriver if chosen is LinuxDriver else chosen

"""The output of an engine: kept in a file and read from there, never painted over a screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine_hooks.protocol.regular_file import open_to_read

LINES_KEPT: Final = 2_000
"""Lines in memory. All of them are in the file."""

LONGEST_LINE: Final = 4_000
"""Characters of a line that are kept in memory; an engine may print megabytes without a newline."""

FILES_KEPT: Final = 20
"""Log files of earlier runs in the folder; older ones are removed when a new one is made."""

PERIOD_S: Final = 0.1
"""Seconds between two looks at the file."""

_CHUNK: Final = 256 * 1024


def log_folder() -> Path:
    """Return the folder of the logs of runs: ``TRACER_LOG_DIR``, else the user's log folder."""
    if given := os.environ.get("TRACER_LOG_DIR"):
        return Path(given).expanduser()
    from platformdirs import user_log_dir

    return Path(user_log_dir("tracer", appauthor=False))


def new_log(name: str) -> Path:
    """Make an empty log file for the run `name`, readable by its user alone. Raises OSError."""
    folder = log_folder()
    folder.mkdir(parents=True, exist_ok=True)
    earlier = sorted(folder.glob("*.log"), key=_changed)
    for old in earlier[: max(0, len(earlier) - FILES_KEPT + 1)]:
        with contextlib.suppress(OSError):
            old.unlink()
    path = folder / f"{name}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    return path


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class EventLog:
    """Recent lines of our own, where there is no output of an engine."""

    path = ""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Append a line."""
        self.lines.append(line)
        if len(self.lines) > 2 * LINES_KEPT:
            del self.lines[:-LINES_KEPT]


class EngineLog(EventLog):
    """Recent lines of a log file that another process writes, and of our own. `on_line` is called
    with each.

    Lines are as the engine wrote them: clean them (`tracer.format.text`) where they are shown. Of a
    progress bar that redraws itself with carriage returns the last state is kept.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self.path = str(path)
        self._on_line = on_line
        self._partial = b""
        self._file: int | None = None
        self._closed = False

    async def follow(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(PERIOD_S)

    def read(self) -> None:
        """Append what is new in the file; nothing while it cannot be read."""
        if self._closed:
            return
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = open_to_read(self.path)
            while data := os.read(self._file, _CHUNK):
                *whole, rest = (self._partial + data).split(b"\n")
                self._partial = rest if len(rest) <= 4 * LONGEST_LINE else rest[: 4 * LONGEST_LINE]
                for line in whole:
                    self.add(_decode(line))

    def add(self, line: str) -> None:
        """Append a line, of the engine or of our own."""
        super().add(line)
        self._on_line(line)

    def close(self) -> None:
        """Append the rest, an unfinished last line included."""
        self.read()
        if self._partial:
            self.add(_decode(self._partial))
            self._partial = b""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._closed = True


def _decode(line: bytes) -> str:
    text = line.removesuffix(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
    return text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE] + "…"

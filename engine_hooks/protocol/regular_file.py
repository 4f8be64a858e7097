"""Opening what a user names as a file: only a file, never something that waits for another program.

Opening a named pipe waits for a writer, and reading a terminal or a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

_KINDS: Final = (
    (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)  # fmt: skip


def open_to_read(path: Path | str) -> int:
    """A descriptor of the file at `path`, for reading. Raises OSError, with a reason in words where
    it is no file."""
    # before it is opened: a writer at the other end of a pipe would be let go on
    check(Path(path).stat())
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check(os.fstat(file))
    except OSError:
        os.close(file)
        raise
    return file


def read(path: Path | str, room: int) -> bytes:
    """Its first `room` bytes. Raises OSError, also for what is no file."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read(room)


def check(found: os.stat_result) -> None:
    """Raise OSError unless `found` is a file."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    for is_kind, words in _KINDS:
        if is_kind(found.st_mode):
            raise OSError(errno.EINVAL, f"it is {words}, not a file")


def no_pipe(path: Path | str) -> None:
    """Raise OSError when `path`, which is to be written, is a named pipe: that would wait for a
    reader. What is not there yet is fine, and so is ``/dev/null``."""
    try:
        found = Path(path).stat()
    except OSError:
        return
    if stat.S_ISFIFO(found.st_mode):
        raise OSError(errno.EINVAL, "it is a named pipe, not a file", str(path))

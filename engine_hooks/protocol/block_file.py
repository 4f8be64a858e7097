"""A trace file while it is being written: blocks appended, an index and a tail in the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from engine_hooks.protocol.block_maker import BlockMaker, Made
from engine_hooks.protocol.blocks import (
    HEADER_SIZE,
    INDEX,
    MARK,
    MAX_RAW,
    Index,
    Mark,
    TraceFileError,
    preamble,
    tail,
)
from engine_hooks.protocol.events import Header
from engine_hooks.protocol.regular_file import no_pipe

MARK_LENGTH: Final = 1_000
"""Characters of a mark's text."""

MOST_SOURCES: Final = 4_096
"""Sources named in the index; beyond it only the blocks name them."""

ENTRY: Final = 8 + HEADER_SIZE
"""Bytes of a block's entry in the index."""

INDEX_STEP: Final = MAX_RAW // 2 // ENTRY * ENTRY
"""Bytes of entries in one block of the index."""


class BlockFile:
    """The file at `path`, which must not exist unless `overwrite`.

    Not to be used by two threads at once.

    `error` is one sentence once something went wrong; nothing is written any more then, and
    `on_error` was told. Raises TraceFileError when the file cannot be made; nothing else ever
    raises.
    """

    def __init__(
        self,
        path: Path,
        *,
        with_text: bool,
        overwrite: bool = False,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.error = ""
        self.size = 0
        """Bytes in the file."""
        self.closed = False
        self._on_error: Callable[[str], None] | None = None
        self._entries = bytearray()
        self._file, self._identity = _create(path, overwrite)
        self._append(preamble(with_text=with_text))
        if self.error:
            self._let_go()
            raise TraceFileError(self.error)
        self._on_error = on_error

    def append(self, made: Made) -> bool:
        """Append a block; whether it is in the file."""
        offset = self.size
        if not self._append(made.data):
            return False
        self._entries += offset.to_bytes(8, "little") + made.header
        return True

    def close(self, maker: BlockMaker) -> None:
        """Write the index, with the sources of `maker`, and close the file."""
        if self.closed:
            return
        self.closed = True
        begin = self.size
        for made in index_blocks(maker, bytes(self._entries), maker.sources.values()):
            self.append(made)
        self._append(tail(begin))
        self._let_go()

    def abandon(self) -> None:
        """Forget the file without touching it: what a forked child does with its parent's."""
        self.closed = True
        self._let_go()

    def _append(self, data: bytes) -> bool:
        """Write all of it or nothing: what got in before the disk was full is taken back."""
        if self.error:
            return False
        try:
            # a daemon closes all files; the number is another's
            if _identity(self._file) != self._identity:
                raise OSError("the file was closed")
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                if _identity(self._file) == self._identity:
                    os.ftruncate(self._file, self.size)
            self.error = f"recording to {self.path} stopped: {why(error)}"
            if self._on_error is not None:
                with contextlib.suppress(Exception):
                    self._on_error(self.error)
            return False
        self.size += len(data)
        return True

    def _let_go(self) -> None:
        with contextlib.suppress(OSError):
            if _identity(self._file) == self._identity:
                os.close(self._file)


def index_blocks(maker: BlockMaker, entries: bytes, sources: Iterable[Header]) -> list[Made]:
    """The index: of one block, or of several when it is long."""
    named = [header for _, header in zip(range(MOST_SOURCES), sources, strict=False)]
    return [
        maker.other(
            INDEX,
            msgspec.msgpack.encode(
                Index(entries[start : start + INDEX_STEP], [] if start else named)
            ),
        )
        for start in range(0, max(len(entries), 1), INDEX_STEP)
    ]


def mark_block(maker: BlockMaker, t: int, text: str) -> Made:
    """A mark at the instant `t` (ns)."""
    plain = text[:MARK_LENGTH].encode("utf-8", "replace").decode("utf-8")
    return maker.other(MARK, msgspec.msgpack.encode(Mark(t, plain)), at=t)


def why(error: OSError) -> str:
    """What an error of the system says, as a part of a sentence."""
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]


def _create(path: Path, overwrite: bool) -> tuple[int, tuple[int, int]]:
    """An empty file that is ours alone, and what tells it from others. Raises TraceFileError."""
    file = -1
    try:
        no_pipe(path)
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if overwrite else os.O_EXCL), 0o600
        )
        if stat.S_ISREG(os.fstat(file).st_mode):
            lock(file)
            os.ftruncate(file, 0)
        return file, _identity(file)
    except OSError as error:
        if file >= 0:
            os.close(file)
        reason = why(error)
        if isinstance(error, FileExistsError):
            reason = "it exists already"
        elif isinstance(error, BlockingIOError):
            reason = "it is being recorded to already"
        raise TraceFileError(f"cannot record to {path}: {reason}") from None


def lock(file: int) -> None:
    """Tell others that the file is being written. Raises BlockingIOError when someone else does; a
    file system without locks has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino

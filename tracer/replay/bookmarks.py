"""Bookmarks of a trace file, kept beside it: what was recorded stays as it was.

``slow.trace`` has them in ``slow.trace.marks``, JSON: ``{"marks": [{"at_ns": …, "text": …}]}`` with
instants of the trace's own clock. Whoever passes a trace on can pass its marks on too, or leave
them out.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from engine_hooks.protocol import regular_file
from engine_hooks.protocol.block_file import MARK_LENGTH, why
from engine_hooks.protocol.blocks import Mark

SUFFIX: Final = ".marks"
MOST: Final = 1_000
"""Marks that are kept."""
_MOST_BYTES: Final = 8 * 1024 * 1024


class BookmarkError(Exception):
    """Bookmarks cannot be read or written. The message is one line fit for a user."""


class _Entry(msgspec.Struct):
    at_ns: int
    text: str = ""


class _Document(msgspec.Struct):
    marks: list[_Entry] = []


def place_of(trace: Path) -> Path:
    """Where the bookmarks of a trace file are."""
    return trace.with_name(trace.name + SUFFIX)


def read(trace: Path) -> list[Mark]:
    """The bookmarks of a trace file; none when it has none. Raises BookmarkError for a file that is
    no such thing."""
    path = place_of(trace)
    try:
        content = regular_file.read(path, _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise BookmarkError(f"{path.name} is too large for bookmarks: they are left alone")
        found = msgspec.json.decode(content, type=_Document).marks
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BookmarkError(f"cannot read {path.name}: {why(error)}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BookmarkError(f"{path.name} holds no bookmarks of ours: it is left alone") from None
    return [Mark(entry.at_ns, entry.text[:MARK_LENGTH]) for entry in found[:MOST]]


def write(trace: Path, marks: list[Mark]) -> None:
    """Keep these bookmarks instead of the ones before, all or nothing; without any the file goes.

    Raises BookmarkError.
    """
    path = place_of(trace)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not marks:
            path.unlink(missing_ok=True)
            return
        entries = [_Entry(mark.t, mark.text[:MARK_LENGTH]) for mark in marks[:MOST]]
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(_Document(entries)), indent=1))
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise BookmarkError(f"cannot keep marks in {path.name}: {why(error)}") from None

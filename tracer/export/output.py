"""Files that are there whole or not at all: written beside their place under another name, then
renamed.

A file that exists is not replaced unless asked for. Whatever goes wrong, a full disk included,
leaves what was there before and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.errors import UserError


class ExportError(UserError):
    """An export or an import did not come about. The message is one line for the user."""


class Output:
    """Files to be written together: `file` opens one, leaving the `with` puts all of them in place,
    or none after an exception. Raises ExportError."""

    def __init__(self, *, overwrite: bool) -> None:
        self._overwrite = overwrite
        self._made: list[tuple[Path, Path]] = []
        self._folder: Path | None = None

    def folder(self, path: Path) -> None:
        """Make a folder for the files, where there is none; removed if they are not written."""
        try:
            if not path.is_dir():
                path.mkdir()
                self._folder = path
        except OSError as error:
            raise ExportError(f"cannot make the folder {path}: {why(error)}") from None

    @contextlib.contextmanager
    def file(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file that will be `path`."""
        if path.is_dir():
            raise ExportError(f"cannot write {path}: it is a folder")
        if os.path.lexists(path) and not self._overwrite:
            raise ExportError(
                f"{path} exists already: give another name with -o, or --force to replace it"
            )
        beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
        try:
            # Not for others to read: what requests were about can be in it.
            number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._made.append((beside, path))
            with os.fdopen(number, "wb") as file:
                yield file
                file.flush()
                os.fsync(number)
        except OSError as error:
            raise ExportError(f"cannot write {path}: {why(error)}") from None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        try:
            if kind is None:
                for beside, path in self._made:
                    put_in_place(beside, path, overwrite=self._overwrite)
        except OSError as failure:
            raise ExportError(
                f"cannot write {failure.filename2 or failure.filename}: {why(failure)}"
            ) from None
        finally:
            for beside, _ in self._made:
                beside.unlink(missing_ok=True)
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.rmdir()  # only an empty one goes


def put_in_place(beside: Path, path: Path, *, overwrite: bool) -> None:
    """Give a file its name. Unless `overwrite`, one that was made there meanwhile is not replaced
    either, where that can be told. Raises OSError."""
    if overwrite:
        beside.replace(path)
        return
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        beside.rename(path)

"""Snapshots of the fold of a trace file, in a file of the user's cache: what makes seeks quick.

They can be made again at any time, so that nothing is said when they cannot be written or read: a
seek takes longer then. The file is named by the first block of the trace and by the code that folds
it, and each snapshot names all blocks before it, so that they stay valid while a recording grows.
They lie in a folder that nobody else may enter, because reading one runs code.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import sys
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, TypeVar
from zlib import crc32

import msgspec
import numpy as np

import engine_hooks.protocol
import tracer.state
from engine_hooks.protocol.errors import UserError
from engine_hooks.protocol.events import Step
from engine_hooks.protocol.frames import SequenceCheck
from engine_hooks.protocol.sockets import private_directory
from engine_hooks.protocol.zstd_frames import PackingError, pack, unpack
from tracer.recording.folders import cache_folder
from tracer.recording.trace_file import TraceFile
from tracer.replay.pickled import Pickled, read_requests, read_state, read_steps
from tracer.state.trace_state import TraceState

ROOM: Final = 1024 * 1024 * 1024
"""Bytes of all files of snapshots; those that were not used for longest go."""

MOST_RAW: Final = 256 * 1024 * 1024
"""Bytes of a part of a snapshot, unpacked. A busy engine's has 6 MB."""

STEPS_KEPT: Final = 24
"""Pieces of steps that are kept unpacked: those of two snapshots."""

_SUFFIX: Final = ".snapshots"
_HEAD: Final = struct.Struct("<4sIII")
_SYNC: Final = b"SNAP"
_NAME: Final = struct.Struct("<QI")

T = TypeVar("T")
_MOST_ENTRY: Final = 1024 * 1024


class SnapshotError(ValueError):
    """A snapshot cannot be read."""


class Place(NamedTuple):
    """Somewhere to go on from: a state, the place in `TraceFile.blocks` of the next block, and what
    numbers come."""

    state: TraceState
    block: int
    checks: dict[str, SequenceCheck]


class Entry(msgspec.Struct, array_like=True):
    """What one snapshot is: the place in `TraceFile.blocks` of the block after it, a checksum of
    the blocks before that, the instant when the last event in it was known (ns), the number of the
    next event of each source, which shared parts it adds, and of its three parts (`Pickled`) the
    bytes in the file and unpacked."""

    block: int
    chain: int
    last: int
    seqs: dict[str, int]
    first_step: int
    steps: int
    first_request: int
    requests: int
    sizes: tuple[int, int, int]
    raw: tuple[int, int, int]


class _Piece(Generic[T]):
    """The shared parts with which one snapshot came: parts that are asked for one after the other
    mostly lie in one."""

    def __init__(self) -> None:
        self.hold(0, [])

    def hold(self, first: int, items: list[T]) -> None:
        self.first, self.end, self.items = first, first + len(items), items


class SnapshotFile:
    """The snapshots of `trace`, in `path`. Another process may add to them; `refresh` looks."""

    def __init__(self, trace: TraceFile, path: Path) -> None:
        self.trace = trace
        self.path = path
        self.entries: list[Entry] = []
        """In order of time."""
        self._offsets: list[int] = []
        """Of what the entries tell."""
        self._end = 0
        self._chain = [0]
        self._steps: OrderedDict[int, list[Step]] = OrderedDict()
        self._temporary: Path | None = None
        self.refresh()

    @classmethod
    def of(cls, trace: TraceFile) -> SnapshotFile | None:
        """Return those in the user's cache; those in a folder that `close` removes where there is
        no cache, and where the trace holds what people wrote: a cache may not outlive that. None
        where neither can be had."""
        name = f"{_key(trace)}{_SUFFIX}"
        if not trace.with_text:
            with contextlib.suppress(UserError, OSError):
                return cls(
                    trace, private_directory(cache_folder() / "snapshots", create=True) / name
                )
        try:
            folder = Path(tempfile.mkdtemp(prefix="tracer-snapshots-"))
        except OSError:
            return None
        found = cls(trace, folder / name)
        found._temporary = folder
        return found

    def close(self) -> None:
        """Remove a folder that was made for these snapshots alone."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def complete(self) -> bool:
        """Whether the whole trace file was folded."""
        return bool(self.entries) and self.entries[-1].block >= len(self.trace.blocks)

    @property
    def reached(self) -> int:
        """Up to when the trace file was folded (ns)."""
        return self.entries[-1].last if self.entries else self.trace.begin

    @property
    def numbers(self) -> tuple[int, int]:
        """The next number of a step, and of a request."""
        if not self.entries:
            return 0, 0
        last = self.entries[-1]
        return last.first_step + last.steps, last.first_request + last.requests

    def refresh(self) -> None:
        """Take note of snapshots that were added."""
        with contextlib.suppress(OSError, msgspec.MsgspecError), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return
            file.seek(self._end)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                sync, length, size, crc = _HEAD.unpack(head)
                if sync != _SYNC or length > _MOST_ENTRY:
                    return
                told = file.read(length)
                if len(told) < length or crc32(told) != crc:
                    return
                entry = msgspec.msgpack.decode(told, type=Entry)
                if entry.chain != self.chain(entry.block):
                    return
                begin = self._end + _HEAD.size + length
                if sum(entry.sizes) != size or begin + size > os.fstat(file.fileno()).st_size:
                    return
                self.entries.append(entry)
                self._offsets.append(begin)
                self._end = begin + size
                file.seek(self._end)

    def chain(self, block: int) -> int:
        """Return a checksum of the first blocks of the trace file, so many as `block`; -1 when it
        has fewer."""
        blocks = self.trace.blocks
        while len(self._chain) <= block <= len(blocks):
            one = blocks[len(self._chain) - 1]
            self._chain.append(crc32(_NAME.pack(one.offset, one.crc), self._chain[-1]))
        return self._chain[block] if 0 <= block < len(self._chain) else -1

    def before(self, t: int) -> Place | None:
        """Return the latest snapshot at or before the instant `t` (ns); None when there is none.
        When it cannot be read, the file is of no use and goes."""
        at = bisect_right(self.entries, t, key=lambda entry: entry.last) - 1
        if at < 0:
            return None
        try:
            return self._load(at)
        except Exception:  # a file that contradicts itself, whatever its bytes make of that
            self.entries, self._offsets, self._end = [], [], 0
            with contextlib.suppress(OSError):
                self.path.unlink()
            return None

    def last_before(self, t: int) -> int:
        """The instant of the latest snapshot at or before the instant `t` (ns); -1 when there is
        none."""
        at = bisect_right(self.entries, t, key=lambda entry: entry.last) - 1
        return self.entries[at].last if at >= 0 else -1

    def _load(self, at: int) -> Place:
        entry = self.entries[at]
        with self.path.open("rb") as file:
            pieces: dict[int, list[list[Any]]] = {}
            steps, requests = _Piece[Step](), _Piece[list[Any]]()

            def step(number: int) -> Step:
                if not steps.first <= number < steps.end:
                    place = bisect_right(self.entries, number, key=attrgetter("first_step")) - 1
                    steps.hold(self.entries[place].first_step, self._steps_in(file, place))
                return steps.items[number - steps.first]

            def request(number: int) -> list[Any]:
                if not requests.first <= number < requests.end:
                    place = bisect_right(self.entries, number, key=attrgetter("first_request")) - 1
                    if place not in pieces:
                        pieces[place] = read_requests(self._part(file, place, 2), step)
                    requests.hold(self.entries[place].first_request, pieces[place])
                return requests.items[number - requests.first]

            state = read_state(self._part(file, at, 0), step, request)
        checks: dict[str, SequenceCheck] = {}
        for name, seq in entry.seqs.items():
            checks[name] = SequenceCheck()
            checks[name].expected = seq
        return Place(state, entry.block, checks)

    def _steps_in(self, file: Any, at: int) -> list[Step]:
        known = self._steps.get(at)
        if known is None:
            known = self._steps[at] = read_steps(self._part(file, at, 1))
            if len(self._steps) > STEPS_KEPT:
                self._steps.popitem(last=False)
        else:
            self._steps.move_to_end(at)
        return known

    def _part(self, file: Any, at: int, part: int) -> bytes:
        entry = self.entries[at]
        file.seek(self._offsets[at] + sum(entry.sizes[:part]))
        data = file.read(entry.sizes[part])
        if entry.raw[part] > MOST_RAW:
            raise SnapshotError("too large")
        try:
            return unpack(data, entry.raw[part])
        except PackingError as error:
            raise SnapshotError(str(error)) from None


class SnapshotWriter:
    """Adds to `snapshots`. Raises OSError when they cannot be written, BlockingIOError when someone
    else does."""

    def __init__(self, snapshots: SnapshotFile) -> None:
        self._file = os.open(
            snapshots.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            snapshots.refresh()
            os.ftruncate(self._file, snapshots._end)  # what a writer that was killed left
            os.utime(self._file)
        except BaseException:
            os.close(self._file)
            raise
        self._chain = snapshots.chain
        self.size = snapshots._end
        """Bytes written."""
        _make_room(snapshots.path)

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def add(self, found: Pickled, block: int, last: int, checks: dict[str, SequenceCheck]) -> int:
        """Add a snapshot (see `Entry`) and return its size in bytes. Raises OSError; the file is as
        it was before then."""
        parts = (found.state, found.steps, found.requests)
        packed = [pack(part) for part in parts]
        sizes = (len(packed[0]), len(packed[1]), len(packed[2]))
        raw = (len(parts[0]), len(parts[1]), len(parts[2]))
        seqs = {
            name: check.expected for name, check in checks.items() if check.expected is not None
        }
        told = msgspec.msgpack.encode(
            Entry(
                block,
                self._chain(block),
                last,
                seqs,
                found.first_step,
                found.count_steps,
                found.first_request,
                found.count_requests,
                sizes,
                raw,
            )
        )
        data = b"".join((_HEAD.pack(_SYNC, len(told), sum(sizes), crc32(told)), told, *packed))
        begin = os.lseek(self._file, 0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begin)
            raise
        self.size = begin + len(data)
        return len(data)


def _make_room(path: Path) -> None:
    """Remove the files of snapshots that were not used for longest, so that all of them stay within
    `ROOM`."""
    found = []
    for other in path.parent.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = other.stat()
            found.append((status.st_mtime, status.st_size, other))
    total = 0
    for _, size, other in sorted(found, reverse=True):
        total += size
        if total > ROOM and other != path:
            with contextlib.suppress(OSError):
                other.unlink()


def _key(trace: TraceFile) -> str:
    """Names a trace file by its first block, and the code that folds it."""
    digest = hashlib.blake2b(code_version(), digest_size=16)
    for block in trace.blocks[:1]:
        digest.update(struct.pack("<QIqq", block.offset, block.crc, block.first, block.last))
    return digest.hexdigest()


@functools.cache
def code_version() -> bytes:
    """Names the code that folds events, and what its objects are pickled with."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{sys.version_info[:3]} {msgspec.__version__} {np.__version__}".encode())
    for source in _sources():
        digest.update(source.read_bytes())
    return digest.digest()


def _sources() -> Iterator[Path]:
    for package in (tracer.state, engine_hooks.protocol):
        yield from sorted(Path(package.__path__[0]).rglob("*.py"))
    yield Path(__file__)
    yield Path(__file__).with_name("pickled.py")

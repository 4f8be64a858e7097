"""Where events come from: traced processes on this host, as asynchronous iterators of deliveries.

A source never raises because of a peer: losses are `Gap` events in place, and the end is a
`SourceGone` with the reason in words. `DirectorySource` follows every traced process of a
directory; `discover` lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.events import Header, SourceGone
from engine_hooks.protocol.frames import FrameError, FrameReader, Hello, decode
from engine_hooks.protocol.sockets import (
    OUT_OF_DESCRIPTORS,
    SocketError,
    alive,
    connect,
    peer,
    pid_of,
    private_directory,
    remove_dead,
    remove_unfinished,
    scan,
    search_directories,
)
from engine_hooks.protocol.stream_decoder import MAX_HELLO, Delivery, StreamDecoder

__all__ = ["Delivery", "DirectorySource", "Found", "LiveSource", "discover"]

CHUNK: Final = 256 * 1024
"""Bytes read at once."""

AHEAD: Final = 64
"""Deliveries that a directory's sources may be ahead of their reader; beyond it they wait, and the
engine drops."""

_RETRY: Final = 0.25
"""Seconds between tries at a process that is busy or stopped."""

_DYING: Final = 1.0
"""Seconds in which a process that closed its socket may still be on its way out."""


class LiveSource:
    """The traced process behind one socket, from now until it ends. To be iterated once."""

    def __init__(self, path: Path, *, now: Callable[[], int] = clock.now) -> None:
        self.path = path
        self.dead = False
        """True when the process was over before we came."""
        self._now = now
        self._decoder = StreamDecoder(path.stem, now)

    @property
    def header(self) -> Header | None:
        return self._decoder.header

    @property
    def missing(self) -> int:
        return self._decoder.missing

    def __aiter__(self) -> AsyncGenerator[Delivery, None]:
        return self._deliveries()

    async def _deliveries(self) -> AsyncGenerator[Delivery, None]:
        try:
            connection = await self._connect()
        except ConnectionRefusedError:
            self.dead = True
            yield self._gone(f"{_process(pid_of(self.path))} had ended")
            return
        except OSError as error:
            yield self._gone(_sentence(error, self.path))
            return
        pid = peer(connection).pid or pid_of(self.path)
        loop = asyncio.get_running_loop()
        reason = ""
        with connection:
            while not reason:
                try:
                    data = await loop.sock_recv(connection, CHUNK)
                except OSError:
                    reason = "connection lost"
                    break
                delivery = self._decoder.feed(data)
                if delivery is not None:
                    yield delivery
                if self._decoder.fault:
                    reason = f"{_process(pid)}: {self._decoder.fault}"
                elif not data:
                    reason = await self._farewell(pid)
        yield self._gone(reason)

    async def _connect(self) -> socket.socket:
        while True:
            try:
                return connect(self.path)
            except BlockingIOError:  # its queue is full: it is stopped, or many connect at once
                pass
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise  # else we have no room for it, which says nothing about it
            await asyncio.sleep(_RETRY)

    async def _farewell(self, pid: int) -> str:
        """Return why the stream ended: the process is over, or has only closed the connection."""
        pending = self._decoder.pending
        cut = f"; {pending:,} bytes of its last frame are cut" if pending else ""
        patience = time.monotonic() + _DYING
        while alive(pid):
            if time.monotonic() > patience:
                return f"{_process(pid)} closed the connection{cut}"
            await asyncio.sleep(0.02)
        return f"{_process(pid)} ended{cut}"

    def _gone(self, reason: str) -> Delivery:
        return Delivery(self._decoder.source, None, [SourceGone(self._now(), reason)])


class DirectorySource:
    """Every traced process whose socket is in a directory, or appears there while one iterates.

    `poll_s` seconds lie between two looks for new sockets. The iteration never ends by itself.
    Raises SocketError when the directory is there and not to be trusted.
    """

    def __init__(self, directory: Path, *, poll_s: float = 0.2) -> None:
        self._directory = directory
        self._poll_s = poll_s
        is_there(directory)

    def __aiter__(self) -> AsyncGenerator[Delivery, None]:
        return self._deliveries()

    async def _deliveries(self) -> AsyncGenerator[Delivery, None]:
        queue: asyncio.Queue[Delivery] = asyncio.Queue(AHEAD)
        watcher = asyncio.create_task(self._watch(queue))
        try:
            while True:
                yield await queue.get()
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self, queue: asyncio.Queue[Delivery]) -> None:
        """Follow each socket once: its file is told apart from a later one of the same name."""
        followed: dict[Path, tuple[int, int]] = {}
        names: set[str] = set()
        async with asyncio.TaskGroup() as readers:
            while True:
                found = {path: file for path in self._paths() if (file := _file(path)) is not None}
                # asked one by one: without a descriptor to spare a directory looks empty
                followed = {path: file for path, file in followed.items() if _file(path)}
                for path, file in found.items():
                    if followed.get(path) != file:
                        followed[path] = file
                        readers.create_task(self._follow(path, queue, names))
                await asyncio.sleep(self._poll_s)

    def _paths(self) -> list[Path]:
        try:
            return scan(self._directory) if is_there(self._directory) else []
        except SocketError:  # no longer to be trusted
            return []

    async def _follow(self, path: Path, queue: asyncio.Queue[Delivery], names: set[str]) -> None:
        name = ""
        source = LiveSource(path)
        try:
            async with contextlib.aclosing(aiter(source)) as deliveries:
                async for delivery in deliveries:
                    if source.dead:  # it died before any viewer saw it
                        remove_dead(path)
                        return
                    if not name and delivery.source in names:
                        gone = SourceGone(clock.now(), "has the name of another source: ignored")
                        await queue.put(Delivery(path.stem, None, [gone]))
                        return
                    name = name or delivery.source
                    names.add(name)
                    await queue.put(delivery)
        finally:
            names.discard(name)


@dataclass(frozen=True, slots=True)
class Found:
    """A traced process that is alive. `problem` says why there is no header: it does not answer, or
    is not ours."""

    path: Path
    pid: int
    header: Header | None = None
    problem: str = ""


def is_there(directory: Path) -> bool:
    """Return True for a socket directory that can be used, False for one that does not exist yet.

    Raises SocketError for one that is not to be trusted.
    """
    try:
        if not directory.exists():
            return False
    except OSError as error:  # a folder above it is closed to us
        raise SocketError(f"no socket directory {directory}: {why(error)}") from None
    private_directory(directory, create=False)
    return True


def refusals() -> list[str]:
    """Return why directories in which traced processes may be are not to be trusted."""
    reasons = []
    for directory in search_directories():
        try:
            is_there(directory)
        except SocketError as error:
            reasons.append(str(error))
    return reasons


def discover(directory: Path | None = None, *, timeout: float = 1.0) -> list[Found]:
    """Return the traced processes of this user that are alive, in `directory` or wherever they
    usually are.

    Connects to each until its header has come, at most `timeout` seconds over all, and removes the
    sockets of dead ones. Raises SocketError for a `directory` that is not to be trusted; one that
    is missing is empty.
    """
    found: list[Found] = []
    asked: dict[socket.socket, tuple[Path, FrameReader]] = {}
    for path in _sockets(directory):
        try:
            asked[connect(path)] = path, FrameReader()
        except ConnectionRefusedError:
            remove_dead(path)
        except BlockingIOError:
            found.append(Found(path, pid_of(path), problem="does not answer"))
        except FileNotFoundError:  # it has just gone
            continue
        except OSError as error:
            found.append(Found(path, pid_of(path), problem=_sentence(error, path)))
    found += _headers(asked, timeout)
    return sorted(found, key=lambda each: (each.pid, each.path))


def _sockets(directory: Path | None) -> Iterator[Path]:
    """Yield the sockets of a directory, or of all usual ones that can be trusted."""
    for place in [directory] if directory is not None else search_directories():
        try:
            if not is_there(place):
                continue
        except SocketError:
            if directory is not None:
                raise
            continue
        remove_unfinished(place)
        yield from scan(place)


def _headers(
    asked: dict[socket.socket, tuple[Path, FrameReader]], timeout: float
) -> Iterator[Found]:
    """Wait for the headers of these processes, close the connections, and yield what came."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for connection in asked:
            selector.register(connection, selectors.EVENT_READ)
        while asked and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection = key.fileobj  # type: ignore[assignment]
                answer = _answer(connection, *asked[connection])
                if answer is not None:
                    yield answer
                    selector.unregister(connection)
                    del asked[connection]
                    connection.close()
    for connection, (path, _) in asked.items():
        yield Found(path, pid_of(path), problem="does not answer")
        connection.close()


def _answer(connection: socket.socket, path: Path, reader: FrameReader) -> Found | None:
    """Return what the process sent about itself; None while that is not complete."""
    pid = peer(connection).pid or pid_of(path)
    try:
        data = connection.recv(4096)
        for payload in reader.feed(data):
            frame, _ = decode(payload)
            if not isinstance(frame, Hello):
                raise FrameError("sent no header: not a traced process")
            return Found(path, pid, frame.header)
        if not data:
            return Found(path, pid, problem="closed the connection")
        if reader.pending > MAX_HELLO:
            raise FrameError("sent too long a header: not a traced process")
    except BlockingIOError:
        return None
    except OSError as error:
        return Found(path, pid, problem=_sentence(error, path))
    except FrameError as error:
        return Found(path, pid, problem=str(error))
    return None


def _file(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _process(pid: int) -> str:
    return f"process {pid}" if pid else "the process"


def _sentence(error: OSError, path: Path) -> str:
    if isinstance(error, SocketError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"no socket {path}"
    return f"cannot connect to {path}: {why(error)}"

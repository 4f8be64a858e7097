"""`tracer relay`: carries what the traced processes of this host say over its own stdin and stdout.

It is what `tracer attach ssh://HOST` starts at the other end of an SSH connection. It opens no
port, decodes nothing and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.sockets import (
    SocketError,
    connect,
    private_directory,
    remove_dead,
    scan,
    search_directories,
)
from tracer.transport.run_folders import run_folders
from tracer.transport.ssh.packets import (
    ACK,
    CLOSE,
    DATA,
    MAGIC,
    OPEN,
    PING,
    START,
    WINDOW,
    LinkError,
    Packet,
    PacketReader,
    pong,
)
from tracer.transport.targets import Target, choose, find_targets

LOOK_S: Final = 0.3
"""Seconds between two looks for new processes."""
CHUNK: Final = 64 * 1024


class Relay:
    """Carries the processes of `target`, or all of this user, until its reader goes."""

    def __init__(self, target: Target | None, write: asyncio.WriteTransport) -> None:
        self._target = target
        self._write = write
        self._started = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._sent = self._taken = 0
        self._channels = 0
        self._seen: set[tuple[Path, int]] = set()

    async def run(self, orders: asyncio.StreamReader) -> None:
        """Until `orders` end. Raises LinkError for what is no order."""
        self._write.write(MAGIC)
        watching = asyncio.create_task(self._watch())
        packets = PacketReader()
        try:
            while data := await orders.read(CHUNK):
                for packet in packets.feed(data):
                    self._obey(packet)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _obey(self, packet: Packet) -> None:
        if packet.kind == PING:
            self._write.write(pong(packet.number, clock.now()).encode())
        elif packet.kind == ACK:
            self._taken = max(self._taken, packet.number)
            if self._sent - self._taken < WINDOW:
                self._room.set()
        elif packet.kind == START:
            self._started.set()

    async def _watch(self) -> None:
        """Open a channel for each socket, once."""
        await self._started.wait()
        async with asyncio.TaskGroup() as readers:
            while True:
                for path in self._paths():
                    with contextlib.suppress(OSError):
                        known = path, path.stat().st_ino
                        if known not in self._seen:
                            self._seen.add(known)
                            readers.create_task(self._carry(path))
                await asyncio.sleep(LOOK_S)

    def _paths(self) -> list[Path]:
        if self._target is not None and self._target.folder is None:
            return [found.path for found in self._target.processes]
        folders = (
            [self._target.folder]
            if self._target is not None
            else [*search_directories(), *run_folders()]
        )
        paths: list[Path] = []
        for folder in folders:
            with contextlib.suppress(SocketError, OSError):
                if folder is not None and folder.exists():
                    paths += scan(private_directory(folder, create=False))
        return paths

    async def _carry(self, path: Path) -> None:
        """Carry one process's socket, byte by byte as it comes, while there is room on the way."""
        connection = await self._connect(path)
        if connection is None:
            return
        self._channels += 1
        channel = self._channels
        loop = asyncio.get_running_loop()
        self._write.write(
            Packet(OPEN, channel, path.stem.encode("utf-8", "replace")[:200]).encode()
        )
        reason = "closed its connection"
        with connection:
            while True:
                await self._room.wait()
                try:
                    data = await loop.sock_recv(connection, CHUNK)
                except OSError as error:
                    reason = f"connection lost: {error.strerror}"
                    break
                if not data:
                    break
                self._sent += len(data)
                if self._sent - self._taken >= WINDOW:
                    self._room.clear()
                self._write.write(Packet(DATA, channel, data).encode())
        self._write.write(Packet(CLOSE, channel, reason.encode()).encode())

    async def _connect(self, path: Path) -> socket.socket | None:
        while True:
            try:
                return connect(path)
            except BlockingIOError:
                await asyncio.sleep(LOOK_S)
            except ConnectionRefusedError:
                remove_dead(path)
                return None
            except OSError:
                return None


def carry(wanted: str | None) -> int:
    """Carry the processes called `wanted`, or all, until stdin ends: the exit code. Raises
    TargetError, LinkError."""
    target = choose(find_targets(), wanted) if wanted else None
    if not (_carries(0) and _carries(1)):
        raise LinkError(
            "this is the far end of `tracer attach ssh://HOST`: it speaks to a program over its "
            "stdin and stdout, "
            "which must be pipes"
        )
    asyncio.run(_relay(target))
    return 0


def _carries(descriptor: int) -> bool:
    """Whether a program can be at the other end: a terminal, a file or a device says nothing, and
    never ends so."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


async def _relay(target: Target | None) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), os.fdopen(0, "rb", 0)
    )
    gone = asyncio.Event()

    class Out(asyncio.Protocol):
        """Notices that the reader has gone."""

        def connection_lost(self, error: Exception | None) -> None:
            gone.set()

    write, _ = await loop.connect_write_pipe(Out, os.fdopen(os.dup(1), "wb", 0))
    running = asyncio.create_task(Relay(target, write).run(orders))
    leaving = asyncio.create_task(gone.wait())
    await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not running.done():
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running

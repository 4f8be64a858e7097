"""`tracer relay`: carries the bytes of this host's traced processes over its own stdin and stdout.

`tracer attach ssh://HOST` starts it at the other end of an SSH connection. The relay opens no port,
decodes nothing and ends with its stdin.
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
from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.sockets import (
    SocketError,
    connect,
    remove_dead,
    scan,
    search_directories,
)
from tracer.transport.sources import is_there
from tracer.transport.ssh import packets
from tracer.transport.ssh.packets import WINDOW, Packet, PacketReader, RelayError
from tracer.transport.targets import Target, choose, find_targets, run_folders

POLL_S: Final = 0.3
"""Seconds between two looks for new processes."""
CHUNK: Final = 64 * 1024


class Relay:
    """Carries the processes of `target`, or all of this user."""

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
        """Carry until `orders` end. Raises RelayError for what is not an order."""
        self._write.write(packets.MAGIC)
        watching = asyncio.create_task(self._watch())
        reader = PacketReader()
        try:
            while data := await orders.read(CHUNK):
                for packet in reader.feed(data):
                    self._apply(packet)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _apply(self, packet: Packet) -> None:
        if packet.kind == packets.PING:
            self._write.write(packets.pong(packet.number, clock.now()).encode())
        elif packet.kind == packets.ACK:
            self._taken = max(self._taken, packet.number)
            if self._sent - self._taken < WINDOW:
                self._room.set()
        elif packet.kind == packets.START:
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
                await asyncio.sleep(POLL_S)

    def _paths(self) -> list[Path]:
        if self._target is not None and self._target.folder is None:
            return [found.path for found in self._target.processes]
        folders = [self._target.folder] if self._target else [*search_directories(), *run_folders()]
        paths: list[Path] = []
        for folder in folders:
            with contextlib.suppress(SocketError, OSError):
                if folder is not None and is_there(folder):
                    paths += scan(folder)
        return paths

    async def _carry(self, path: Path) -> None:
        """Carry one process's socket, byte by byte as it comes, while there is room on the way."""
        connection = await self._connect(path)
        if connection is None:
            return
        self._channels += 1
        channel = self._channels
        loop = asyncio.get_running_loop()
        name = path.stem.encode("utf-8", "replace")[:200]
        self._write.write(Packet(packets.OPEN, channel, name).encode())
        reason = "closed its connection"
        with connection:
            while True:
                await self._room.wait()
                try:
                    data = await loop.sock_recv(connection, CHUNK)
                except OSError as error:
                    reason = f"connection lost: {why(error)}"
                    break
                if not data:
                    break
                self._sent += len(data)
                if self._sent - self._taken >= WINDOW:
                    self._room.clear()
                self._write.write(Packet(packets.DATA, channel, data).encode())
        self._write.write(Packet(packets.CLOSE, channel, reason.encode()).encode())

    async def _connect(self, path: Path) -> socket.socket | None:
        while True:
            try:
                return connect(path)
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
            except ConnectionRefusedError:
                remove_dead(path)
                return None
            except OSError:
                return None


def carry(wanted: str | None) -> int:
    """Carry the processes called `wanted`, or all, until stdin ends; return the exit code.

    Raises TargetError and RelayError.
    """
    target = choose(find_targets(), wanted) if wanted else None
    if not (_is_pipe(0) and _is_pipe(1)):
        raise RelayError(
            "`tracer attach ssh://HOST` starts this on HOST: it needs a program at the other end "
            "of its stdin and stdout, which must be pipes"
        )
    asyncio.run(_relay(target))
    return 0


def _is_pipe(descriptor: int) -> bool:
    """Return True when a program can be at the other end: a terminal, a file or a device sends no
    orders, and never ends."""
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

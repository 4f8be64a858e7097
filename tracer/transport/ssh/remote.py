"""Engines on another host: their events over an SSH connection, without an open port.

`Remote` starts ``ssh HOST tracer relay`` and is a source like any other. The other host's clock is
matched with ours by the quickest of some round trips, and all stamps are moved by that offset, so
that several hosts can be shown together. A lost connection is made again; events lost meanwhile are
a `Gap` in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Final
from urllib.parse import unquote, urlsplit

import msgspec

from engine_hooks.protocol import clock
from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.clock import NS_PER_MS, ClockAnchor
from engine_hooks.protocol.events import Header, Scheduled, SourceGone
from engine_hooks.protocol.stream_decoder import Delivery, StreamDecoder
from tracer.format.text import clean
from tracer.transport.ssh import packets
from tracer.transport.ssh.packets import MAGIC, Packet, PacketReader, RelayError

SCHEME: Final = "ssh://"
ANSWER_S: Final = 40.0
"""Limit of the wait for a connection: there may be a password to type."""
RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each further try after a lost connection."""
SILENCE_S: Final = 10.0
"""A connection that does not answer a ping for so long is given up."""
PINGS: Final = 8
"""Round trips at the start; the quickest gives the offset."""
PING_S: Final = 2.0
RETURN_S: Final = 3.0
"""Limit, after a reconnection, of the wait for each known process; then it counts as ended."""
NOISE: Final = 64 * 1024
"""Bytes that a login shell may print before the relay speaks."""
CHUNK: Final = 64 * 1024
VARIABLE: Final = "TRACER_SSH"
"""The command that connects, in place of ``ssh``; its arguments are the host and a command."""
RELAY: Final = "TRACER_RELAY"
"""The command for ``tracer`` on the other host, where it is not in the PATH of a shell that is not
a login shell."""

_USER: Final = re.compile(r"[\w.][\w.-]*")
_HOST: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%]+\]")


@dataclass(frozen=True, slots=True)
class Address:
    """``ssh://[user@]host[:port][/target]``."""

    host: str
    user: str = ""
    port: int | None = None
    target: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address. Raises RelayError for anything else: nothing in it may be taken for an
        option of ssh."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise _no_address(text) from None
        user, _, host = parts.netloc.rpartition("@")
        host = host if host.endswith("]") else host.rpartition(":")[0] or host
        is_user = not user or _USER.fullmatch(user)
        if parts.scheme != "ssh" or not _HOST.fullmatch(host) or not is_user:
            raise _no_address(text)
        return cls(host.strip("[]"), user, port, unquote(parts.path.strip("/")))

    def command(self, *, ask: bool) -> list[str]:
        """Return the command that starts the relay on the host. With `ask` ssh may ask for a
        password or a host's key."""
        made = shlex.split(os.environ.get(VARIABLE, "")) or [
            "ssh", "-T", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3", *([] if ask else ["-o", "BatchMode=yes"]),
        ]  # fmt: skip
        made += ["-p", str(self.port)] if self.port is not None else []
        made.append(f"{self.user}@{self.host}" if self.user else self.host)
        relay = [*shlex.split(os.environ.get(RELAY, "") or "tracer"), "relay"]
        return [*made, shlex.join([*relay, *([self.target] if self.target else [])])]


def _no_address(text: str) -> RelayError:
    form = "ssh://[user@]host[:port][/target]"
    return RelayError(f"{clean(text)[:60]} is not an address: use {form}")


def is_remote(target: str) -> bool:
    return target.startswith(SCHEME)


@dataclass(slots=True)
class Connection:
    """A connection on which the relay has answered. `rest`: the bytes after its `MAGIC`."""

    process: subprocess.Popen[bytes]
    rest: bytes
    errors: IO[bytes]

    @classmethod
    def open(cls, address: Address, *, ask: bool) -> Connection:
        """Connect, and wait for the relay's answer. Raises RelayError with ssh's last line when
        there is none."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the connection)
        try:
            process = subprocess.Popen(
                address.command(ask=ask),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=not ask,
            )
        except OSError as error:
            raise RelayError(f"cannot run {error.filename}: {why(error)}") from None
        assert process.stdout is not None
        seen = b""
        deadline = time.monotonic() + ANSWER_S
        while MAGIC not in seen and len(seen) < NOISE and (left := deadline - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], left)[0]:
                break
            data = os.read(process.stdout.fileno(), CHUNK)
            if not data:
                break
            seen += data
        before, found, rest = seen.partition(MAGIC)
        if not found:
            process.kill()
            process.wait()
            reason = _last_line(errors, before) or "the relay did not answer"
            raise RelayError(f"{address.host}: {reason}")
        return cls(process, rest, errors)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.errors.close()


class Remote:
    """Every traced process behind `address`, as a source. To be iterated once.

    `connection` is the first one, made before a screen is drawn so that ssh can ask for a password.
    `on_status` gets the state of the connection in words, and `on_trouble` its problem (empty: none
    any more).
    """

    def __init__(self, address: Address, connection: Connection | None = None) -> None:
        self.address = address
        self.on_status: Callable[[str], None] = lambda _: None
        self.on_trouble: Callable[[str], None] = lambda _: None
        self.offset = 0
        """ns to add to the other host's monotonic clock to get ours."""
        self.round_trip: int | None = None
        """ns of the quickest round trip."""
        self.decoders: dict[str, StreamDecoder] = {}
        """Decoder of each process's stream, by name: kept from one connection to the next."""
        self._connection = connection
        self._boots: dict[str, str] = {}

    def __aiter__(self) -> AsyncGenerator[Delivery, None]:
        return self._deliveries()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _deliveries(self) -> AsyncGenerator[Delivery, None]:
        tries = 0
        while True:
            reason = f"{self.address.host}: the connection was lost"
            try:
                connection, self._connection = self._connection, None
                if connection is None:
                    connection = await asyncio.to_thread(Connection.open, self.address, ask=False)
                async with contextlib.aclosing(self._session(connection)) as deliveries:
                    async for delivery in deliveries:
                        tries = 0
                        yield delivery
            except RelayError as error:
                reason = str(error)
            wait = RETRY_S[min(tries, len(RETRY_S) - 1)]
            tries += 1
            self.on_trouble(f"{reason}; trying again in {wait:g} s")
            await asyncio.sleep(wait)

    async def _session(self, connection: Connection) -> AsyncGenerator[Delivery, None]:
        """Yield what comes over one connection. Raises RelayError for a peer that is not a relay or
        does not answer any more."""
        loop = asyncio.get_running_loop()
        process = connection.process
        reader = asyncio.StreamReader(limit=4 * CHUNK)
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        write, _ = await loop.connect_write_pipe(asyncio.Protocol, process.stdin)
        self.round_trip = None  # another way may lead there now
        session = _Session(self, write)
        pinging = asyncio.create_task(session.ping())
        decoder = PacketReader()
        data: bytes = connection.rest
        try:
            while True:
                for packet in decoder.feed(data):
                    for delivery in session.apply(packet):
                        yield delivery
                session.acknowledge()
                for delivery in session.ended_meanwhile():
                    yield delivery
                try:
                    async with asyncio.timeout(SILENCE_S):
                        data = await reader.read(CHUNK)
                except TimeoutError:
                    reason = f"{self.address.host}: no answer for {SILENCE_S:g} s"
                    raise RelayError(reason) from None
                if not data:
                    break
        finally:
            pinging.cancel()
            if not write.is_closing():
                write.abort()
            incoming.close()
            await asyncio.to_thread(connection.close)

    def measure(self, packet: Packet) -> None:
        """Set the offset from the quickest round trip: its error is at most half of it."""
        sent, there = packet.pair
        now = clock.now()
        trip = now - sent
        if trip >= 0 and (self.round_trip is None or trip < self.round_trip):
            self.round_trip = trip
            self.offset = (sent + now) // 2 - there

    @property
    def described(self) -> str:
        """The connection in words: how well the clocks match, not how far apart they are."""
        trip = (self.round_trip or 0) / NS_PER_MS
        clocks = f"clocks matched within ±{trip / 2:.1f} ms"
        return f"{self.address.host}: round trip {trip:.1f} ms, {clocks}"

    def moved(self, delivery: Delivery) -> Delivery:
        """Return a delivery with its stamps on our clock; those of our own boot are on it."""
        header = delivery.header
        if header is not None:
            self._boots[delivery.source] = header.boot_id
        boot = self._boots.get(delivery.source, "")
        if boot and boot == clock.boot_id():
            return delivery
        offset = self.offset
        for event in delivery.events:
            event.t = max(0, event.t + offset)
            if type(event) is Scheduled:
                event.lookup = max(0, event.lookup + offset)
        return replace(delivery, header=_on_our_clock(header, offset) if header else None)


class _Session:
    """The channels of one connection, and the effect of each packet."""

    def __init__(self, remote: Remote, write: asyncio.WriteTransport) -> None:
        self._remote = remote
        self._write = write
        self._host = remote.address.host
        self._decoders = remote.decoders
        self._channels: dict[int, str] = {}
        self._received = self._answered = 0
        self._started = time.monotonic()
        self._missed = set(remote.decoders)

    async def ping(self) -> None:
        for sent in itertools.count(1):
            self._write.write(packets.number(packets.PING, clock.now()).encode())
            await asyncio.sleep(0.02 if sent < PINGS else PING_S)

    def apply(self, packet: Packet) -> Iterable[Delivery]:
        """Apply one packet and yield its deliveries; one of an unknown channel has none."""
        if packet.kind == packets.PONG:
            self._answer(packet)
        elif packet.kind == packets.OPEN:
            self._open(packet)
        elif packet.channel in self._channels:
            if packet.kind == packets.DATA:
                return self._data(packet)
            if packet.kind == packets.CLOSE:
                return [self._gone(self._channels.pop(packet.channel), packet.text)]
        return ()

    def acknowledge(self) -> None:
        if self._received:
            self._write.write(packets.number(packets.ACK, self._received).encode())

    def ended_meanwhile(self) -> Iterator[Delivery]:
        """Yield the ends of processes that did not return after the connection was lost."""
        waited = time.monotonic() - self._started > RETURN_S
        if waited and self._answered >= PINGS:
            for name in sorted(self._missed):
                yield self._gone(name, "ended while the connection was lost")
            self._missed = set()

    def _answer(self, packet: Packet) -> None:
        self._answered += 1
        self._remote.measure(packet)
        if self._answered == PINGS:
            self._write.write(Packet(packets.START).encode())
            self._remote.on_trouble("")
            self._remote.on_status(self._remote.described)

    def _open(self, packet: Packet) -> None:
        self._channels[packet.channel] = name = packet.text
        self._missed.discard(name)
        if name in self._decoders:
            self._decoders[name].resume()
        else:
            self._decoders[name] = StreamDecoder(f"{self._host}:{name}")

    def _data(self, packet: Packet) -> Iterator[Delivery]:
        self._received += len(packet.payload)
        name = self._channels[packet.channel]
        delivery = self._decoders[name].feed(packet.payload)
        if delivery is not None:
            yield self._remote.moved(delivery)
        if self._decoders[name].fault:
            yield self._gone(name, self._decoders[name].fault)
            del self._channels[packet.channel]

    def _gone(self, name: str, reason: str) -> Delivery:
        decoder = self._decoders.pop(name)
        return Delivery(decoder.source, None, [SourceGone(clock.now(), clean(reason)[:200])])


def _on_our_clock(header: Header, offset: int) -> Header:
    """Return the header with its anchor moved: the wall time stays that of its host."""
    anchor = ClockAnchor(header.anchor.monotonic + offset, header.anchor.wall)
    return msgspec.structs.replace(header, anchor=anchor)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Processes on other hosts; see `tracer.transport.targets` for those of this one."""

    name: str
    remotes: tuple[Remote, ...]

    @classmethod
    def open(cls, targets: Sequence[str]) -> RemoteTarget:
        """Connect to each of these addresses, one after another, before anything is drawn.

        Raises RelayError.
        """
        remotes: list[Remote] = []
        try:
            for address in [Address.parse(target) for target in targets]:
                remotes += [Remote(address, Connection.open(address, ask=True))]
        except BaseException:
            for remote in remotes:
                remote.close()
            raise
        return cls(", ".join(remote.address.host for remote in remotes), tuple(remotes))

    def sources(self) -> list[Remote]:
        """Return where their events come from. Each is to be iterated once."""
        return list(self.remotes)


def _last_line(errors: IO[bytes], printed: bytes) -> str:
    """Return the last line of ssh or of the far shell."""
    errors.seek(0)
    output = (errors.read() or printed).decode("utf-8", "replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return clean(lines[-1])[:200] if lines else ""

"""Engines on another host: their events over an SSH connection, without an open port.

`Remote` starts ``ssh HOST tracer relay`` and is a source like any other. The other host's clock is
laid beside ours by the quickest of some round trips, and all stamps are moved by that offset before
anyone sees them, so that several hosts can be shown together. A connection that breaks is made
again; what was lost meanwhile is a `Gap` in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import IO, Final
from urllib.parse import unquote, urlsplit

import msgspec

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_MS, ClockAnchor
from engine_hooks.protocol.events import Header, Scheduled, SourceGone
from engine_hooks.protocol.stream_decoder import Delivery, Intake
from tracer.format.text import clean
from tracer.transport.ssh.packets import (
    ACK,
    CLOSE,
    DATA,
    MAGIC,
    OPEN,
    PING,
    PONG,
    START,
    LinkError,
    Packet,
    PacketReader,
    number,
)

SCHEME: Final = "ssh://"
ANSWER_S: Final = 40.0
"""How long a host may take to let us in: there may be a password to type."""
AGAIN_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each further try at a connection that broke."""
SILENCE_S: Final = 10.0
"""A link that does not answer a ping for so long is given up."""
PINGS: Final = 8
"""Round trips at the start, of which the quickest tells the offset."""
PING_S: Final = 2.0
RETURN_S: Final = 3.0
"""After a connection was made again: how long a process may take to be there again before it is
taken as ended."""
NOISE: Final = 64 * 1024
"""Bytes that a login shell may print before the relay speaks."""
CHUNK: Final = 64 * 1024
VARIABLE: Final = "TRACER_SSH"
"""The command that makes a connection, where it is not ``ssh``: it is given the host and a command
to run there."""
RELAY: Final = "TRACER_RELAY"
"""What is called ``tracer`` over there, where it is not in the PATH of a shell that is not a login
shell."""

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
        """Read one. Raises LinkError for what is none: nothing in it may be taken for an option of
        ssh."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise LinkError(
                f"{clean(text)[:60]} is no address: use ssh://[user@]host[:port][/target]"
            ) from None
        host, user = parts.netloc.rpartition("@")[2], parts.netloc.rpartition("@")[0]
        host = host if host.endswith("]") else host.rpartition(":")[0] or host
        if (
            parts.scheme != "ssh"
            or not _HOST.fullmatch(host)
            or (user and not re.fullmatch(r"[\w.][\w.-]*", user))
        ):
            raise LinkError(
                f"{clean(text)[:60]} is no address: use ssh://[user@]host[:port][/target]"
            )
        return cls(host.strip("[]"), user, port, unquote(parts.path.strip("/")))

    def command(self, *, ask: bool) -> list[str]:
        """What starts the relay over there. `ask`: whether ssh may ask for a password or a host's
        key."""
        made = shlex.split(os.environ.get(VARIABLE, "")) or [
            "ssh",
            "-T",
            "-o",
            "ConnectTimeout=15",
            "-o",
            "ServerAliveInterval=5",
            "-o",
            "ServerAliveCountMax=3",
            *([] if ask else ["-o", "BatchMode=yes"]),
        ]
        made += ["-p", str(self.port)] if self.port is not None else []
        relay = [
            *shlex.split(os.environ.get(RELAY, "") or "tracer"),
            "relay",
            *([self.target] if self.target else []),
        ]
        return [*made, f"{self.user}@{self.host}" if self.user else self.host, shlex.join(relay)]


def is_remote(target: str) -> bool:
    """Whether a target names another host."""
    return target.startswith(SCHEME)


@dataclass(slots=True)
class Link:
    """A connection on which the relay has spoken. `rest`: what came after its first words."""

    process: subprocess.Popen[bytes]
    rest: bytes
    errors: IO[bytes]

    @classmethod
    def open(cls, address: Address, *, ask: bool) -> Link:
        """Connect, and wait until the relay speaks. Raises LinkError with the last word of ssh when
        it does not."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the link)
        try:
            process = subprocess.Popen(
                address.command(ask=ask),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=not ask,
            )
        except OSError as error:
            raise LinkError(
                f"cannot run {error.filename}: {(error.strerror or '').lower()}"
            ) from None
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
            raise LinkError(
                f"{address.host}: {_last_word(errors, before) or 'the relay did not answer'}"
            )
        return cls(process, rest, errors)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.errors.close()


class Remote:
    """Every traced process behind `address`, as a source. To be iterated once.

    `link` is the first connection, made before a screen is drawn so that ssh can ask what it has
    to. `say` is told what the state of the connection is, and `on_trouble` what is wrong with it
    (empty: nothing any more).
    """

    def __init__(self, address: Address, link: Link | None = None) -> None:
        self.address = address
        self.say: Callable[[str], None] = lambda _: None
        self.on_trouble: Callable[[str], None] = lambda _: None
        self.offset = 0
        """ns to add to the other host's monotonic clock to get ours."""
        self.round_trip: int | None = None
        """ns of the quickest round trip."""
        self._link = link
        self._intakes: dict[str, Intake] = {}
        self._boots: dict[str, str] = {}

    def __aiter__(self) -> AsyncGenerator[Delivery, None]:
        return self._deliveries()

    def close(self) -> None:
        """End a connection that was never used."""
        if self._link is not None:
            self._link.close()

    async def _deliveries(self) -> AsyncGenerator[Delivery, None]:
        tries = 0
        while True:
            reason = ""
            try:
                link, self._link = self._link, None
                if link is None:
                    link = await asyncio.to_thread(Link.open, self.address, ask=False)
                async with contextlib.aclosing(self._session(link)) as deliveries:
                    async for delivery in deliveries:
                        tries = 0
                        yield delivery
            except LinkError as error:
                reason = str(error)
            wait = AGAIN_S[min(tries, len(AGAIN_S) - 1)]
            tries += 1
            self.on_trouble(
                f"{reason or f'{self.address.host}: the connection was lost'}; trying again in "
                f"{wait:g} s"
            )
            await asyncio.sleep(wait)

    async def _session(self, link: Link) -> AsyncGenerator[Delivery, None]:
        """One connection. Raises LinkError for a peer that is no relay or does not answer any
        more."""
        loop = asyncio.get_running_loop()
        assert link.process.stdout is not None and link.process.stdin is not None
        reader = asyncio.StreamReader(limit=4 * CHUNK)
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), link.process.stdout
        )
        write, _ = await loop.connect_write_pipe(asyncio.Protocol, link.process.stdin)
        self.round_trip = None  # another way may lead there now
        pinging = asyncio.create_task(self._ping(write))
        channels: dict[int, str] = {}
        here: set[str] = set()
        packets = PacketReader()
        taken, answered = 0, 0
        started = time.monotonic()
        missed = set(self._intakes)
        try:
            data: bytes = link.rest
            while True:
                for packet in packets.feed(data):
                    if packet.kind == PONG:
                        answered += 1
                        self._measure(packet)
                        if answered == PINGS:
                            write.write(Packet(START).encode())
                            self.on_trouble("")
                            self.say(self.described)
                    elif packet.kind == OPEN:
                        channels[packet.channel] = name = packet.text
                        here.add(name)
                        missed.discard(name)
                        if name in self._intakes:
                            self._intakes[name].resume()
                        else:
                            self._intakes[name] = Intake(f"{self.address.host}:{name}")
                    elif packet.kind == DATA and packet.channel in channels:
                        taken += len(packet.payload)
                        name = channels[packet.channel]
                        delivery = self._intakes[name].feed(packet.payload)
                        if delivery is not None:
                            yield self._moved(delivery)
                        if self._intakes[name].fault:
                            yield self._gone(name, self._intakes[name].fault)
                            del channels[packet.channel]
                    elif packet.kind == CLOSE and packet.channel in channels:
                        yield self._gone(channels.pop(packet.channel), packet.text)
                if taken:
                    write.write(number(ACK, taken).encode())
                if missed and time.monotonic() - started > RETURN_S and answered >= PINGS:
                    for name in sorted(missed):
                        yield self._gone(name, "ended while the connection was lost")
                    missed = set()
                try:
                    async with asyncio.timeout(SILENCE_S):
                        data = await reader.read(CHUNK)
                except TimeoutError:
                    raise LinkError(f"{self.address.host}: no answer for {SILENCE_S:g} s") from None
                if not data:
                    break
        finally:
            pinging.cancel()
            if not write.is_closing():
                write.abort()
            incoming.close()
            await asyncio.to_thread(link.close)

    async def _ping(self, write: asyncio.WriteTransport) -> None:
        sent = 0
        while True:
            write.write(number(PING, clock.now()).encode())
            sent += 1
            await asyncio.sleep(0.02 if sent < PINGS else PING_S)

    def _measure(self, packet: Packet) -> None:
        """Take the offset from the quickest round trip: its error is at most half of it."""
        sent, there = packet.pair
        now = clock.now()
        trip = now - sent
        if trip >= 0 and (self.round_trip is None or trip < self.round_trip):
            self.round_trip = trip
            self.offset = (sent + now) // 2 - there

    @property
    def described(self) -> str:
        """The link in words: how far the clocks are apart in wall time is not the question, how
        well they are laid beside each other is."""
        trip = (self.round_trip or 0) / NS_PER_MS
        return (
            f"{self.address.host}: round trip {trip:.1f} ms, clocks matched within ±{trip / 2:.1f} "
            "ms"
        )

    def _moved(self, delivery: Delivery) -> Delivery:
        """A delivery with its stamps on our clock. Those of our own boot are on it already."""
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
        return Delivery(
            delivery.source, _on_our_clock(header, offset), delivery.events, delivery.unknown
        )

    def _gone(self, name: str, reason: str) -> Delivery:
        intake = self._intakes.pop(name)
        return Delivery(intake.source, None, [SourceGone(clock.now(), clean(reason)[:200])])


def _on_our_clock(header: Header | None, offset: int) -> Header | None:
    """The header with its anchor moved: the wall time stays that of its host."""
    if header is None:
        return None
    anchor = ClockAnchor(header.anchor.monotonic + offset, header.anchor.wall)
    return msgspec.structs.replace(header, anchor=anchor)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Processes on another host, or on several, beside which the targets of this host stand in
    `tracer.transport.targets`."""

    name: str
    remotes: tuple[Remote, ...]

    @classmethod
    def open(cls, targets: Sequence[str]) -> RemoteTarget:
        """Connect to each of these addresses, one after another, before anything is drawn. Raises
        LinkError."""
        remotes: list[Remote] = []
        try:
            for address in [Address.parse(target) for target in targets]:
                remotes += [Remote(address, Link.open(address, ask=True))]
        except BaseException:
            for remote in remotes:
                remote.close()
            raise
        return cls(", ".join(remote.address.host for remote in remotes), tuple(remotes))

    def sources(self) -> list[Remote]:
        """Where their events come from. Each is to be iterated once."""
        return list(self.remotes)


def _last_word(errors: IO[bytes], printed: bytes) -> str:
    """What ssh or the far shell said last, in one line."""
    errors.seek(0)
    said = (errors.read() or printed).decode("utf-8", "replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return clean(lines[-1])[:200] if lines else ""

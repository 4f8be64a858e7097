"""Packets between a relay beside an engine and a viewer on another host, over one pair of pipes.

A packet is a kind, a channel, a length (little-endian) and so many bytes. Before the first one the
relay writes `MAGIC`: output of a login shell before it is skipped. The bytes of a channel are those
of one traced process's socket, untouched, so that nothing about events is defined twice.

Downstream: `OPEN` (a name), `DATA`, `CLOSE` (why), `PONG` (the ping's token, the relay's monotonic
ns). Upstream: `START`, `PING` (a token), `ACK` (bytes of `DATA` received so far). A relay sends at
most `WINDOW` bytes beyond the acknowledged ones: a slow connection then makes the engine's own
buffer drop its oldest events, which is counted, instead of showing a minute-old state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.errors import UserError

MAGIC: Final = b"\x00tracer-relay 1\n"
OPEN, DATA, CLOSE, PONG, START, PING, ACK = range(1, 8)
WINDOW: Final = 256 * 1024
"""Bytes under way at most: a quarter of a second at 1 MB/s."""
MAX_PACKET: Final = 64 * 1024 + 64
"""Bytes of a payload; a longer one comes from a broken or hostile peer."""

_HEAD: Final = struct.Struct("<BII")
_NUMBER: Final = struct.Struct("<Q")
_PAIR: Final = struct.Struct("<QQ")


class RelayError(UserError, ValueError):
    """The peer does not speak our protocol, or cannot be reached. The message is one line fit for a
    user."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet. `channel` is 0 for those that belong to none."""

    kind: int
    channel: int = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        return _HEAD.pack(self.kind, self.channel, len(self.payload)) + self.payload

    @property
    def number(self) -> int:
        """Number of a `PING` or an `ACK`. Raises RelayError."""
        return int(self._numbers(_NUMBER)[0])

    @property
    def pair(self) -> tuple[int, int]:
        """Token and monotonic ns of a `PONG`. Raises RelayError."""
        token, instant = self._numbers(_PAIR)
        return token, instant

    @property
    def text(self) -> str:
        return self.payload.decode("utf-8", "replace")

    def _numbers(self, kind: struct.Struct) -> tuple[int, ...]:
        if len(self.payload) != kind.size:
            raise RelayError("a packet of the wrong length: not a tracer relay")
        return kind.unpack(self.payload)


def number(kind: int, value: int) -> Packet:
    """Return a packet that carries a number."""
    return Packet(kind, 0, _NUMBER.pack(value))


def pong(token: int, instant: int) -> Packet:
    """Return the answer to a ping: its token, and when it came in ns of the answering host's
    monotonic clock."""
    return Packet(PONG, 0, _PAIR.pack(token, instant))


class PacketReader:
    """Cuts a byte stream into packets, at whatever places the bytes are split."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Packet]:
        """Add bytes; yield each packet that is now whole. Raises RelayError for anything else."""
        self._pending += data
        start = 0
        try:
            while len(self._pending) - start >= _HEAD.size:
                kind, channel, size = _HEAD.unpack_from(self._pending, start)
                if not OPEN <= kind <= ACK or size > MAX_PACKET:
                    raise RelayError("what came is not a packet: not a tracer relay")
                end = start + _HEAD.size + size
                if end > len(self._pending):
                    break
                yield Packet(kind, channel, bytes(self._pending[start + _HEAD.size : end]))
                start = end
        finally:
            del self._pending[:start]

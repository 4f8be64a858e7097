"""A relay on a host whose clock has nothing to do with ours: it says one request and then waits.

Usage, as TRACER_SSH: ``python far_clock.py OFFSET_NS``.
"""

from __future__ import annotations

import os
import sys
import time

from engine_hooks.protocol.clock import NS_PER_MS, ClockAnchor
from engine_hooks.protocol.events import Header, Queued, Received, Scheduled
from engine_hooks.protocol.frames import Hello, encode, encode_events
from tracer.transport.ssh.packets import DATA, MAGIC, OPEN, PING, START, Packet, PacketReader, pong


def main() -> None:
    """Answer pings by the other clock, and tell the request once asked to start."""
    offset = int(sys.argv[1])

    def now() -> int:
        return time.monotonic_ns() + offset

    os.write(1, MAGIC)
    packets = PacketReader()
    while data := os.read(0, 4096):
        for packet in packets.feed(data):
            if packet.kind == PING:
                os.write(1, pong(packet.number, now()).encode())
            elif packet.kind == START:
                at = now()
                anchor = ClockAnchor(at, 1_700_000_000_000_000_000)
                said = encode(
                    Hello(Header(1, "far:1:aa", 1, "engine", "far", "far", "another boot", anchor))
                )
                events = [
                    Received(at, 1, "one", "/v1", "one"),
                    Queued(at + NS_PER_MS, 1, "one", 3, 4),
                    Scheduled(at + 3 * NS_PER_MS, 1, at + 2 * NS_PER_MS),
                ]
                for frame in encode_events(0, events):  # type: ignore[arg-type]
                    said += frame
                os.write(1, Packet(OPEN, 1, b"1-aa").encode() + Packet(DATA, 1, said).encode())


main()

"""Frames on their way to one viewer, which may read them slowly or not at all.

The engine never waits for a viewer and never grows because of one: the queue is bounded in bytes,
and beyond its room the oldest whole frames go. The viewer sees the loss in the sequence numbers of
what follows. What a viewer must have to understand the rest (who speaks, and the snapshot) is kept
apart, sent first and never dropped; its size is bounded by `engine_hooks.protocol.attach_state`.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable
from typing import Final

ROOM: Final = 8 * 1024 * 1024
"""Bytes of frames that may wait for one viewer: over a minute of a busy engine. Beyond it the
oldest go."""

PATIENCE: Final = 64 * 1024
"""Bytes that a viewer may send us, which has nothing to say, before it is taken for something
else."""


class Outbox:
    """Queue and connection of one viewer."""

    __slots__ = (
        "_first",
        "_frames",
        "_identity",
        "_partial",
        "_room",
        "_said",
        "_waiting",
        "connection",
        "dropped",
    )

    def __init__(self, connection: socket.socket, room: int = ROOM) -> None:
        self.connection = connection
        self.dropped = 0
        """Frames dropped so far because the viewer did not read them."""
        self._room = room
        self._identity = identity(connection)
        self._first: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()
        self._partial: memoryview | None = None
        self._waiting = 0
        self._said = 0

    def put_first(self, frames: Iterable[bytes]) -> None:
        """Queue frames that go before all others and are never dropped."""
        self._first.extend(frames)

    def put(self, frames: Iterable[bytes]) -> None:
        """Queue frames; the oldest ones make room."""
        for frame in frames:
            self._frames.append(frame)
            self._waiting += len(frame)
        while self._waiting > self._room and len(self._frames) > 1:
            self._waiting -= len(self._frames.popleft())
            self.dropped += 1

    @property
    def waiting(self) -> bool:
        """Whether anything is still to be sent."""
        return self._partial is not None or bool(self._first) or bool(self._frames)

    @property
    def size(self) -> int:
        """Bytes of frames that wait and may be dropped."""
        return self._waiting

    def flush(self) -> bool:
        """Send what the connection takes now, without waiting. False when the viewer is gone."""
        if not self._intact():
            return False
        try:
            while (rest := self._next()) is not None:
                sent = self.connection.send(rest)
                self._partial = rest[sent:] if sent < len(rest) else None
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def heard(self) -> bool:
        """Look at what the viewer sent. False when it has hung up, or talks as no viewer does."""
        if not self._intact():
            return False
        try:
            data = self.connection.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._said += len(data)
        return bool(data) and self._said <= PATIENCE

    def close(self) -> None:
        """Close the connection, unless its descriptor has become someone else's."""
        if self._intact():
            self.connection.close()
        else:
            self.connection.detach()

    def _next(self) -> memoryview | None:
        if self._partial is None:
            if self._first:
                self._partial = memoryview(self._first.popleft())
            elif self._frames:
                frame = self._frames.popleft()
                self._waiting -= len(frame)
                self._partial = memoryview(frame)
        return self._partial

    def _intact(self) -> bool:
        return identity(self.connection) == self._identity


def identity(connection: socket.socket) -> tuple[int, int] | None:
    """Which open socket the descriptor stands for, None when for none.

    A program that turns itself into a daemon closes all descriptors, ours included, and may open
    files of its own under the same numbers: whoever writes compares first.
    """
    try:
        found = os.fstat(connection.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino

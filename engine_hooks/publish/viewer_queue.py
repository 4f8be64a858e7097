"""Frames on their way to one viewer, which may read them slowly or not at all.

The engine never waits for a viewer and never grows because of one: the queue is bounded in bytes,
and beyond its room the oldest whole frames go. The viewer sees the loss in the sequence numbers of
what follows. What a viewer must have to understand the rest (the header and the snapshot) is kept
apart, sent first and never dropped; its size is bounded by `engine_hooks.protocol.attach_state`.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOM: Final = 8 * 1024 * 1024
"""Bytes of frames that may wait for one viewer: over a minute of a busy engine. Beyond it the
oldest go."""

PATIENCE: Final = 64 * 1024
"""Bytes that a viewer, which has nothing to say, may send us before it is taken for something
else."""


class ViewerQueue:
    """Queue and connection of one viewer."""

    def __init__(self, connection: socket.socket, room: int = ROOM) -> None:
        self.connection = connection
        self.attached = False
        """True once the snapshot is queued: from then on the viewer gets every event."""
        self._room = room
        self._identity = identity(connection.fileno())
        self._first: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()
        self._partial: memoryview | None = None
        self._waiting = 0
        self._received = 0

    def append_first(self, frames: Iterable[bytes]) -> None:
        """Queue frames that go before all others and are never dropped."""
        self._first.extend(frames)

    def append(self, frames: Iterable[bytes]) -> None:
        """Queue frames; the oldest ones make room."""
        for frame in frames:
            self._frames.append(frame)
            self._waiting += len(frame)
        while self._waiting > self._room and len(self._frames) > 1:
            self._waiting -= len(self._frames.popleft())

    @property
    def waiting(self) -> bool:
        """True while something is still to be sent."""
        return self._partial is not None or bool(self._first) or bool(self._frames)

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

    def check_input(self) -> bool:
        """Read what the viewer sent. False when it has hung up, or talks as no viewer does."""
        if not self._intact():
            return False
        try:
            data = self.connection.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += len(data)
        return bool(data) and self._received <= PATIENCE

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
        return identity(self.connection.fileno()) == self._identity


def identity(file: int | Path | None) -> tuple[int, int] | None:
    """Return which file a descriptor or a path stands for, None when for none.

    A program that turns itself into a daemon closes all descriptors, ours included, and may open
    files of its own under the same numbers: compare before writing.
    """
    try:
        found = None if file is None else os.stat(file)  # noqa: PTH116  (a descriptor, or a path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)

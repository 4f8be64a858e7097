"""Reads a traced process's socket to its end, the plain way, so that tests see what a viewer
gets."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from engine_hooks.protocol import events
from engine_hooks.protocol.frames import Batch, FrameReader, SequenceCheck, decode

E = TypeVar("E", bound=events.Event)


class Collector:
    """Collects every event from a socket on a thread of its own until `stop` or the end of the
    stream.

    Requests that were told before it joined are left out unless `late`.
    """

    def __init__(self, path: Path, *, late: bool = False) -> None:
        self._late = late
        self._joined = threading.Event()
        self.events: list[events.Event] = []
        self.missing = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        assert self._joined.wait(20), "the traced process said nothing"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Wait until nothing more comes, then hang up."""
        count = -1
        while count != len(self.events):
            count = len(self.events)
            time.sleep(0.3)
        self._socket.close()

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type so far, in order of arrival."""
        return [event for event in self.events if isinstance(event, kind)]

    def _read(self) -> None:
        reader, check = FrameReader(), SequenceCheck()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            for payload in reader.feed(data):
                frame, unknown = decode(payload)
                if isinstance(frame, Batch):
                    self._joined.set()
                    self.missing += check.missed(frame, unknown)
                    self.events += [
                        event
                        for event in frame.events
                        # The heartbeat comes without end: it would keep `stop` waiting.
                        if not isinstance(event, events.Heartbeat)
                        and (
                            self._late
                            or not frame.snapshot
                            or isinstance(event, events.Engine | events.Coverage)
                        )
                    ]

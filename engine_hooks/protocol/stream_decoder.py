"""What a traced process said, read from bytes that nobody vouches for.

`StreamDecoder` turns the bytes of one stream into deliveries, whatever they are: losses become
`Gap` events in place, and what cannot be a stream of ours ends it with a sentence in `fault`. It
does no I/O, so a socket, a pipe from another host and a test feed it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import Event, Gap, Header
from engine_hooks.protocol.frames import (
    Batch,
    FrameError,
    FrameReader,
    Hello,
    SequenceCheck,
    decode,
)

MAX_HELLO: Final = 64 * 1024
"""Bytes of the first frame. An honest one has some 200."""

MAX_DAMAGED: Final = 8
"""Frames in a row that may be unreadable before the stream is given up."""

MAX_GAP: Final = 2**40
"""Events that may be missing at once: a larger jump of the numbers is no loss but nonsense."""

AHEAD: Final = 10 * NS_PER_S
"""How far in the future an event of this host may be stamped. Beyond it the stamp is wrong and the
event is missing."""

SAME_CLOCK: Final = 60 * NS_PER_S
"""How far the wall-to-monotonic offsets of two anchors of the same boot may differ: the wall clock
gets adjusted."""

_LATEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """Events of one source, in its order. `source` names it for the life of the trace; `header`
    stands in its first delivery and again when it changes; `unknown` counts events that this
    version does not know."""

    source: str
    header: Header | None = None
    events: list[Event] = field(default_factory=list)
    unknown: int = 0


class StreamDecoder:
    """Reads one stream. `name` stands for the source until its header has come."""

    def __init__(self, name: str, now: Callable[[], int] = clock.now) -> None:
        self.header: Header | None = None
        self.fault = ""
        """Why the stream cannot go on, in words; empty while it can."""
        self.missing = 0
        """Events lost so far."""
        self._name = name
        self._now = now
        self._here = ClockAnchor.read()
        self._same_clock = False
        self._frames = FrameReader()
        self._sequence = SequenceCheck()
        self._damaged = 0
        self._resumed = False

    def resume(self) -> None:
        """The stream begins again after its connection was lost: with who speaks and a snapshot.
        What was said in between is told as a `Gap`."""
        self._frames = FrameReader()
        self._damaged = 0
        self._resumed = self.header is not None

    @property
    def source(self) -> str:
        """The source's own name, or the one it was given until it said so."""
        return self.header.source if self.header is not None else self._name

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return self._frames.pending

    def feed(self, data: bytes) -> Delivery | None:
        """Take bytes, however they were cut; None when nothing is to be told yet. Never raises: see
        `fault`."""
        if self.fault:
            return None
        header: Header | None = None
        events: list[Event] = []
        unknown = 0
        try:
            for payload in self._frames.feed(data):
                try:
                    frame, unread = decode(payload)
                except FrameError:
                    self._damaged += 1
                    if self.header is None or self._damaged > MAX_DAMAGED:
                        raise
                    continue  # the numbers of the next frame tell how many events were in it
                self._damaged = 0
                unknown += unread
                if isinstance(frame, Hello):
                    header = self._meet(frame.header, len(payload))
                else:
                    self._take(frame, unread, events)
        except FrameError as error:
            self.fault = str(error)
        if header is None and not events and not unknown:
            return None
        return Delivery(self.source, header, events, unknown)

    def _meet(self, header: Header, size: int) -> Header:
        if size > MAX_HELLO:
            raise FrameError(f"introduces itself with {size:,} bytes: not a traced process")
        if not header.source:
            raise FrameError("introduces itself without a name: not a traced process")
        if self.header is not None and header.source != self.header.source:
            raise FrameError("changed its name in mid-stream: not a traced process")
        self.header = header
        offset = (header.anchor.wall - header.anchor.monotonic) - (
            self._here.wall - self._here.monotonic
        )
        self._same_clock = header.boot_id == clock.boot_id() != "" and abs(offset) < SAME_CLOCK
        return header

    def _take(self, batch: Batch, unread: int, events: list[Event]) -> None:
        if self.header is None:
            raise FrameError("did not introduce itself: not a traced process")
        expected = self._sequence.expected
        missed = self._sequence.missed(batch, unread)
        if batch.snapshot and self._resumed and expected is not None:
            missed, self._resumed = max(0, batch.seq - expected), False
        if missed > MAX_GAP or batch.seq < 0:
            raise FrameError("its event numbers make no sense: not a traced process")
        latest = self._now() + AHEAD if self._same_clock else _LATEST
        kept = [event for event in batch.events if 0 <= event.t <= latest]
        wrong = len(batch.events) - len(kept)
        if missed or wrong:
            t = kept[0].t if kept else self._now()
            if missed:
                self._miss(t, missed, "not delivered in time", events)
            if wrong:
                self._miss(t, wrong, "stamped with a time that cannot be", events)
        events += kept

    def _miss(self, t: int, missing: int, reason: str, events: list[Event]) -> None:
        self.missing += missing
        events.append(Gap(t, missing, reason))

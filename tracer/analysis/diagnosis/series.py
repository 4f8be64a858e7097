"""Events over time that `TraceState` folds away and a diagnosis needs: heartbeats, the progress of
streams, evictions.

`ObservedState` is a `TraceState` that keeps them beside its own state; a plain one can be diagnosed
too, the rules that need a series then say nothing or say what to record.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from engine_hooks.protocol.events import Event, Evicted, Heartbeat, Sent
from tracer.state.engine.source import Source
from tracer.state.trace_state import TraceState

BEATS_KEPT: Final = 7_200
"""Heartbeats a source: two hours. Beyond it the oldest go, and what happened then is not diagnosed
any more."""
SENDS_KEPT: Final = 400
"""Progress reports a request: 80 s of a stream. Beyond it the oldest go."""
STREAMS_KEPT: Final = 2_000
"""Requests whose progress is kept, where nothing else is said; beyond it the oldest are forgotten.
One that streams for a minute takes 8 KB."""
EVICTIONS_KEPT: Final = 4_096
"""Evictions a source; likewise."""


class Beat(NamedTuple):
    """A heartbeat: instant in ns, CPU time of the process so far in ns (-1 not known), its
    threads."""

    t: int
    cpu_ns: int
    threads: int


class Send(NamedTuple):
    """Progress of a stream, cumulative: instant in ns, chunks, tokens (-1 not known), Python work
    in ns (-1)."""

    t: int
    chunks: int
    tokens: int
    work: int


_ROW: Final = len(Send._fields)

Keep = Callable[[str, Any], None]


def sends_of(rows: array[int] | None) -> tuple[Send, ...]:
    """The rows of `Series.progress`."""
    return () if rows is None else tuple(map(Send._make, zip(*[iter(rows)] * _ROW, strict=True)))


class Series:
    """Bounded series of one trace, by source and by (source, key)."""

    def __init__(self, keep_streams: int = STREAMS_KEPT) -> None:
        self.beats: dict[str, deque[Beat]] = {}
        self.evictions: dict[str, deque[int]] = {}
        self._keep_streams = keep_streams
        self._sends: dict[tuple[str, int], array[int]] = {}
        """Rows of `Send`, one after the other."""

    def progress(self, key: tuple[str, int]) -> array[int] | None:
        """The progress of the stream that a source calls by a number, as it is now: rows of `Send`,
        which `sends_of` tells apart. None when none is kept."""
        rows = self._sends.get(key)
        return None if rows is None else rows[:]

    def beat(self, source: str, event: Heartbeat) -> None:
        """Keep a heartbeat."""
        beats = self.beats.get(source)
        if beats is None:
            beats = self.beats[source] = deque(maxlen=BEATS_KEPT)
        beats.append(Beat(event.t, event.cpu_ns, event.threads))

    def sent(self, source: str, event: Sent) -> None:
        """Keep what a stream has come to."""
        rows = self._sends.get((source, event.key))
        if rows is None:
            rows = self._sends[source, event.key] = array("q")
            if len(self._sends) > self._keep_streams:
                del self._sends[next(iter(self._sends))]
        # the whole row or none
        rows.extend(array("q", (event.t, event.chunks, event.tokens, event.work)))
        if len(rows) > _ROW * SENDS_KEPT:
            del rows[: _ROW * SENDS_KEPT // 4]

    def evicted(self, source: str, event: Evicted) -> None:
        """Keep when blocks were evicted."""
        instants = self.evictions.get(source)
        if instants is None:
            instants = self.evictions[source] = deque(maxlen=EVICTIONS_KEPT)
        instants.append(event.t)


class ObservedState(TraceState):
    """A `TraceState` with `series` beside it. Folds like one; its digest is the same, and so is the
    cost of an event of which no series is kept."""

    def __init__(
        self, *, keep_finished: int = 2000, keep_steps: int = 4096, keep_streams: int = STREAMS_KEPT
    ) -> None:
        super().__init__(keep_finished=keep_finished, keep_steps=keep_steps)
        self.series = Series(keep_streams)
        series = self.series
        kept: dict[type[Event], Keep] = {
            Heartbeat: series.beat,
            Sent: series.sent,
            Evicted: series.evicted,
        }
        for kind, keep in kept.items():
            self._handlers[kind] = self._and(self._handlers[kind], keep)

    @staticmethod
    def _and(fold: Callable[[Source, Any], None], keep: Keep) -> Callable[[Source, Any], None]:
        """What folds an event, followed by keeping it."""

        def both(source: Source, event: Any) -> None:
            fold(source, event)
            keep(source.name, event)

        return both

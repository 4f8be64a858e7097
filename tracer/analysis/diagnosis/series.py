"""Events over time that `TraceState` folds away and a diagnosis needs: heartbeats, the progress of
streams, evictions.

`ObservedState` is a `TraceState` that keeps them beside its own state; a plain one can be diagnosed
too, the rules that need a series then find nothing or name what to record.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
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
"""Requests whose progress is kept, unless told otherwise; beyond it the oldest are forgotten. A
stream of a minute takes 8 KB."""
EVICTIONS_KEPT: Final = 4_096
"""Evictions a source; beyond it the oldest go."""


class Beat(NamedTuple):
    """A heartbeat: instant in ns, CPU time of the process so far in ns (-1 not known)."""

    t: int
    cpu_ns: int


class Send(NamedTuple):
    """Progress of a stream so far: ns, chunks, tokens, ns of Python work (-1 unknown)."""

    t: int
    chunks: int
    tokens: int
    work: int


_ROW: Final = len(Send._fields)


def sends_of(rows: array[int] | None) -> tuple[Send, ...]:
    """Return the rows of `Series.progress`."""
    return () if rows is None else tuple(map(Send._make, zip(*[iter(rows)] * _ROW, strict=True)))


class Series:
    """Bounded series of one trace, by source and by (source, key)."""

    def __init__(self, keep_streams: int = STREAMS_KEPT) -> None:
        self.beats: dict[str, deque[Beat]] = defaultdict(partial(deque, maxlen=BEATS_KEPT))
        self.evictions: dict[str, deque[int]] = defaultdict(partial(deque, maxlen=EVICTIONS_KEPT))
        self._keep_streams = keep_streams
        self._sends: dict[tuple[str, int], array[int]] = {}
        """Rows of `Send`, one after the other."""

    def progress(self, key: tuple[str, int]) -> array[int] | None:
        """Return a copy of the progress of the stream that a source calls by a number: rows of
        `Send`, which `sends_of` tells apart. None when none is kept."""
        rows = self._sends.get(key)
        return None if rows is None else rows[:]

    def beat(self, source: str, event: Heartbeat) -> None:
        self.beats[source].append(Beat(event.t, event.cpu_ns))

    def sent(self, source: str, event: Sent) -> None:
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
        self.evictions[source].append(event.t)


class ObservedState(TraceState):
    """A `TraceState` with `series` beside it. Folds like one; its digest is the same, and so is the
    cost of an event of which no series is kept."""

    def __init__(
        self, *, keep_finished: int = 2000, keep_steps: int = 4096, keep_streams: int = STREAMS_KEPT
    ) -> None:
        super().__init__(keep_finished=keep_finished, keep_steps=keep_steps)
        self.series = Series(keep_streams)
        kept: dict[type[Event], Callable[[str, Any], None]] = {
            Heartbeat: self.series.beat,
            Sent: self.series.sent,
            Evicted: self.series.evicted,
        }
        for kind, keep in kept.items():
            self._handlers[kind] = _both(self._handlers[kind], keep)


def _both(
    fold: Callable[[Source, Any], None], keep: Callable[[str, Any], None]
) -> Callable[[Source, Any], None]:
    """Return a handler that folds an event, then keeps it."""

    def both(source: Source, event: Any) -> None:
        fold(source, event)
        keep(source.name, event)

    return both

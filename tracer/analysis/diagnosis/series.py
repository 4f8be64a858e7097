"""Events over time that `TraceState` folds away and a diagnosis needs: heartbeats, the progress of streams, evictions.

`ObservedState` is a `TraceState` that keeps them beside its own state; a plain one can be diagnosed too, the rules that
need a series then say nothing or say what to record.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tracer.events import Event, Evicted, Heartbeat, Sent
from tracer.state.source import Source
from tracer.state.trace_state import TraceState

BEATS_KEPT: Final = 7_200
"""Heartbeats a source: two hours. Beyond it the oldest go, and what happened then is not diagnosed any more."""
SENDS_KEPT: Final = 400
"""Progress reports a request: 80 s of a stream. Beyond it the oldest go."""
STREAMS_KEPT: Final = 2_000
"""Requests whose progress is kept, where nothing else is said; beyond it the oldest are forgotten. One that streams for
a minute takes 8 KB."""
EVICTIONS_KEPT: Final = 4_096
"""Evictions a source; likewise."""


class Beat(NamedTuple):
    """A heartbeat: instant in ns, CPU time of the process so far in ns (-1 not known), its threads."""

    t: int
    cpu_ns: int
    threads: int


class Send(NamedTuple):
    """Progress of a stream, cumulative: instant in ns, chunks, tokens (-1 not known), Python work in ns (-1)."""

    t: int
    chunks: int
    tokens: int
    work: int


_ROW: Final = len(Send._fields)


def _batched(rows: array[int]) -> zip[tuple[int, ...]]:
    """Rows of four."""
    return zip(*[iter(rows)] * _ROW, strict=True)


class Series:
    """Bounded series of one trace, by source and by (source, key)."""

    def __init__(self, keep_streams: int = STREAMS_KEPT) -> None:
        self.beats: dict[str, deque[Beat]] = {}
        self.evictions: dict[str, deque[int]] = {}
        self._keep_streams = keep_streams
        self._sends: dict[tuple[str, int], array[int]] = {}
        """Rows of `Send`, one after the other."""

    def sends(self, key: tuple[str, int]) -> tuple[Send, ...]:
        """The progress of the stream that a source calls by a number; empty when none is kept."""
        rows = self._sends.get(key)
        if rows is None:
            return ()
        return tuple(map(Send._make, _batched(rows)))

    def apply(self, source: str, event: Event) -> None:
        """Take in what is kept here; all other events pass."""
        match event:
            case Heartbeat():
                self.beats.setdefault(source, deque(maxlen=BEATS_KEPT)).append(
                    Beat(event.t, event.cpu_ns, event.threads)
                )
            case Sent():
                rows = self._sends.get((source, event.key))
                if rows is None:
                    rows = self._sends[source, event.key] = array("q")
                    if len(self._sends) > self._keep_streams:
                        del self._sends[next(iter(self._sends))]
                rows.extend((event.t, event.chunks, event.tokens, event.work))
                if len(rows) > _ROW * SENDS_KEPT:
                    del rows[: _ROW * SENDS_KEPT // 4]
            case Evicted():
                self.evictions.setdefault(source, deque(maxlen=EVICTIONS_KEPT)).append(event.t)
            case _:
                return


class ObservedState(TraceState):
    """A `TraceState` with `series` beside it. Folds like one; its digest is the same, and so is what an event costs that
    no series is kept of."""

    def __init__(
        self, *, keep_finished: int = 2000, keep_steps: int = 4096, keep_streams: int = STREAMS_KEPT
    ) -> None:
        super().__init__(keep_finished=keep_finished, keep_steps=keep_steps)
        self.series = Series(keep_streams)
        for kind in (Heartbeat, Sent, Evicted):
            self._handlers[kind] = self._kept(self._handlers[kind])

    def _kept(self, fold: Callable[[Source, Any], None]) -> Callable[[Source, Any], None]:
        """What folds an event, followed by keeping it."""
        keep = self.series.apply

        def both(source: Source, event: Any) -> None:
            fold(source, event)
            keep(source.name, event)

        return both

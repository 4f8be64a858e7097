"""Events over time that `TraceState` folds away and a diagnosis needs: heartbeats, the progress of streams, evictions.

`ObservedState` is a `TraceState` that keeps them beside its own state; a plain one can be diagnosed too, the rules that
need a series then say nothing or say what to record.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from tracer.events import Event, Evicted, Heartbeat, Sent
from tracer.state.trace_state import TraceState

BEATS_KEPT: Final = 7_200
"""Heartbeats a source: two hours. Beyond it the oldest go, and what happened then is not diagnosed any more."""
SENDS_KEPT: Final = 400
"""Progress reports a request: 80 s of a stream. Beyond it the oldest go."""
STREAMS_KEPT: Final = 12_000
"""Requests whose progress is kept; beyond it the oldest are forgotten."""
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


class Series:
    """Bounded series of one trace, by source and by (source, key)."""

    def __init__(self) -> None:
        self.beats: dict[str, deque[Beat]] = {}
        self.sends: dict[tuple[str, int], deque[Send]] = {}
        self.evictions: dict[str, deque[int]] = {}

    def apply(self, source: str, event: Event) -> None:
        """Take in what is kept here; all other events pass."""
        match event:
            case Heartbeat():
                self.beats.setdefault(source, deque(maxlen=BEATS_KEPT)).append(
                    Beat(event.t, event.cpu_ns, event.threads)
                )
            case Sent():
                sends = self.sends.get((source, event.key))
                if sends is None:
                    sends = self.sends[source, event.key] = deque(maxlen=SENDS_KEPT)
                    if len(self.sends) > STREAMS_KEPT:
                        del self.sends[next(iter(self.sends))]
                sends.append(Send(event.t, event.chunks, event.tokens, event.work))
            case Evicted():
                self.evictions.setdefault(source, deque(maxlen=EVICTIONS_KEPT)).append(event.t)
            case _:
                return


_KEPT: Final = frozenset({Heartbeat, Sent, Evicted})


class ObservedState(TraceState):
    """A `TraceState` with `series` beside it. Folds like one; its digest is the same."""

    def __init__(self, *, keep_finished: int = 2000, keep_steps: int = 4096) -> None:
        super().__init__(keep_finished=keep_finished, keep_steps=keep_steps)
        self.series = Series()

    def apply(self, source: str, event: Event) -> None:
        """As `TraceState.apply`. Never raises."""
        super().apply(source, event)
        if type(event) in _KEPT:
            try:
                self.series.apply(source, event)
            except Exception:  # whatever a peer or a damaged file makes up must not end the viewer
                self.unknown += 1

"""The sides of the Compare screen: the halves of the trace that is shown, its parts before and
after a mark, a file that the user names beside it, or traces of the command line."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.compare import KEEP, Trace, trace_of_state
from tracer.analysis.compare.samples import Reader
from tracer.format import figures
from tracer.replay.cursor import load
from tracer.state.trace_state import TraceState


class Subject(enum.Enum):
    """What is compared."""

    GIVEN = enum.auto()
    HALVES = enum.auto()
    MARK = enum.auto()
    FILE = enum.auto()


class Subjects:
    """Makes the traces of a subject out of a state."""

    def __init__(self) -> None:
        self.subject = Subject.HALVES
        self.given: tuple[Trace, ...] = ()
        self.baseline: Trace | None = None
        self.mark: int | None = None
        """ns of the trace's clock."""
        self._readers = (Reader(), Reader())

    def possible(self) -> list[Subject]:
        """Return the subjects that can be compared now."""
        found = [Subject.GIVEN] if self.given else []
        found.append(Subject.HALVES)
        if self.mark is not None:
            found.append(Subject.MARK)
        if self.baseline is not None:
            found.append(Subject.FILE)
        return found

    def next(self) -> None:
        """Choose the next subject that can be compared."""
        found = self.possible()
        at = found.index(self.subject) if self.subject in found else -1
        self.subject = found[(at + 1) % len(found)]

    def describe(self, state: TraceState, window_s: float | None) -> str:
        """Return the subject in words."""
        over = "" if window_s is None else f", last {figures.span(window_s)}"
        if self.subject is Subject.GIVEN:
            return " against ".join(trace.context.name for trace in self.given)
        if self.subject is Subject.MARK and self.mark is not None:
            at = figures.instant(self.mark - state.began)
            return f"before against after the mark at {at}{over}"
        if self.subject is Subject.FILE and self.baseline is not None:
            return f"{self.baseline.context.name} against this trace{over}"
        return f"first against second half of the requests{over}"

    def traces(self, state: TraceState, now: int, window_s: float | None) -> tuple[Trace, ...]:
        """Return the traces, of the last `window_s` seconds up to `now` (ns) if given."""
        if self.subject is Subject.GIVEN:
            return self.given
        since = None if window_s is None else now - round(window_s * NS_PER_S)
        if self.subject is Subject.FILE and self.baseline is not None:
            shown = trace_of_state("this trace", state, begin=since, known=self._readers[1])
            return self.baseline, shown
        split = self.mark if self.subject is Subject.MARK else self._middle(state, since)
        at = figures.instant(max(0, (split or state.began) - state.began))
        one, two = self._readers
        return (
            trace_of_state(f"until {at}", state, begin=since, end=split, known=one),
            trace_of_state(f"from {at}", state, begin=split, known=two),
        )

    @staticmethod
    def _middle(state: TraceState, since: int | None) -> int | None:
        """Return when the middle one of the requests was received (ns)."""
        received = [request.order[0] for request in state.requests.order]
        if since is not None:
            received = [t for t in received if t >= since]
        return received[len(received) // 2] if received else None


def read_baseline(path: str) -> Trace:
    """Read the trace of a file, which takes as long as folding it.

    Raises: TraceFileError, OSError.
    """
    return trace_of_state(Path(path).name, load(Path(path).expanduser(), keep_finished=KEEP))


def same(one: Sequence[Trace], two: Sequence[Trace]) -> bool:
    """Return True if no request was added and none has gone on."""
    return len(one) == len(two) and all(map(_same, one, two))


def _same(one: Trace, two: Trace) -> bool:
    if one is two:
        return True
    a, b = one.samples, two.samples
    return (
        (one.context.name, a.ids) == (two.context.name, b.ids)
        and np.array_equal(a.whole, b.whole)
        and np.array_equal(a.output, b.output)
    )

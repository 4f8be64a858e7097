"""What the Compare screen puts side by side: the two halves of the trace that is shown, what lies
before and after a mark in it, a file that the user names beside it, or traces that were given on
the command line."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.compare import KEEP, Trace, trace_of_state
from tracer.analysis.compare.samples import Reader
from tracer.replay.cursor import load
from tracer.state.trace_state import TraceState
from tracer.tui.toolkit import figures


class Subject(enum.Enum):
    """What is compared."""

    GIVEN = "the traces that were given"
    HALVES = "first half against second half"
    MARK = "before the mark against after it"
    FILE = "a file against this trace"


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
        """Those that there is something for."""
        found = [Subject.GIVEN] if self.given else []
        found.append(Subject.HALVES)
        if self.mark is not None:
            found.append(Subject.MARK)
        if self.baseline is not None:
            found.append(Subject.FILE)
        return found

    def next(self) -> None:
        """The next possible one."""
        found = self.possible()
        at = found.index(self.subject) if self.subject in found else -1
        self.subject = found[(at + 1) % len(found)]

    def describe(self, state: TraceState, window_s: float | None) -> str:
        """What is compared, in words."""
        over = "" if window_s is None else f", last {figures.span(window_s)}"
        if self.subject is Subject.GIVEN:
            return " against ".join(trace.context.name for trace in self.given)
        if self.subject is Subject.MARK and self.mark is not None:
            return (
                f"before against after the mark at {figures.instant(self.mark - state.began)}{over}"
            )
        if self.subject is Subject.FILE and self.baseline is not None:
            return f"{self.baseline.context.name} against this trace{over}"
        return f"first against second half of the requests{over}"

    def traces(self, state: TraceState, now: int, window_s: float | None) -> tuple[Trace, ...]:
        """The traces to compare, of the last `window_s` seconds up to `now` (ns) where given."""
        if self.subject is Subject.GIVEN:
            return self.given
        since = None if window_s is None else now - round(window_s * NS_PER_S)
        if self.subject is Subject.FILE and self.baseline is not None:
            return (
                self.baseline,
                trace_of_state("this trace", state, begin=since, known=self._readers[1]),
            )
        split = self.mark if self.subject is Subject.MARK else self._middle(state, since)
        at = figures.instant(max(0, (split or state.began) - state.began))
        names = (f"until {at}", f"from {at}")
        one, two = self._readers
        return (
            trace_of_state(names[0], state, begin=since, end=split, known=one),
            trace_of_state(names[1], state, begin=split, known=two),
        )

    @staticmethod
    def _middle(state: TraceState, since: int | None) -> int | None:
        """When the middle one of the requests was received (ns)."""
        received = [
            request.order[0]
            for request in state.requests.order
            if since is None or request.order[0] >= since
        ]
        return received[len(received) // 2] if received else None


def read_baseline(path: str) -> Trace:
    """The trace of a file. Raises TraceFileError or OSError; takes as long as folding it does."""
    return trace_of_state(Path(path).name, load(Path(path).expanduser(), keep_finished=KEEP))


def same(one: Sequence[Trace], two: Sequence[Trace]) -> bool:
    """Whether two answers would be the same: no request was added, and none has gone on."""
    return len(one) == len(two) and all(
        a is b or (a.context.name == b.context.name and a.samples.ids == b.samples.ids
                   and bool((a.samples.whole == b.samples.whole).all())
                   and bool((a.samples.output == b.samples.output).all()))
        for a, b in zip(one, two, strict=True)
    )  # fmt: skip

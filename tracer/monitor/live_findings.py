"""A diagnosis that goes on: the state is looked at every second or so, and each finding appears
once, with a start and, when it is over, an end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.diagnosis.case import Budget, Case
from tracer.analysis.diagnosis.engine import judge
from tracer.analysis.diagnosis.evidence import gather
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Finding
from tracer.analysis.diagnosis.records import Evidence
from tracer.state.trace_state import TraceState

WINDOW_S: Final = 60.0
"""What is looked at: long enough for the samples that rules ask for, short enough for a fault to
stand out."""
CONFIRMED: Final = 2
"""Looks in a row that must find it before it is told: one look in the middle of a burst is no
finding."""
GONE: Final = 4
"""Looks in a row that must not find it before it is over."""
RETURN_S: Final = 30.0
"""One that is found again within so many seconds after it was over was not over: it is not told
again."""
KEPT: Final = 200
"""Findings that are remembered once they are over; the oldest are forgotten."""


@dataclass(slots=True)
class _Open:
    finding: Finding
    seen: int = 1
    missed: int = 0
    told: bool = False


class LiveDiagnosis:
    """Feed it the state; read `findings` (all that were told, newest state of each) or
    `current`."""

    def __init__(self, *, window_s: float = WINDOW_S, budget: Budget | None = None) -> None:
        self._window = int(window_s * NS_PER_S)
        self._budget = budget
        self._open: dict[tuple[str, str, int | None], _Open] = {}
        self._over: list[Finding] = []
        self._last: Diagnosis | None = None

    def update(self, state: TraceState, *, now: int | None = None) -> tuple[Finding, ...]:
        """Look at the last window of `state`. Returns the findings that are told for the first
        time.

        `now` in ns, default the latest event; a second or so should lie between two looks. One who
        must not be kept waiting reads with `gather`, lets another thread `judge`, and has the
        answer taken in by `take`.
        """
        reading = self.gather(state, now=now)
        while True:
            try:
                next(reading)
            except StopIteration as done:
                return self.take(self.judge(cast(Evidence, done.value)))

    def gather(
        self, state: TraceState, *, now: int | None = None
    ) -> Generator[None, None, Evidence]:
        """Read the last window of `state`, a millisecond or two at a time."""
        at = state.now if now is None else now
        return gather(state, now=at, since=max(state.began, at - self._window))

    def judge(self, evidence: Evidence) -> Diagnosis:
        """What the rules say. Changes nothing, and may be asked by another thread."""
        return judge(Case(evidence, budget=self._budget))

    def take(self, diagnosis: Diagnosis) -> tuple[Finding, ...]:
        """Take a look's answer in. Returns the findings that are told for the first time."""
        self._last = diagnosis
        at = diagnosis.now
        present = {_key(finding): finding for finding in diagnosis.findings}
        fresh: list[Finding] = []
        for key, finding in present.items():
            known = self._open.get(key)
            if known is None and (before := self._back(key, at)) is not None:
                known = self._open[key] = _Open(before, told=True)
            if known is None:
                known = self._open[key] = _Open(finding)
            else:
                # The window moves on: when it began and what it cost before is remembered.
                finding = replace(
                    finding,
                    start=min(known.finding.start, finding.start),
                    lost_ms=max(known.finding.lost_ms, finding.lost_ms),
                )
                known.finding, known.seen, known.missed = finding, known.seen + 1, 0
            if known.seen >= CONFIRMED and not known.told:
                known.told = True
                fresh.append(known.finding)
        for key in [key for key in self._open if key not in present]:
            known = self._open[key]
            known.missed += 1
            if known.missed < GONE and known.told:
                continue
            del self._open[key]
            if known.told:
                end = known.finding.end if known.finding.end is not None else at
                self._over.append(replace(known.finding, end=min(end, at)))
        del self._over[: max(0, len(self._over) - KEPT)]
        return tuple(fresh)

    def _back(self, key: tuple[str, str, int | None], at: int) -> Finding | None:
        """The finding that was over and is back, taken out of those that are over."""
        for place in range(len(self._over) - 1, -1, -1):
            finding = self._over[place]
            if _key(finding) == key and (finding.end or 0) >= at - int(RETURN_S * NS_PER_S):
                return self._over.pop(place)
        return None

    @property
    def current(self) -> tuple[Finding, ...]:
        """Findings that go on, the costliest first."""
        told = [known.finding for known in self._open.values() if known.told]
        return tuple(sorted(told, key=lambda finding: -finding.lost_ms))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far by their start, those that are over with their end."""
        return tuple(sorted((*self._over, *self.current), key=lambda finding: finding.start))

    @property
    def looked(self) -> Diagnosis | None:
        """The last look, None before the first."""
        return self._last

    @property
    def cannot_tell(self) -> Sequence[CannotTell]:
        """What the last look left open."""
        return () if self._last is None else self._last.cannot_tell

    @property
    def verdict(self) -> str:
        """One sentence about now."""
        if self._last is None:
            return "nothing to judge yet"
        if not self.current and self._last.findings:
            return "looking closer"
        return self._last.verdict


def _key(finding: Finding) -> tuple[str, str, int | None]:
    return finding.rule, finding.engine, None if finding.stage is None else int(finding.stage)


def live_findings() -> Callable[[TraceState], Iterable[str]]:
    """What the rule ``finding`` asks: a diagnosis that goes on. It tells each finding once."""
    live = LiveDiagnosis()
    return lambda state: [finding.statement for finding in live.update(state)]

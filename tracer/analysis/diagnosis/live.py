"""A diagnosis that goes on: the state is looked at every second or so, and each finding appears once, with a start and,
when it is over, an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tracer.analysis.diagnosis.case import Budget
from tracer.analysis.diagnosis.engine import diagnose
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Finding
from tracer.clock import NS_PER_S
from tracer.state.trace_state import TraceState

WINDOW_S: Final = 60.0
"""What is looked at: long enough for the samples that rules ask for, short enough for a fault to stand out."""
CONFIRMED: Final = 2
"""Looks in a row that must find it before it is told: one look in the middle of a burst is no finding."""
GONE: Final = 4
"""Looks in a row that must not find it before it is over."""
KEPT: Final = 200
"""Findings that are remembered once they are over; the oldest are forgotten."""


@dataclass(slots=True)
class _Open:
    finding: Finding
    seen: int = 1
    missed: int = 0
    told: bool = False


class LiveDiagnosis:
    """Feed it the state; read `findings` (all that were told, newest state of each) or `current`."""

    def __init__(self, *, window_s: float = WINDOW_S, budget: Budget | None = None) -> None:
        self._window = int(window_s * NS_PER_S)
        self._budget = budget
        self._open: dict[tuple[str, str, int | None], _Open] = {}
        self._over: list[Finding] = []
        self._last: Diagnosis | None = None

    def update(self, state: TraceState, *, now: int | None = None) -> tuple[Finding, ...]:
        """Look at the last window of `state`. Returns the findings that are told for the first time.

        `now` in ns, default the latest event; a second or so should lie between two looks.
        """
        at = state.now if now is None else now
        diagnosis = self._last = diagnose(
            state, budget=self._budget, now=at, since=max(state.began, at - self._window)
        )
        present = {_key(finding): finding for finding in diagnosis.findings}
        fresh: list[Finding] = []
        for key, finding in present.items():
            known = self._open.get(key)
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

"""The live diagnosis: the state is judged every second or so, and each finding appears once, with a
start and, when it is over, an end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.diagnosis.case import Case
from tracer.analysis.diagnosis.engine import judge
from tracer.analysis.diagnosis.evidence import gather
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Finding
from tracer.analysis.diagnosis.records import Evidence
from tracer.state.trace_state import TraceState

WINDOW_S: Final = 60.0
"""The window that is judged: long enough for the samples that rules ask for, short enough for a
fault to stand out."""
CONFIRMED: Final = 2
"""Checks in a row that must find something before it counts: a burst alone is no finding."""
GONE: Final = 4
"""Checks in a row that must not find it before it is over."""
RETURN_S: Final = 30.0
"""A finding that is back within so many seconds after its end had not ended."""
KEPT: Final = 200
"""Findings that are kept once they are over; the oldest are forgotten."""


@dataclass(slots=True)
class _Open:
    finding: Finding
    seen: int = 1
    missed: int = 0
    confirmed: bool = False


class LiveDiagnosis:
    """Findings of a trace that goes on: `update` with the state, read `findings` or `current`."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window = int(window_s * NS_PER_S)
        self._open: dict[tuple[str, str, int | None], _Open] = {}
        self._over: list[Finding] = []
        self._last: Diagnosis | None = None

    def update(self, state: TraceState, *, now: int | None = None) -> tuple[Finding, ...]:
        """Judge the last window of `state` and return the findings that are new.

        `now` in ns, default the latest event; a second or so should lie between two calls. A caller
        that must not wait reads with `gather`, lets another thread `judge`, and calls `apply`.
        """
        reading = self.gather(state, now=now)
        while True:
            try:
                next(reading)
            except StopIteration as done:
                return self.apply(self.judge(cast(Evidence, done.value)))

    def gather(
        self, state: TraceState, *, now: int | None = None
    ) -> Generator[None, None, Evidence]:
        """Read the last window of `state`, a millisecond or two at a time."""
        at = state.now if now is None else now
        return gather(state, now=at, since=max(state.began, at - self._window))

    def judge(self, evidence: Evidence) -> Diagnosis:
        """Apply the rules. Changes nothing: another thread may call this."""
        return judge(Case(evidence))

    def apply(self, diagnosis: Diagnosis) -> tuple[Finding, ...]:
        """Merge a diagnosis into the findings and return those that are new."""
        self._last = diagnosis
        at = diagnosis.now
        present = {_key(finding): finding for finding in diagnosis.findings}
        fresh: list[Finding] = []
        for key, finding in present.items():
            known = self._open.get(key)
            if known is None and (before := self._back(key, at)) is not None:
                known = self._open[key] = _Open(before, confirmed=True)
            if known is None:
                known = self._open[key] = _Open(finding)
            else:
                # The window moves on: start and cost of what has left it are kept.
                finding = replace(
                    finding,
                    start=min(known.finding.start, finding.start),
                    lost_ms=max(known.finding.lost_ms, finding.lost_ms),
                )
                known.finding, known.seen, known.missed = finding, known.seen + 1, 0
            if known.seen >= CONFIRMED and not known.confirmed:
                known.confirmed = True
                fresh.append(known.finding)
        for key in [key for key in self._open if key not in present]:
            known = self._open[key]
            known.missed += 1
            if known.missed < GONE and known.confirmed:
                continue
            del self._open[key]
            if known.confirmed:
                end = known.finding.end if known.finding.end is not None else at
                self._over.append(replace(known.finding, end=min(end, at)))
        del self._over[: max(0, len(self._over) - KEPT)]
        return tuple(fresh)

    def _back(self, key: tuple[str, str, int | None], at: int) -> Finding | None:
        """Take a finding that is back out of those that are over."""
        for finding in reversed(self._over):
            if _key(finding) == key and (finding.end or 0) >= at - int(RETURN_S * NS_PER_S):
                self._over.remove(finding)
                return finding
        return None

    @property
    def current(self) -> tuple[Finding, ...]:
        """Findings that go on, the costliest first."""
        going_on = [known.finding for known in self._open.values() if known.confirmed]
        return tuple(sorted(going_on, key=lambda finding: -finding.lost_ms))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far by their start, those that are over with their end."""
        return tuple(sorted((*self._over, *self.current), key=lambda finding: finding.start))

    @property
    def cannot_tell(self) -> Sequence[CannotTell]:
        """The checks that could not be made last time."""
        return () if self._last is None else self._last.cannot_tell

    @property
    def verdict(self) -> str:
        if self._last is None:
            return "nothing to judge yet"
        if not self.current and self._last.findings:
            return "looking closer"
        return self._last.verdict


def _key(finding: Finding) -> tuple[str, str, int | None]:
    return finding.rule, finding.engine, None if finding.stage is None else int(finding.stage)


def live_findings() -> Callable[[TraceState], Iterable[str]]:
    """Return what the rule ``finding`` asks: a live diagnosis that gives each finding once."""
    live = LiveDiagnosis()
    return lambda state: [finding.statement for finding in live.update(state)]

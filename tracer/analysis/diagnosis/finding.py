"""What a diagnosis is made of: findings, what cannot be told, and the whole of both.

A finding names a stage and says in one sentence, with numbers, what went wrong there, for whom,
because of whom, when, and how many milliseconds it cost. Instants are monotonic ns of the trace's
clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import msgspec

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage, parse
from tracer.format.text import clean

SCHEMA: Final = 1
"""Of the document: raised when the meaning of a key changes or one goes away; new keys do not raise
it."""
AFFECTED_SHOWN: Final = 50
"""Requests that a finding lists by id; `Finding.affected_total` counts all of them."""
POINTS_SHOWN: Final = 240
"""Points of a series that are kept as evidence: more than a terminal has columns."""
EVENTS_SHOWN: Final = 200
"""Events that stand as evidence, where the latest ones say nothing new."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A piece of evidence: a named series or some events. `points` are (instant in ns, value in
    `unit`), ordered by time unless `note` names another first axis."""

    name: str
    unit: str
    points: tuple[tuple[int, float], ...] = ()
    note: str = ""


def events(
    name: str, unit: str, points: Iterable[tuple[int | None, float]], note: str = ""
) -> Exhibit:
    """Return the first `EVENTS_SHOWN` points as evidence."""
    shown = ((at or 0, round(float(value), 3)) for at, value in islice(points, EVENTS_SHOWN))
    return Exhibit(name, unit, tuple(shown), note)


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time. `stage` None: outside the server, or the machine as a whole."""

    rule: str
    stage: Stage | None
    statement: str
    """One sentence with numbers, fit for a terminal."""
    check: str
    """What to check or change first, in one line."""
    lost_ms: float
    """Milliseconds that requests lost to it, added up over all of them."""
    start: int
    end: int | None
    """None while it goes on at the end of the trace."""
    confidence: float
    """0-1: how sure the rule is that this is the cause and no other."""
    affected: tuple[str, ...] = ()
    affected_total: int = 0
    culprit: str | None = None
    """Id of the request that caused it, where it is another one than those affected."""
    engine: str = ""
    """Source of the engine concerned; empty when it is not one of several."""
    evidence: tuple[Exhibit, ...] = ()
    slowdown: float = 1.0
    """Factor by which it lengthened the engine's service: a queue that this explains is folded into
    it."""
    load: float = 0.0
    """Of a queue: requests offered over requests served; 0 where that was not sustained."""
    explains: tuple[str, ...] = ()
    """Statements of the symptoms and findings that are a consequence of this one."""


@dataclass(frozen=True, slots=True)
class CannotTell:
    """A question that the trace raises and does not answer."""

    question: str
    """The rule or symptom concerned."""
    reason: str
    record: str
    """What to record so that the next trace answers it; empty when no recording of ours would."""
    stage: Stage | None = None
    symptom: bool = False
    """Something is wrong and unexplained; else a rule could not look."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one trace says. Findings are ordered by the milliseconds that they cost."""

    verdict: str
    findings: tuple[Finding, ...]
    cannot_tell: tuple[CannotTell, ...]
    began: int
    now: int
    requests: int
    steps: int
    rules: tuple[str, ...] = field(default=(), repr=False)
    """Names of all rules that were asked."""

    def to_document(self) -> dict[str, Any]:
        """Return plain data for JSON, ids cleaned; ``docs/diagnosis.md`` describes each field."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "healthy": not self.findings and not any(entry.symptom for entry in self.cannot_tell),
            "requests": self.requests,
            "steps": self.steps,
            "seconds": round((self.now - self.began) / NS_PER_S, 3),
            "findings": [self._finding(finding) for finding in self.findings],
            "cannot_tell": [
                {
                    "question": entry.question,
                    "stage": None if entry.stage is None else entry.stage.id,
                    "reason": entry.reason,
                    "record": entry.record,
                    "symptom": entry.symptom,
                }
                for entry in self.cannot_tell
            ],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], began: int) -> Diagnosis:
        """Read back what `to_document` wrote, of a trace that began at `began` (ns).

        Raises:
            KeyError, TypeError, ValueError: for anything else.
        """
        fields = {
            **document,
            "findings": [
                entry
                | {
                    "stage": entry["stage_number"],
                    "start": entry["start_ns"],
                    "end": entry["end_ns"],
                }
                for entry in document["findings"]
            ],
            "cannot_tell": [
                entry | {"stage": None if entry["stage"] is None else int(parse(entry["stage"]))}
                for entry in document["cannot_tell"]
            ],
            "began": began,
            "now": began + round(document["seconds"] * NS_PER_S),
        }
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def summary(self) -> dict[str, Any]:
        """Return `to_document` without evidence and open questions, for another document."""
        document = self.to_document()
        for finding in document["findings"]:
            del finding["evidence"]
        kept = ("verdict", "healthy", "requests", "steps", "seconds", "findings")
        return {name: document[name] for name in kept}

    def exit_code(self, fail_on: Sequence[str]) -> int:
        """Return 1 when a finding matches an entry of `fail_on`, else 0.

        An entry is the name of a rule, a stage's id or number, or ``any``. Raises ValueError for
        another word.
        """
        failing: set[str | Stage] = {self._matcher(entry) for entry in fail_on}
        return int(any({"any", finding.rule, finding.stage} & failing for finding in self.findings))

    def _matcher(self, entry: str) -> str | Stage:
        word = entry.strip().lower()
        if word == "any" or word in self.rules:
            return word
        try:
            return parse(word)
        except ValueError:
            known = ", ".join(self.rules)
            raise ValueError(f"no rule or stage called {entry!r}; rules are any, {known}") from None

    def _finding(self, finding: Finding) -> dict[str, Any]:
        stage, end = finding.stage, finding.end
        return {
            "rule": finding.rule,
            "stage": None if stage is None else stage.id,
            "stage_number": None if stage is None else int(stage),
            "statement": finding.statement,
            "check": finding.check,
            "lost_ms": round(finding.lost_ms, 3),
            "start_s": round((finding.start - self.began) / NS_PER_S, 3),
            "end_s": None if end is None else round((end - self.began) / NS_PER_S, 3),
            "start_ns": finding.start,
            "end_ns": end,
            "confidence": round(finding.confidence, 2),
            "affected": [clean(name) for name in finding.affected],
            "affected_total": finding.affected_total,
            "culprit": None if finding.culprit is None else clean(finding.culprit),
            "engine": clean(finding.engine),
            "explains": list(finding.explains),
            "evidence": [
                {
                    "name": exhibit.name,
                    "unit": exhibit.unit,
                    "note": exhibit.note,
                    "points": [list(point) for point in exhibit.points],
                }
                for exhibit in finding.evidence
            ],
        }

"""What a diagnosis is made of: findings, what cannot be told, and the whole of both.

A finding names a stage and says in one sentence, with numbers, what went wrong there, for whom,
because of whom, when, and how many milliseconds it cost. Instants are monotonic ns of the trace's
clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine_hooks.protocol.stages import Stage, parse
from tracer.format.text import clean

SCHEMA: Final = 1
"""Of the document: raised when the meaning of a key changes or one goes away; new keys do not raise
it."""
AFFECTED_SHOWN: Final = 50
"""Requests that a finding lists by id; `Finding.affected_total` counts all of them."""
POINTS_SHOWN: Final = 240
"""Points of a series that are kept as evidence: more than a terminal has columns."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A piece of evidence: a named series or some events. `points` are (instant in ns, value in
    `unit`), ordered by time unless `note` says what else stands on the first axis."""

    name: str
    unit: str
    points: tuple[tuple[int, float], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time. `stage` None: not in a stage of the server (outside it, or the engine
    as a whole)."""

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
    """Whether something is wrong and unexplained, rather than a rule that could not look."""


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

    def to_document(self) -> dict[str, object]:
        """The diagnosis as plain data for JSON, ids cleaned; ``docs/diagnosis.md`` describes each
        field."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "healthy": not self.findings and not any(entry.symptom for entry in self.cannot_tell),
            "requests": self.requests,
            "steps": self.steps,
            "seconds": round((self.now - self.began) / 1e9, 3),
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
        """What `to_document` wrote down, of a trace that began at `began` (ns). Raises KeyError,
        TypeError or ValueError for anything else."""
        return cls(
            verdict=str(document["verdict"]),
            findings=tuple(_finding_of(entry) for entry in document["findings"]),
            cannot_tell=tuple(
                CannotTell(
                    str(entry["question"]),
                    str(entry["reason"]),
                    str(entry["record"]),
                    None if entry["stage"] is None else parse(entry["stage"]),
                    bool(entry["symptom"]),
                )
                for entry in document["cannot_tell"]
            ),
            began=began,
            now=began + round(document["seconds"] * 1e9),
            requests=int(document["requests"]),
            steps=int(document["steps"]),
        )

    def summary(self) -> dict[str, object]:
        """As `to_document`, without the evidence and what cannot be told: for a document about
        something else."""
        document = self.to_document()
        findings = [self._finding(finding) for finding in self.findings]
        for finding in findings:
            del finding["evidence"]
        kept = ("verdict", "healthy", "requests", "steps", "seconds")
        return {**{name: document[name] for name in kept}, "findings": findings}

    def exit_code(self, fail_on: Sequence[str]) -> int:
        """1 when a finding matches an entry of `fail_on`, else 0.

        An entry is the name of a rule, a stage's id or number, or ``any``. Raises ValueError for
        another word.
        """
        wanted = [self._matcher(entry) for entry in fail_on]
        return int(any(
            rule == finding.rule or (stage is not None and stage == finding.stage) or anything
            for finding in self.findings
            for rule, stage, anything in wanted
        ))  # fmt: skip

    def _matcher(self, entry: str) -> tuple[str, Stage | None, bool]:
        word = entry.strip().lower()
        if word == "any":
            return "", None, True
        if word in self.rules:
            return word, None, False
        try:
            return "", parse(word), False
        except ValueError:
            known = ", ".join(self.rules)
            raise ValueError(f"no rule or stage called {entry!r}; rules are any, {known}") from None

    def _finding(self, finding: Finding) -> dict[str, object]:
        return {
            "rule": finding.rule,
            "stage": None if finding.stage is None else finding.stage.id,
            "stage_number": None if finding.stage is None else int(finding.stage),
            "statement": finding.statement,
            "check": finding.check,
            "lost_ms": round(finding.lost_ms, 3),
            "start_s": round((finding.start - self.began) / 1e9, 3),
            "end_s": None if finding.end is None else round((finding.end - self.began) / 1e9, 3),
            "start_ns": finding.start,
            "end_ns": finding.end,
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
                    "points": [[instant, value] for instant, value in exhibit.points],
                }
                for exhibit in finding.evidence
            ],
        }


def _finding_of(entry: Mapping[str, Any]) -> Finding:
    return Finding(
        rule=str(entry["rule"]),
        stage=None if entry["stage"] is None else parse(entry["stage"]),
        statement=str(entry["statement"]),
        check=str(entry["check"]),
        lost_ms=float(entry["lost_ms"]),
        start=int(entry["start_ns"]),
        end=None if entry["end_ns"] is None else int(entry["end_ns"]),
        confidence=float(entry["confidence"]),
        affected=tuple(map(str, entry["affected"])),
        affected_total=int(entry["affected_total"]),
        culprit=None if entry["culprit"] is None else str(entry["culprit"]),
        engine=str(entry["engine"]),
        evidence=tuple(
            Exhibit(
                str(exhibit["name"]),
                str(exhibit["unit"]),
                tuple((int(at), float(value)) for at, value in exhibit["points"]),
                str(exhibit["note"]),
            )
            for exhibit in entry["evidence"]
        ),
        explains=tuple(map(str, entry["explains"])),
    )

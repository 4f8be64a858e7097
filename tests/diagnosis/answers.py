"""What tests ask of a diagnosis, in a line each."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from tracer.analysis.diagnosis import Diagnosis, Finding, diagnose
from tracer.analysis.diagnosis.finding import AFFECTED_SHOWN
from tracer.analysis.diagnosis.rules import NAMES
from tracer.state.trace_state import TraceState


def told(state: TraceState, **options: Any) -> list[str]:
    """Rules that found something, the costliest first. The trace itself must have made sense."""
    assert state.unknown == 0
    return [finding.rule for finding in diagnose(state, **options).findings]


def only(state: TraceState, rule: str, **options: Any) -> Finding:
    """The one finding, which must be of `rule`."""
    diagnosis = diagnose(state, **options)
    assert [finding.rule for finding in diagnosis.findings] == [rule], diagnosis.findings
    return diagnosis.findings[0]


def found(state: TraceState, rule: str, **options: Any) -> Finding:
    """The finding of `rule`, among others."""
    diagnosis = diagnose(state, **options)
    finding = next((finding for finding in diagnosis.findings if finding.rule == rule), None)
    assert finding is not None, [finding.statement for finding in diagnosis.findings]
    return finding


def silent(state: TraceState, **options: Any) -> Diagnosis:
    """The diagnosis, which must hold no finding and no unexplained symptom."""
    assert state.unknown == 0
    diagnosis = diagnose(state, **options)
    assert not diagnosis.findings, [finding.statement for finding in diagnosis.findings]
    assert not [entry for entry in diagnosis.cannot_tell if entry.symptom], diagnosis.cannot_tell
    return diagnosis


def sane(diagnosis: Diagnosis, ids: Collection[str]) -> Diagnosis:
    """The diagnosis, whose findings must be of this trace whatever else is wrong with it."""
    assert diagnosis.verdict
    for finding in diagnosis.findings:
        assert finding.rule in NAMES and finding.statement and "nan" not in finding.statement
        assert math.isfinite(finding.lost_ms) and finding.lost_ms >= 0
        assert 0 < finding.confidence <= 1 and finding.slowdown >= 1
        assert finding.end is None or finding.start <= finding.end
        assert set(finding.affected) <= set(ids) and finding.culprit in (None, *ids)
        assert len(finding.affected) == min(finding.affected_total, AFFECTED_SHOWN)
    return diagnosis


def seconds(finding: Finding, state: TraceState) -> tuple[float, float | None]:
    """Start and end in s from the begin of the trace."""
    end = None if finding.end is None else (finding.end - state.began) / 1e9
    return (finding.start - state.began) / 1e9, end

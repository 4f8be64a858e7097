"""What tests ask of a diagnosis, in a line each."""

from __future__ import annotations

from typing import Any

from tracer.analysis.diagnosis import Diagnosis, Finding, diagnose
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


def seconds(finding: Finding, state: TraceState) -> tuple[float, float | None]:
    """Start and end in s from the begin of the trace."""
    end = None if finding.end is None else (finding.end - state.began) / 1e9
    return (finding.start - state.began) / 1e9, end

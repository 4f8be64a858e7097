"""Diagnosis: from a trace to the stage that is at fault, with evidence.

    diagnosis = diagnose(state)
    print(diagnosis.verdict)
    for finding in diagnosis.findings: ...

`LiveDiagnosis` follows a state that goes on. ``docs/diagnosis.md`` lists the rules and describes the JSON document.
"""

from tracer.analysis.diagnosis.case import Budget, ClientTimes
from tracer.analysis.diagnosis.engine import diagnose
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Exhibit, Finding
from tracer.analysis.diagnosis.live import LiveDiagnosis
from tracer.analysis.diagnosis.series import ObservedState, Series

__all__ = [
    "Budget",
    "CannotTell",
    "ClientTimes",
    "Diagnosis",
    "Exhibit",
    "Finding",
    "LiveDiagnosis",
    "ObservedState",
    "Series",
    "diagnose",
]

"""Diagnosis: from a trace to the stage that is at fault, with evidence.

    diagnosis = diagnose(state)
    print(diagnosis.verdict)
    for finding in diagnosis.findings: ...

`tracer.monitor.live_findings.LiveDiagnosis` follows a state that goes on. ``docs/diagnosis.md``
lists the rules and describes the JSON document.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tracer.analysis.diagnosis.case import Budget
    from tracer.analysis.diagnosis.clients import ClientTimes
    from tracer.analysis.diagnosis.engine import diagnose
    from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Exhibit, Finding
    from tracer.analysis.diagnosis.series import ObservedState

__all__ = [
    "Budget",
    "CannotTell",
    "ClientTimes",
    "Diagnosis",
    "Exhibit",
    "Finding",
    "ObservedState",
    "diagnose",
]

_PLACES: Final = {
    "Budget": "case",
    "CannotTell": "finding",
    "ClientTimes": "clients",
    "Diagnosis": "finding",
    "Exhibit": "finding",
    "Finding": "finding",
    "ObservedState": "series",
    "diagnose": "engine",
}
"""Where each name lives: a viewer needs the state before its first paint, and the rules a second
later."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

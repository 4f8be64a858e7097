"""Which thresholds a rule goes by: read off its code, so that it cannot be out of date."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Final

from tracer.analysis.diagnosis.rules import CAUSES, RULES
from tracer.analysis.diagnosis.thresholds import TABLE, Threshold

_PACKAGE: Final = __name__.rsplit(".", 2)[0]
_ALWAYS: Final = ("LOST_MS", "LOST_SHARE")
"""Every finding has to pass these, unless it is exact."""


@cache
def thresholds_of(finding: str) -> dict[str, Threshold]:
    """Return name → threshold of all that the rule behind a finding looks at."""
    cause = CAUSES.get(finding)
    rule = next((rule for rule in RULES if cause in rule.causes), None)
    if cause is None or rule is None:
        return {}
    seen: set[str] = set() if cause.exact else set(_ALWAYS)
    _walk(rule.function, seen, set())
    return {name: row for name, row in TABLE.items() if name in seen}


def _walk(function: object, seen: set[str], done: set[object]) -> None:
    """Collect the names of the table in a function of the diagnosis, and in those that it calls."""
    if not isinstance(function, FunctionType) or function in done:
        return
    if not function.__module__.startswith(_PACKAGE):
        return
    done.add(function)
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in TABLE:
                seen.add(name)
            _walk(function.__globals__.get(name), seen, done)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)

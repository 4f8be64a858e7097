"""Which thresholds a rule goes by: read off its code, so that it cannot be out of date."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tracer.analysis.diagnosis.engine import EXACT
from tracer.analysis.diagnosis.rules import RULES
from tracer.analysis.diagnosis.thresholds import TABLE, Threshold

_OURS = "tracer.analysis.diagnosis"
_ALWAYS = ("LOST_MS", "LOST_SHARE")
"""Every finding has to pass these, unless it is read off rather than estimated."""


@cache
def thresholds_of(finding: str) -> dict[str, Threshold]:
    """Name → threshold, of all that the rule behind a finding looks at, in the order of the
    table."""
    rule = next((rule for rule, names in RULES.items() if finding in names), None)
    if rule is None:
        return {}
    seen: set[str] = set() if finding in EXACT else set(_ALWAYS)
    _walk(rule, seen, set())
    return {name: row for name, row in TABLE.items() if name in seen}


def _walk(function: Callable[..., Any], seen: set[str], done: set[object]) -> None:
    """Collect what a function of the diagnosis, and those of it that this one calls, names of the
    table."""
    if (
        not isinstance(function, FunctionType)
        or function in done
        or not function.__module__.startswith(_OURS)
    ):
        return
    done.add(function)
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in TABLE:
                seen.add(name)
            called = function.__globals__.get(name)
            if not isinstance(called, ModuleType) and callable(called):
                _walk(called, seen, done)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)

"""How much of what can be tried without end the fast part of the tests tries: `-m "not slow"` is
for the minute between two changes, the whole suite for what is handed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_few = False


def chosen(marks: str) -> None:
    """Which part runs, as pytest's ``-m`` was given; before any test is loaded."""
    global _few
    _few = marks.replace(" ", "") == "notslow"


def examples(count: int, few: int | None = None) -> int:
    """How many examples a test tries: all `count` of them, but a fifth (or `few`) where only the
    fast part runs."""
    return min(count, few or max(3, count // 5)) if _few else count


def thinned(values: Iterable[Any], every: int) -> list[Any]:
    """Parameters of a sweep (tuples where a test takes several) of which the first and then one of
    `every` is part of the fast tests, all of the suite."""
    return [
        value
        if place % every == 0
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for place, value in enumerate(values)
    ]

"""Running sums of the division of steps: those taken all at once are those taken one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import Step
from tests.effort import examples
from tracer.state.engine import step_history
from tracer.state.engine.step_history import StepHistory


def history(seed: int, *, trimmed: bool) -> StepHistory:
    """Steps of which any instant may be missing, before the one before it, or beyond the token."""
    pick, made, t = random.Random(seed), StepHistory(), 1_000
    for n in range(400):
        at, offsets = 0, []
        for _ in range(9):
            at += pick.randrange(-5, 100)
            offsets.append(at if pick.random() < 0.8 else -1)
        made.append(Step(t, n, *offsets, batch=3, timing=pick.choice([0, 1, 2, 3])))
        t += pick.randrange(1, 900)
    if trimmed:
        made.trim(100)
    return made


def gained(made: StepHistory) -> list[list[int]]:
    """What each step adds to the sums before it; the sums themselves start where someone asked
    first."""
    sums = [made.sums(index) for index in range(made.base - 1, made.last_index + 1)]
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(sums)]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1 << 32), st.booleans(), st.integers(-1, 299))
@example(0, False, -1)
@example(1, True, 250)
def test_many_at_once_are_as_one_by_one(seed: int, trimmed: bool, known: int) -> None:
    once, singly = history(seed, trimmed=trimmed), history(seed, trimmed=trimmed)
    for made in (once, singly):
        if known >= 0:
            made.sums(made.base + known % len(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_history, "_MANY", 2)
        once.sums(once.last_index)
    assert gained(once) == gained(singly)
    assert all(type(value) is int for value in once.sums(once.last_index))

"""Rates over windows, against all that was ever added."""

from __future__ import annotations

import pytest

from tracer.state.metrics.rates import ENTRIES, GRAIN_NS, RateLog

COUNT = 2 * ENTRIES + 700
"""More than are kept, so that the oldest have gone."""


@pytest.mark.parametrize("window", [1, 7, 900, ENTRIES - 1, 10 * COUNT])
def test_a_rate_is_right_when_entries_have_gone(window: int) -> None:
    log = RateLog(2)
    for t in range(1, COUNT + 1):
        log.add(t * GRAIN_NS, 1, t % 7)
    inside = range(max(1, COUNT - window + 1), COUNT + 1)
    assert log.over(COUNT * GRAIN_NS, window * GRAIN_NS) == (
        len(inside), sum(t % 7 for t in inside)
    )  # fmt: skip
    assert log.totals() == (COUNT, sum(t % 7 for t in range(1, COUNT + 1)))
    assert len(log.entries()[0]) < 2 * ENTRIES

"""Columns in pieces, as keyframes tell them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.state import chunks
from tracer.state.metrics.rates import ENTRIES, GRAIN_NS, RateLog

numbers = st.integers(-(1 << 62), 1 << 62)


@given(st.integers(1, 4), st.integers(0, 40), st.integers(1, 9), st.data())
def test_pieces_are_joined_to_what_was_cut(
    rows: int, count: int, size: int, data: st.DataObject
) -> None:
    columns = [data.draw(st.lists(numbers, min_size=count, max_size=count)) for _ in range(rows)]
    pieces = chunks.cut(columns, size)
    assert chunks.join(pieces, rows, size, count).tolist() == columns
    longer = chunks.cut([[*column, 1] for column in columns], size)
    # what is full does not change any more
    assert longer[: count // size] == pieces[: count // size]


@pytest.mark.parametrize(
    "pieces", [[], [b""], [b"1234567"], [bytes(8 * 6), bytes(8 * 2)], [bytes(8 * 9)]]
)
def test_pieces_of_another_size_are_refused(pieces: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        chunks.join(pieces, 3, 4, 5)


def test_numbers_come_back_from_their_planes() -> None:
    values = np.array([0, 1, -1, 255, 256, -(1 << 63), (1 << 63) - 1], np.int64)
    assert chunks.from_planes(chunks.planes(values)).tolist() == values.tolist()


def test_a_rate_goes_on_as_it_was_when_entries_have_gone() -> None:
    told: dict[str, bytes] = {}
    log = RateLog(2)
    for t in range(2 * ENTRIES + 700):
        log.add(t * GRAIN_NS, 1, t % 7)
        if t % 5_000 == 0:
            told |= log.chunks(max(0, log.end - 5_100))
    told |= log.chunks(max(0, log.end - 5_100))
    now, last = (2 * ENTRIES + 700) * GRAIN_NS, 2 * ENTRIES + 699
    # those before the last pieces are read when they are wanted
    for window in (1, 900, 1_535, 1_537, 5_000, 40_000):
        asleep = RateLog(2)
        asleep.restore(told)
        asked = (now - 1, window * GRAIN_NS), (now - 3_000 * GRAIN_NS, window * GRAIN_NS)
        assert [asleep.over(*each) for each in asked] == [log.over(*each) for each in asked]
        assert asleep.end == log.end == last + 1 and asleep.totals() == log.totals()
    again = RateLog(2)
    again.restore(told)
    assert again.entries() == log.entries() and len(log.entries()[0]) == ENTRIES + 700
    now = (2 * ENTRIES + 700) * GRAIN_NS
    for log_ in (log, again):
        log_.add(now, 1, 1)
    assert [again.over(now, window * GRAIN_NS) for window in (1, 900, 40_000)] == [
        log.over(now, window * GRAIN_NS) for window in (1, 900, 40_000)
    ]
    assert all(a < b for a, b in pairwise(again.entries()[0]))

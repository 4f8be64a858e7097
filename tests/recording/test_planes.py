"""Columns of numbers as keyframes hold them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.recording.keyframes.planes import (
    pack_column,
    pack_columns,
    unpack_column,
    unpack_columns,
)

numbers = st.one_of(st.integers(-3, 3), st.integers(-(1 << 62), 1 << 62))
cells = st.one_of(st.none(), numbers)
tables = st.integers(0, 12).flatmap(lambda rows: st.lists(
    st.one_of(
        st.lists(cells, min_size=rows, max_size=rows), cells.map(lambda cell: [cell] * rows),
        st.integers(0, 1 << 50).map(lambda begin: [begin + 3 * row for row in range(rows)]),
    ),
    min_size=1, max_size=6,
))  # fmt: skip


@given(tables)
def test_columns_come_back(columns: list[list[int | None]]) -> None:
    rows = len(columns[0])
    assert unpack_columns(pack_columns(columns), len(columns), rows) == columns
    assert [unpack_column(pack_column(column), rows) for column in columns] == columns


@given(tables, st.data())
def test_columns_that_were_cut_or_changed_are_refused_or_are_others(
    columns: list[list[int | None]], data: st.DataObject
) -> None:
    packed, rows = pack_columns(columns), len(columns[0])
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    with pytest.raises((ValueError, IndexError)):
        unpack_columns(cut, len(columns), rows)
    place = data.draw(st.integers(0, len(packed) - 1))
    changed = packed[:place] + bytes([data.draw(st.integers(0, 255))]) + packed[place + 1 :]
    try:
        found = unpack_columns(changed, len(columns), rows)
    except (ValueError, IndexError):
        return
    assert [len(column) for column in found] == [rows] * len(columns)

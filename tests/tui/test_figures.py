"""Numbers as text: few digits, fixed widths, and a dash for what is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.tui.toolkit import figures


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.123, "0.12"),
        (8.414, "8.41"),
        (9.996, "10.0"),
        (86.23, "86.2"),
        (99.96, "100"),
        (1883.4, "1,883"),
        (-2.5, "-2.50"),
    ],
)
def test_milliseconds_have_three_digits_then_whole_numbers(ms: float | None, text: str) -> None:
    assert figures.milliseconds(ms) == text


def test_decimal_points_stand_in_one_column() -> None:
    values = [figures.aligned_milliseconds(ms, 10) for ms in (0.12, 8.41, 86.2, 99.9)]
    assert {text.index(".") for text in values} == {7}
    whole = [figures.aligned_milliseconds(ms, 10) for ms in (774.0, 1883.0)]
    assert {len(text.rstrip()) for text in whole} == {7}
    assert all(len(text) == 10 for text in values + whole)


@given(st.floats(0, 1e12), st.integers(1, 12))
def test_a_clock_fits_its_cells(ms: float, cells: int) -> None:
    assert len(figures.clock(ms, cells)) == cells


def test_a_clock_that_would_not_fit_says_seconds() -> None:
    assert figures.clock(1_234_567, 9) == "1,234,567"
    assert figures.clock(12_345_678, 9) == "  12,346s"


@given(st.floats(0, 9e14))
def test_short_counts_have_five_characters_at_most(value: float) -> None:
    assert len(figures.short_count(value)) <= 6
    assert len(figures.short_count(min(value, 9e11))) <= 5


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "-"), (4, "4 B"), (9216, "9.00 KiB"), (131_072, "128 KiB"), (2.62e8, "250 MiB")],
)
def test_sizes_are_binary(size: float | None, text: str) -> None:
    assert figures.size(size) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (0.0, "0"), (0.0004, "<0.1"), (0.004, "0.4"), (0.954, "95"), (1.0, "100")],
)
def test_shares_are_never_rounded_to_nothing(share: float | None, text: str) -> None:
    assert figures.percent(share) == text


def test_trace_time_is_minutes_and_seconds() -> None:
    assert figures.instant(61_500_000_000) == "1:01"
    assert figures.instant(3_661_000_000_000) == "1:01:01"
    assert [figures.span(seconds) for seconds in (10.0, 60.0, 600.0, 3600.0)] == [
        "10 s",
        "1 min",
        "10 min",
        "1 h",
    ]

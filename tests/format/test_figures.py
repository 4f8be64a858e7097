"""Numbers as text: few digits, fixed widths, and a dash for what is not known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.format import figures


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0.0, "0.00"),
        (0.123, "0.12"),
        (8.414, "8.41"),
        (9.996, "10.0"),
        (86.23, "86.2"),
        (99.96, "100"),
        (1883.4, "1,883"),
        (-2.5, "-2.50"),
        (float("nan"), "–"),
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
    [(None, "–"), (4, "4 B"), (9216, "9.00 KiB"), (131_072, "128 KiB"), (2.62e8, "250 MiB")],
)
def test_sizes_are_binary(size: float | None, text: str) -> None:
    assert figures.size(size) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (0.0, "0"), (0.0004, "<0.1"), (0.004, "0.4"), (0.954, "95"), (1.0, "100")],
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


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (figures.milliseconds(0.0857, fine=True), "0.086"),
        (figures.signed_milliseconds(0.0857), "+0.086"),
        (figures.signed_milliseconds(-171.2), "-171"),
        (figures.signed_milliseconds(0.0004), "0"),
        (figures.duration(8.414), "8.41 ms"),
        (figures.duration(12_345), "12.3 s"),
        (figures.duration(59_960), "1 min 0 s"),
        (figures.duration(338_549), "5 min 39 s"),
        (figures.duration(7_383_000), "2 h 3 min"),
        (figures.significant(0.2434), "0.243"),
        (figures.significant(1234.5), "1,234"),
        (figures.significant(math.inf), "–"),
        (figures.rate(0.268), "0.27"),
        (figures.rate(0.0), "0.0"),
        (figures.rate(2.44), "2.4"),
        (figures.percentage(0.484), "48 %"),
        (figures.percentage(None), "–"),
        (figures.change(0.0949), "+9.5 %"),
        (figures.change(11.2), "×12"),
        (figures.factor(2.44), "×2.4"),
        (figures.factor(5000), ">×1,000"),
    ],
)
def test_every_kind_of_figure_has_one_form(text: str, wanted: str) -> None:
    assert text == wanted

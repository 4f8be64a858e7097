"""Axes: pages that jump, marks at round times, and columns for 0.1 ms beside 1,800 ms."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.tui.toolkit.axis import PageAxis, elastic_widths, tick_label
from tracer.tui.toolkit.history import History, nice_top, plot


@given(st.integers(0, 10**13), st.integers(1, 10**12), st.integers(0, 10**11))
def test_the_page_holds_what_it_was_fitted_to(begin: int, reach: int, later: int) -> None:
    axis = PageAxis()
    for latest in (begin + reach, begin + reach + later):
        axis.fit(latest - reach, latest)
        assert axis.begin <= latest < axis.begin + axis.span
        assert axis.begin <= latest - reach


def test_the_page_stands_still_between_jumps() -> None:
    axis = PageAxis()
    axis.fit(0, 7 * NS_PER_S)
    versions = set()
    for step in range(200):
        latest = 7 * NS_PER_S + step * 50 * NS_PER_MS
        axis.fit(latest - 5 * NS_PER_S, latest)
        versions.add((axis.begin, axis.span))
    assert len(versions) <= 7


def test_marks_are_round_and_apart() -> None:
    axis = PageAxis()
    axis.fit(60 * NS_PER_S, 68 * NS_PER_S)
    ticks = axis.ticks(100, 0)
    assert len(ticks) >= 3
    assert all(b.column - a.column >= 10 for a, b in itertools.pairwise(ticks))
    assert all(int(tick.label.rpartition(":")[2]) % 2 == 0 for tick in ticks)


def test_labels_have_the_digits_that_their_step_needs() -> None:
    assert tick_label(61 * NS_PER_S, NS_PER_S) == "1:01"
    assert tick_label(61 * NS_PER_S + 200 * NS_PER_MS, 200 * NS_PER_MS) == "1:01.2"
    assert tick_label(20 * NS_PER_MS, 10 * NS_PER_MS) == "0:00.02"
    assert tick_label(3_661 * NS_PER_S, NS_PER_S) == "1:01:01"


def test_zooming_by_hand_lasts_until_it_is_given_back() -> None:
    axis = PageAxis()
    axis.fit(0, 10 * NS_PER_S)
    before = axis.span
    axis.zoom_by(-3)
    axis.fit(0, 10 * NS_PER_S)
    assert axis.span < before
    axis.fit_again()
    axis.fit(0, 10 * NS_PER_S)
    assert axis.span >= 10 * NS_PER_S


@given(st.lists(st.integers(0, 10**13).map(lambda ns: ns / 1e6), max_size=30), st.integers(0, 200))
def test_elastic_columns_fill_the_width_and_hide_nothing(
    durations: list[float], width: int
) -> None:
    columns = elastic_widths(durations, width)
    alive = [index for index, duration in enumerate(durations) if duration > 0]
    if not any(columns):
        assert width == 0 or not alive
        return
    assert sum(columns) == width if len(alive) < width else sum(columns) <= width
    if len(alive) < width:
        assert all(columns[index] >= 1 for index in alive)


def test_the_longest_interval_still_looks_longest() -> None:
    columns = elastic_widths([1.3, 0.9, 0.4, 1.2, 0.04, 0.1, 86.0, 0.5, 0.3, 0.2, 1794.0, 0.5], 120)
    assert columns[10] == max(columns)
    assert columns[10] > 3 * columns[6] > 3 * columns[4]
    assert min(columns) >= 1


def test_a_chart_fills_up_before_it_jumps() -> None:
    history = History(NS_PER_S)
    pages = []
    for second in range(40):
        history.add(second * NS_PER_S, float(second))
        pages.append(history.page(20, second * NS_PER_S))
    moved = sum(a[:5] != b[:5] for a, b in itertools.pairwise(pages[20:]))
    assert moved == 3
    assert pages[-1][-1] == 39.0


def test_plots_reach_their_top_and_show_the_smallest_value() -> None:
    rises = " ▁▂▃▄▅▆▇█"
    assert plot([8.0, 0.01, None, 4.0], rises, 1, 8.0) == ["█▁ ▄"]
    assert plot([8.0, 4.0], rises, 2, 8.0) == ["█ ", "██"]
    assert [nice_top(value) for value in (0.0, 0.3, 7.0, 51.0, 100.0)] == [
        1.0,
        0.5,
        10.0,
        100.0,
        100.0,
    ]

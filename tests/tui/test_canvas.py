"""Rows of cells: built to a width, compared cell by cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style

from tracer.format.text import cell_width, clean
from tracer.tui.toolkit.canvas import Line, changed_columns
from tracer.tui.toolkit.wrapped import wrap

RED, BLUE = Style(color="red"), Style(color="blue")
TEXT = st.text(
    alphabet=st.one_of(
        st.characters(min_codepoint=32, max_codepoint=126),
        st.sampled_from("中文░█▏→e\u0301\u200d👨👩❤\ufe0f\x1b\u202e\n"),
    ),
    max_size=30,
)


def cells_of(row: list[Segment]) -> list[tuple[str, Style | None]]:
    """One entry a column, by walking characters of one or two cells."""
    cells: list[tuple[str, Style | None]] = []
    for text, style, _ in row:
        for character in text:
            cells.extend([(character, style)] * max(0, cell_width(character)))
    return cells


def plain_row(texts: list[tuple[str, bool]], width: int) -> list[Segment]:
    line = Line(width)
    for text, red in texts:
        line.add_text(text, RED if red else BLUE)
    return line.end(BLUE)


@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=5), st.integers(0, 60))
def test_a_line_is_exactly_as_wide_as_asked_for(texts: list[tuple[str, bool]], width: int) -> None:
    row = plain_row(texts, width)
    assert sum(cell_width(segment.text) for segment in row) == width


ROWS = st.lists(st.tuples(st.text(alphabet="ab 中░", max_size=6), st.booleans()), max_size=6)


@given(ROWS, ROWS, st.integers(1, 24))
def test_changed_columns_cover_every_difference_and_cut_no_glyph(
    one: list[tuple[str, bool]], two: list[tuple[str, bool]], width: int
) -> None:
    old, new = plain_row(one, width), plain_row(two, width)
    runs = changed_columns(old, new)
    before, after = cells_of(old), cells_of(new)
    dirty = {column for begin, end in runs for column in range(begin, end)}
    assert {column for column in range(width) if before[column] != after[column]} <= dirty
    assert all(0 <= begin < end <= width for begin, end in runs)
    assert runs == sorted(runs)
    for row in (old, new):
        at = 0
        for segment in row:
            for character in segment.text:
                wide = cell_width(character)
                if wide == 2:
                    assert (at in dirty) == (at + 1 in dirty)
                at += wide


def test_equal_rows_have_no_changed_columns() -> None:
    row = [Segment("abc", RED), Segment("def", BLUE)]
    assert changed_columns(row, [Segment("abc", RED), Segment("def", BLUE)]) == []


def test_only_the_digits_that_changed_are_dirty() -> None:
    old = [Segment("req_1   ", RED), Segment("1,706", BLUE)]
    new = [Segment("req_1   ", RED), Segment("1,816", BLUE)]
    assert changed_columns(old, new) == [(10, 12)]


def test_runs_with_a_small_gap_are_one() -> None:
    old = [Segment("a....b..........c", RED)]
    new = [Segment("A....B..........C", RED)]
    assert changed_columns(old, new) == [(0, 6), (16, 17)]


@given(TEXT, st.integers(1, 30))
def test_wrapping_loses_nothing_but_the_spaces_at_breaks(text: str, width: int) -> None:
    rows = wrap(text, width, RED, BLUE)
    shown = "".join(segment.text for row in rows for segment in row)
    expected = clean(text, keep_newlines=True)
    assert shown.replace(" ", "") == expected.replace("\n", "").replace(" ", "")
    for row in rows:
        cells = sum(cell_width(segment.text) for segment in row)
        assert cells <= width or (width == 1 and cells == 2)


def test_special_tokens_are_picked_out() -> None:
    rows = wrap("<|im_start|>user\nhi</s>", 40, RED, BLUE, "$")
    assert [(s.text, s.style) for s in rows[0]] == [
        ("<|im_start|>", BLUE),
        ("user", RED),
        ("$", BLUE),
    ]
    assert [(s.text, s.style) for s in rows[1]] == [("hi", RED), ("</s>", BLUE)]

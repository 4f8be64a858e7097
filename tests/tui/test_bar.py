"""Bars: edges where they are in time, waits with a texture, short stages neither blown up nor
lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol.stages import Stage
from tracer.format.text import cell_width
from tracer.tui.toolkit.bar import WAIT, Bars, Stretch
from tracer.tui.toolkit.theme import ANSI16, ASCII, DARK, MONO, UNICODE, Look

DECODE, PREFILL = int(Stage.DECODE), int(Stage.PREFILL)
LOOKS = [Look(DARK, UNICODE), Look(ANSI16, UNICODE), Look(MONO, UNICODE), Look(MONO, ASCII)]


def text_of(bars: Bars, stretches: list[Stretch], **options: object) -> str:
    return "".join(segment.text for segment in bars.draw(stretches, **options))  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.integers(-50, 300),
            st.integers(-50, 300),
            st.sampled_from([1, 4, 4 | WAIT, 7, 11, 13]),
        ),
        max_size=8,
    ),
    st.integers(0, 40),
    st.sampled_from(LOOKS),
    st.booleans(),
)
def test_a_bar_is_as_wide_as_asked_for(
    parts: list[tuple[int, int, int]], width: int, look: Look, keep_short: bool
) -> None:
    bars = Bars(look, width, "  |")
    drawn = bars.draw(
        [Stretch(*part) for part in parts],
        marks=[(3, "x")],
        head=5,
        cut=True,
        keep_short=keep_short,
    )
    assert sum(cell_width(segment.text) for segment in drawn) == width


def test_edges_fall_on_eighths() -> None:
    look = Look(DARK, UNICODE)
    bars = Bars(look, 4)
    drawn = bars.draw([Stretch(8, 19, DECODE)])
    assert "".join(segment.text for segment in drawn) == " █▍ "
    edge = drawn[2].style
    assert edge is look.style(look.stage_colours[DECODE], DARK.back)


def test_two_stages_share_a_cell_with_their_colours_side_by_side() -> None:
    look = Look(DARK, UNICODE)
    (cell,) = Bars(look, 1).draw([Stretch(0, 3, PREFILL), Stretch(3, 8, DECODE)])
    assert cell.text == "▍"
    assert cell.style is look.style(look.stage_colours[PREFILL], look.stage_colours[DECODE])


def test_waiting_is_drawn_lightly() -> None:
    for look in LOOKS:
        bars = Bars(look, 2)
        assert (
            text_of(bars, [Stretch(0, bars.units, int(Stage.ADMISSION) | WAIT)])
            == look.glyphs.wait * 2
        )


def test_a_stage_shorter_than_an_eighth_is_dropped_unless_it_is_all_there_is_or_asked_for() -> None:
    bars = Bars(Look(DARK, UNICODE), 2)
    long = Stretch(0, 16, DECODE)
    assert text_of(bars, [long, Stretch(5, 5, PREFILL)]) == "██"
    assert text_of(bars, [Stretch(5, 5, PREFILL)]) != "  "
    assert text_of(bars, [long, Stretch(5, 5, PREFILL)], keep_short=True) != "██"


@pytest.mark.parametrize("look", LOOKS[1:])
def test_without_reliable_colours_the_running_end_and_the_groups_have_glyphs(look: Look) -> None:
    bars = Bars(look, 8)
    text = text_of(bars, [Stretch(0, 2, PREFILL), Stretch(2, 6, DECODE)], head=6)
    glyphs = look.glyphs
    prefill, decode = look.fill(Stage.PREFILL), look.fill(Stage.DECODE)
    assert text == prefill * 2 + decode * 4 + glyphs.head + " "
    assert prefill != decode


def test_a_preemption_is_marked_on_the_bar() -> None:
    look = Look(DARK, UNICODE)
    drawn = Bars(look, 6).draw([Stretch(0, 48, DECODE)], marks=[(3, look.glyphs.preempted)])
    assert "".join(segment.text for segment in drawn) == "███×██"


def test_empty_cells_show_the_grid() -> None:
    assert text_of(Bars(Look(DARK, UNICODE), 6, " ┊  ┊ "), [Stretch(16, 24, DECODE)]) == " ┊█ ┊ "

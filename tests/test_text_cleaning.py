"""Untrusted text never steers a terminal, loses nothing, and keeps its column."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.format.text import cell_width, clean, fit

ATTACKS = {
    "OSC 52": "\x1b]52;c;cm0gLXJm\x07",
    "OSC 0": "\x1b]0;title\x1b\\",
    "OSC 8": "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "unterminated OSC": "\x1b]",
    "DCS": "\x1bPq#0\x1b\\",
    "APC": "\x1b_Gi=1\x1b\\",
    "cursor report": "\x1b[6n",
    "reset": "\x1bc",
    "8-bit CSI": "\x9b31m",
    "8-bit OSC": "\x9d0;t\x9c",
    "bidi override": "abc\u202etxt.exe\u202c",
    "bidi isolate": "\u2066abc\u2069",
    "line separators": "a\u2028b\u2029c",
    "NUL, backspace, CR, DEL": "a\0b\bc\rd\x7f",
    "lone surrogate": "a\ud800b\udfff",
    "byte order mark": "\ufeffa",
}


def allowed(character: str, newlines: bool = False) -> bool:
    return (newlines and character == "\n") or unicodedata.category(character) not in (
        "Cc",
        "Cs",
        "Zl",
        "Zp",
    )


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_nothing_that_steers_a_terminal_is_left(attack: str) -> None:
    cleaned = clean(attack)
    assert all(map(allowed, cleaned))
    assert not set(cleaned) & set("\u202e\u202c\u2066\u2069\ufeff\u200e\u200f\u061c")
    cleaned.encode("utf-8")


def test_escapes_are_visible_and_tell_the_character() -> None:
    assert clean("\x1b[31m") == r"\x1b[31m"
    assert clean("\u202e\u2028\ud800\U000e0001") == r"\u202e\u2028\ud800\U000e0001"
    assert clean("a\tb\r\nc") == r"a\tb\r\nc"
    assert clean("a\tb\r\nc", keep_newlines=True) == "a\\tb\\r\nc"


@pytest.mark.parametrize(
    "text",
    [
        "[b + x",
        "[/",
        "[/red]p",
        "[[",
        "[old] p",
        '["a", {"b": 1}]',
        "C:\\x1b",
        "漢字 ก็ é",
        "❤️ 👩‍👩‍👧‍👦 🇩🇪",
        "re\u0301sume\u0301",
    ],
)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert clean(text) == text


@given(st.text(st.characters(codec=None, categories=None)))
def test_any_text_becomes_one_row_that_encodes(text: str) -> None:
    cleaned = clean(text)
    assert all(map(allowed, cleaned))
    cleaned.encode("utf-8")
    assert len(cleaned.splitlines()) <= 1
    assert clean(cleaned) == cleaned
    assert all(allowed(character, newlines=True) for character in clean(text, keep_newlines=True))
    assert clean(text, keep_newlines=True).count("\n") == text.count("\n")


def test_a_joiner_that_joins_nothing_swallows_no_neighbour() -> None:
    assert clean("\u200d│") == r"\u200d│"
    for text in ("a\u200d", "\u200db", "👩\u200d", "👩\u200d ok"):
        cleaned = clean(text)
        assert cell_width(cleaned + "│ab") == cell_width(cleaned) + 3


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("abc", 3),
        ("漢字", 4),
        ("e\u0301", 1),
        ("❤️", 2),
        ("❤︎", 1),
        ("👩‍👩‍👧‍👦", 2),
        ("", 0),
        ("ก็", 1),
    ],
)
def test_width_in_cells(text: str, cells: int) -> None:
    assert cell_width(text) == cells


awkward = st.text("ab 漢👩\u200d\ufe0f\u0301❤🇩1\u20e3\u0e33\u1100\u1161", max_size=12)


@given(
    st.one_of(st.text(max_size=40), awkward), st.integers(0, 30), st.sampled_from(["", "…", "漢"])
)
def test_fit_is_exactly_as_wide_as_asked_for(text: str, cells: int, ellipsis: str) -> None:
    assert cell_width(fit(clean(text), cells, ellipsis=ellipsis)) == cells


def test_fit_crops_pads_and_marks() -> None:
    assert fit("ab", 4) == "ab  "
    assert fit("abcdef", 4) == "abcd"
    assert fit("abcdef", 4, ellipsis="…") == "abc…"
    assert fit("abcd", 4, ellipsis="…") == "abcd"
    assert fit("漢字", 3) == "漢 "
    assert fit("漢字", 1) == " "
    assert fit("abc", 0) == fit("abc", -1) == ""


def test_a_very_long_line_is_cut_quickly() -> None:
    line = "x" * 640_000
    assert fit(line, 10) == "x" * 10
    assert fit("e" + "\u0301" * 10_000 + "b", 2).endswith("b")

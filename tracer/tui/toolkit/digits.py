"""Large figures, three rows high, for an audience at a distance."""

from __future__ import annotations

from typing import Final

_PIXELS: Final = {
    "0": "111 101 101 101 111",
    "1": "010 110 010 010 111",
    "2": "111 001 111 100 111",
    "3": "111 001 111 001 111",
    "4": "101 101 111 001 001",
    "5": "111 100 111 001 111",
    "6": "111 100 111 101 111",
    "7": "111 001 010 010 010",
    "8": "111 101 111 101 111",
    "9": "111 101 111 001 111",
    ".": "0 0 0 0 1",
    ",": "00 00 00 01 10",
    "-": "000 000 111 000 000",
    "–": "000 000 111 000 000",
    "<": "001 010 100 010 001",
    " ": "0 0 0 0 0",
}
_HALVES: Final = {"00": " ", "10": "▀", "01": "▄", "11": "█"}
ROWS: Final = 3


def large(text: str) -> list[str]:
    """Return `text` (digits, separators, ``-``, ``<``) as three rows of half blocks."""
    shapes = [_PIXELS.get(character, _PIXELS[" "]).split() for character in text]
    rows: list[str] = []
    for top in (0, 2, 4):
        pieces = []
        for shape in shapes:
            upper = shape[top]
            lower = shape[top + 1] if top + 1 < len(shape) else "0" * len(upper)
            pieces.append("".join(_HALVES[a + b] for a, b in zip(upper, lower, strict=True)))
        rows.append(" ".join(pieces))
    return rows

"""Sentences of our own as lines: wrapped at words, and in ASCII where the terminal has nothing
else."""

from __future__ import annotations

import textwrap
from typing import Final

from tracer.format.text import clean
from tracer.tui.toolkit.theme import ASCII, Look

_PLAIN: Final = str.maketrans(
    {"→": ">", "×": "x", "·": "*", "²": "2", "…": "~", "−": "-", "–": "-"}
)


def plain(text: str, look: Look) -> str:
    """`text` cleaned, with the signs that the glyphs of `look` allow; as many cells as before."""
    text = clean(text)
    if look.glyphs is not ASCII:
        return text
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")


def paragraph(text: str, width: int, look: Look) -> list[str]:
    """`text` in lines of at most `width` cells."""
    return textwrap.wrap(plain(text, look), max(1, width), break_long_words=True) or [""]

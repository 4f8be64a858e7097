"""Sentences of our own as lines, and text in ASCII for terminals that show nothing else."""

from __future__ import annotations

import codecs
import textwrap
from typing import Final

from tracer.format.text import cell_width, clean
from tracer.tui.toolkit.theme import ASCII, Look

CELLS: Final = "tracer-cells"
"""Name of the codec error handler that writes a question mark for each cell of a glyph."""
_SIGNS: Final = str.maketrans("→←×·²…−–±●↑↓", "><x*2~--~*^v")


def _question_marks(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "?" * cell_width(error.object[error.start : error.end]), error.end


codecs.register_error(CELLS, _question_marks)


def ascii_text(text: str) -> str:
    """Return `text` in ASCII, in as many cells as before."""
    return text.translate(_SIGNS).encode("ascii", CELLS).decode("ascii")


def plain(text: str, look: Look) -> str:
    """Return `text` cleaned, with the signs that `look` allows, in as many cells."""
    return ascii_text(clean(text)) if look.glyphs is ASCII else clean(text)


def paragraph(text: str, width: int, look: Look) -> list[str]:
    """Return `text` in lines of at most `width` characters."""
    return textwrap.wrap(plain(text, look), max(1, width), break_on_hyphens=False) or [""]

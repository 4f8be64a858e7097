"""Untrusted text as rows: cleaned, wrapped to cells, with the special tokens of chat templates
picked out.

`rich.text.Text.wrap` loses what a reader of prompts looks for: it drops spaces in front of a break
and blanks out wide glyphs in narrow columns.
"""

from __future__ import annotations

import re
from typing import Final

from rich.cells import split_graphemes
from rich.segment import Segment
from rich.style import Style

from tracer.format.text import cell_width, clean

SPECIAL: Final = re.compile(
    r"<\|[^|<>\n]{1,60}\|>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>|\[/?INST\]"
)
"""What templates write for special tokens."""
ROWS: Final = 20_000
"""Rows made of one text at most."""


def wrap(
    text: str, width: int, style: Style, special: Style, newline: str = ""
) -> list[list[Segment]]:
    """Return rows of `text`, each at most `width` cells (not padded). Special tokens take the style
    `special`; `newline` is shown where the text has one."""
    if width < 1:
        return []
    rows: list[list[Segment]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if len(rows) >= ROWS:
            break
        rows.extend(_wrap_line(clean(line), width, style, special))
        used = sum(cell_width(segment.text) for segment in rows[-1])
        if newline and number + 1 < len(lines) and used < width:
            rows[-1].append(Segment(newline, special))
    return rows


def _wrap_line(line: str, width: int, style: Style, special: Style) -> list[list[Segment]]:
    pieces: list[tuple[str, Style]] = []
    at = 0
    for match in SPECIAL.finditer(line):
        if match.start() > at:
            pieces.append((line[at : match.start()], style))
        pieces.append((match[0], special))
        at = match.end()
    if at < len(line) or not pieces:
        pieces.append((line[at:], style))
    rows: list[list[Segment]] = [[]]
    used = 0
    for piece, piece_style in pieces:
        for word in re.findall(r"\s+|\S+", piece):
            cells = cell_width(word)
            fits = used + cells <= width
            if not fits and (word == " " or (used and cells <= width and word.strip())):
                rows.append([])
                used = 0
                if word == " ":  # the space at which a line is broken shows as the break
                    continue
                fits = True
            parts = [(word, cells)] if fits else _cut(word, width, width - used)
            for part, part_cells in parts:
                if used + part_cells > width:
                    rows.append([])
                    used = 0
                _append(rows[-1], part, piece_style)
                used += part_cells
    return rows


def _append(row: list[Segment], text: str, style: Style) -> None:
    if row and row[-1].style is style:
        row[-1] = Segment(row[-1].text + text, style)
    else:
        row.append(Segment(text, style))


def _cut(word: str, width: int, first: int) -> list[tuple[str, int]]:
    """Return pieces of a word longer than a row: the first fills `first` cells, the others
    `width`."""
    if word.isascii():
        first = first if first > 0 else width
        parts = [word[:first], *(word[i : i + width] for i in range(first, len(word), width))]
        return [(part, len(part)) for part in parts if part]
    pieces: list[tuple[str, int]] = []
    start, cells, room = 0, 0, first if first > 0 else width
    for begin, _, size in split_graphemes(word)[0]:
        if cells + size > room and begin > start:
            pieces.append((word[start:begin], cells))
            start, cells, room = begin, 0, width
        cells += min(size, width)
    pieces.append((word[start:], cells))
    return pieces

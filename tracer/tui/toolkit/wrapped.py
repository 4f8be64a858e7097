"""Untrusted text as rows: cleaned, wrapped to cells, with the special tokens of chat templates
picked out."""

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
    """Rows of `text`, each at most `width` cells (not padded). Special tokens take the style
    `special`; `newline` is shown where the text has one."""
    if width < 1:
        return []
    rows: list[list[Segment]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if len(rows) >= ROWS:
            break
        rows.extend(_wrap_line(clean(line), width, style, special))
        last = rows[-1]
        if (
            newline
            and number + 1 < len(lines)
            and sum(cell_width(segment.text) for segment in last) < width
        ):
            last.append(Segment(newline, special))
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
    for text, piece_style in pieces:
        for word in _words(text):
            cells = cell_width(word)
            if used + cells <= width:
                _append(rows[-1], word, piece_style)
                used += cells
                continue
            if word == " ":
                # The space at which a line is broken shows as the break.
                rows.append([])
                used = 0
                continue
            if used and cells <= width and word.strip():
                rows.append([])
                used = 0
                _append(rows[-1], word, piece_style)
                used = cells
                continue
            for part, part_cells in _cut(word, width, width - used):
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


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\S+", text)


def _cut(word: str, width: int, first: int) -> list[tuple[str, int]]:
    """Pieces of a word that is longer than a row: the first fills `first` cells, the others
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

"""The one place where untrusted text is made fit for a terminal, a printed line or an export.

Ids, routes, prompts, completions, model names, error messages and file names come from clients,
models, files and remote peers. A terminal obeys control characters and escape sequences and
reorders lines at bidirectional marks, so nothing reaches one without `clean`. Every such character
is replaced by a visible escape (``\\x1b``, ``\\u202e``), so nothing is lost and one row stays one
row. Markup is not touched here: widgets build text from plain strings.
"""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len, set_cell_size

_UNSAFE: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1: what escape sequences are made of, 7-bit and 8-bit
    "\xad"  # soft hyphen: no two terminals agree on its width
    # bidirectional marks, overrides, isolates, deprecated formats
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"
    "\u2028\u2029"  # line and paragraph separator: a new row in some terminals
    "\ufeff\ufff9-\ufffb"  # byte order mark, interlinear annotation
    "\U000e0001"  # language tag
    "\ud800-\udfff"  # lone surrogates: cannot be encoded
    "]"
    # A joiner that joins nothing would swallow the character after it when widths are counted.
    "|(?<![^\x00-\x7f])\u200d|\u200d(?![^\x00-\x7f])"
)
_UNSAFE_BUT_NEWLINES: Final = re.compile(
    _UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f", 1)
)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}.get(code)
    if short is not None:
        return short
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str, *, keep_newlines: bool = False) -> str:
    """`text` with every character that could steer a terminal replaced by a visible escape.

    Covers C0 and C1 controls, DEL, bidirectional controls, U+2028/2029, byte order marks, stray
    joiners and lone surrogates; the result can be encoded as UTF-8. With `keep_newlines`, ``\\n``
    stays (for text shown as several rows); everything else, tabs and ``\\r`` included, is escaped.
    """
    return (_UNSAFE_BUT_NEWLINES if keep_newlines else _UNSAFE).sub(_escape, text)


_ASCII: Final = str.maketrans({
    "·": "*", "→": ">", "×": "x", "–": "-", "—": "-", "−": "-", "…": "~", "²": "2", "µ": "u",
    "±": "+/-", "√": "sqrt", "─": "-",
})  # fmt: skip


def to_ascii(text: str) -> str:
    """Cleaned `text` in ASCII: our own signs by their likeness, anything else escaped."""
    plain = text.replace(" · ", " | ").translate(_ASCII)
    return plain.encode("ascii", "backslashreplace").decode("ascii")


def cell_width(text: str) -> int:
    """Terminal cells that cleaned `text` takes: 2 for wide glyphs and emoji sequences, 0 for
    combining marks."""
    return cell_len(text)


def fit(text: str, cells: int, *, ellipsis: str = "") -> str:
    """Cleaned `text` cropped or padded with spaces to exactly `cells` terminal cells.

    A two-cell glyph that would straddle the edge becomes a space. When text is cropped, `ellipsis`
    (if it fits) takes its last cells. Cells below 1 give an empty string.
    """
    if cells <= 0:
        return ""
    # A long line is cut before it is measured; the slice grows only when it is full of zero-width
    # characters.
    size = 4 * cells + 64
    head = text[:size]
    while size < len(text) and cell_len(head) <= cells:
        size *= 4
        head = text[:size]
    if not ellipsis or cell_len(head) <= cells:
        return set_cell_size(head, cells)
    mark = cell_len(ellipsis)
    if mark > cells:
        return set_cell_size(head, cells)
    return set_cell_size(head, cells - mark) + ellipsis

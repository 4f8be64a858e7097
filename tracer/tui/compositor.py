"""A faster way to write partial updates of the screen, put into Textual while it is the version that we know.

Textual sends a changed span of a line from the left edge of its widget on: for a clock at the right end of a 140-cell
row that is 140 cells instead of 5. Our replacement for `ChopsUpdate.render_segments` sends the changed columns only,
never half of a two-cell glyph, and moves the cursor again after text whose width terminals disagree about, so that
what follows keeps its column.

It replaces a private method, so it is only put in place when the version, the signature and the attributes are those
it was written for; otherwise Textual's own method stays, which draws the same screen with more bytes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final

import textual
from rich.cells import split_graphemes
from rich.color import ColorSystem
from rich.console import Console
from textual import _compositor
from textual.strip import Strip

from tracer.text import cell_width

TESTED: Final = ("8.2.8",)
"""Versions of Textual whose `ChopsUpdate` this was checked against."""

_plain: Final = re.compile(
    "[\x20-\x7e\xa0-\u02ff\u2010-\u2027\u2030-\u205e\u2190-\u21ff\u2500-\u25fc\u2800-\u28ff]*"
).fullmatch
"""Matches text of glyphs that every terminal draws one cell wide."""

_stock: Callable[..., str] | None = None


def patch() -> str:
    """Put the fast path in place, once; why it was not, in words, or an empty string."""
    global _stock
    if _stock is not None:
        return ""
    reason = _mismatch()
    if reason:
        return reason
    update = _compositor.ChopsUpdate
    _stock = update.render_segments
    update.render_segments = render_changed  # type: ignore[method-assign]
    return ""


def unpatch() -> None:
    """Give Textual its own method back."""
    global _stock
    if _stock is not None:
        _compositor.ChopsUpdate.render_segments = _stock  # type: ignore[method-assign]
        _stock = None


def _mismatch() -> str:
    """What about this Textual is not as expected; empty when all is."""
    version = getattr(textual, "__version__", "unknown")
    if version not in TESTED:
        return f"Textual {version} is not a tested version ({', '.join(TESTED)})"
    update: Any = getattr(_compositor, "ChopsUpdate", None)
    if update is None:
        return "Textual has no ChopsUpdate"
    if list(inspect.signature(update.__init__).parameters) != ["self", "chops", "spans", "chop_ends"]:
        return "ChopsUpdate takes other parameters"
    if list(inspect.signature(update.render_segments).parameters) != ["self", "console"]:
        return "ChopsUpdate.render_segments takes other parameters"
    return ""


def render_changed(self: Any, console: Console) -> str:
    """Terminal sequences for the changed spans: the columns of `spans` and nothing else."""
    out: list[str] = []
    for y, left, right in self.spans:
        for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
            if strip is None or x >= right or end <= left:
                continue
            start, stop = max(left, x) - x, min(right, end) - x
            start, stop = whole_glyphs(strip, start, stop)
            out.append(f"\x1b[{y + 1};{x + start + 1}H")
            piece = strip if start == 0 and stop >= strip.cell_length else strip.crop(start, stop)
            out.append(render_strip(piece, console, x + start, y))
    return "".join(out)


def whole_glyphs(strip: Strip, start: int, stop: int) -> tuple[int, int]:
    """Widen the columns `start` to `stop` so that neither edge cuts a two-cell glyph of `strip` in half."""
    text = strip.text
    if _plain(text):
        return start, stop
    column = 0
    for _, _, width in split_graphemes(text)[0]:
        if width > 1:
            if column < start < column + width:
                start = column
            if column < stop < column + width:
                stop = column + width
        column += width
        if column >= stop:
            break
    return start, stop


def render_strip(strip: Strip, console: Console, x: int, y: int) -> str:
    """The strip's sequences. After a glyph that is not plainly one cell wide the cursor is placed again."""
    text = strip.text
    if _plain(text):
        return strip.render(console)
    system = console._color_system or ColorSystem.TRUECOLOR
    out: list[str] = []
    for segment_text, style, _ in strip:
        out.append(segment_text if style is None else Strip.render_style(style, segment_text, system))
        width = cell_width(segment_text)
        x += width
        if not _plain(segment_text):
            out.append(f"\x1b[{y + 1};{x + 1}H")
    return "".join(out)

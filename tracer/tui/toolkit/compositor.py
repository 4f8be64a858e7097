"""Partial updates that send changed columns only, put into Textual while it is a tested version.

What Textual does: `ChopsUpdate.render_segments` sends a changed span from the left edge of its
widget on (``strip.crop(0, …)``), each segment with its whole style and a reset.
What it costs: a clock at the right end of a 140-cell row is 140 cells instead of 5.
What the patch does: it sends the columns of the span (never half of a two-cell glyph), a style only
where it changes, and moves the cursor again behind text whose width terminals disagree about.
Effect, Textual 8.2.8, `tracer replay` at 200×60: recordings/transformers-mixed.trace 118 → 8.2
kB/s and 6.6 → 6.4 % CPU, recordings/vllm-loaded.trace 360 → 37 kB/s and 9.6 → 7.9 % CPU.

Any other version keeps Textual's own methods, which draw the same screen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import textual
from rich.cells import split_graphemes
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual import _compositor
from textual.strip import SGR_STYLES, Strip

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import is_plain

TESTED: Final = ("8.2.8",)

_stock: dict[type, Callable[..., str]] = {}
"""Textual's own methods, while ours are in place."""


def patch() -> str:
    """Put the faster methods in place; return the reason if that cannot be, else nothing."""
    version = getattr(textual, "__version__", "unknown")
    if version not in TESTED:
        return f"Textual {version} is not a tested version ({', '.join(TESTED)})"
    if not _stock:
        for kind, ours in (
            (_compositor.ChopsUpdate, render_changed),
            (_compositor.LayoutUpdate, render_all),
        ):
            _stock[kind] = kind.render_segments
            kind.render_segments = ours  # type: ignore[method-assign]
    return ""


def unpatch() -> None:
    """Give Textual its own methods back."""
    for kind, stock in _stock.items():
        kind.render_segments = stock  # type: ignore[attr-defined]
    _stock.clear()


def render_changed(self: Any, console: Console) -> str:
    """Return terminal sequences for the columns of `spans`."""
    pen = _Pen(console._color_system or ColorSystem.TRUECOLOR)
    for y, left, right in self.spans:
        for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
            if strip is not None and x < right and end > left:
                pen.draw(strip, x, y, max(left, x) - x, min(right, end) - x)
    return pen.end()


def render_all(self: Any, console: Console) -> str:
    """Return terminal sequences for the whole screen, each line placed by itself."""
    pen = _Pen(console._color_system or ColorSystem.TRUECOLOR)
    for y, line in enumerate(self.strips, self.region.y):
        x = self.region.x
        for strip in line:
            if strip is not None:
                pen.draw(strip, x, y, 0, strip.cell_length)
                x += strip.cell_length
    return pen.end()


class _Pen:
    """Writes runs of cells, each style once."""

    def __init__(self, system: ColorSystem) -> None:
        self._out: list[str] = []
        self._changes = _CHANGES.setdefault(system, {})
        self._system = system
        self._style: Style | None = None

    def draw(self, strip: Strip, x: int, y: int, start: int, stop: int) -> None:
        """Write columns `start` to `stop` of a strip whose left end is at (x, y)."""
        segments = strip._segments
        if is_plain(segments):
            self._draw_plain(segments, x, y, start, stop)
            return
        start, stop = whole_glyphs(strip, start, stop)
        column = x + start
        self._move(column, y)
        for text, style, control in strip.crop(start, stop):
            if control:
                continue
            self._use(style)
            self._out.append(text)
            column += cell_width(text)
            if not text.isascii():
                self._move(column, y)

    def _draw_plain(self, segments: list[Segment], x: int, y: int, start: int, stop: int) -> None:
        """Write text in which each character is one cell: slices instead of new strips."""
        self._move(x + start, y)
        at = 0
        for text, style, control in segments:
            if control:
                continue
            end = at + len(text)
            if end > start and at < stop:
                self._use(style)
                self._out.append(text[max(0, start - at) : stop - at])
            at = end

    def end(self) -> str:
        """Return everything written, with the terminal's style put back."""
        if self._style is not None:
            self._out.append("\x1b[0m")
        return "".join(self._out)

    def _move(self, x: int, y: int) -> None:
        self._out.append(f"\x1b[{y + 1};{x + 1}H")

    def _use(self, style: Style | None) -> None:
        before = self._style
        if style is before:
            return
        pair = (id(before), id(style))
        found = self._changes.get(pair)
        if found is None:
            if len(self._changes) > 20_000:
                self._changes.clear()
            found = self._changes[pair] = (self._change(before, style), before, style)
        self._style = style
        self._out.append(found[0])

    def _change(self, before: Style | None, style: Style | None) -> str:
        """Return the sequence that changes one style into another."""
        attributes, colour, back = self._codes_of(style)
        old_attributes, old_colour, old_back = self._codes_of(before)
        if attributes != old_attributes:
            codes = ["" if before is None else "0", attributes, colour, back]
        else:
            codes = [
                "" if colour == old_colour else colour or "39",
                "" if back == old_back else back or "49",
            ]
        text = ";".join(filter(None, codes))
        return f"\x1b[{text}m" if text else ""

    def _codes_of(self, style: Style | None) -> tuple[str, str, str]:
        """Return the SGR parameters of a style: attributes, foreground, background."""
        if style is None:
            return "", "", ""
        bits = style._attributes & style._set_attributes
        attributes = ";".join(code for bit, code in enumerate(SGR_STYLES) if bits & 1 << bit)
        colour = back = ""
        if style.color is not None and not style.color.is_default:
            colour = ";".join(style.color.downgrade(self._system).get_ansi_codes())
        if style.bgcolor is not None and not style.bgcolor.is_default:
            back = ";".join(style.bgcolor.downgrade(self._system).get_ansi_codes(foreground=False))
        return attributes, colour, back


_Change = tuple[str, Style | None, Style | None]
_CHANGES: Final[dict[ColorSystem, dict[tuple[int, int], _Change]]] = {}
"""Sequences between two styles, by the identity of both: the shared objects of a look. The styles
are held, so that no other one gets their number."""


def whole_glyphs(strip: Strip, start: int, stop: int) -> tuple[int, int]:
    """Widen the columns `start` to `stop` so that neither edge cuts a two-cell glyph of `strip`."""
    column = 0
    for _, _, width in split_graphemes(strip.text)[0]:
        if column < start < column + width:
            start = column
        if column < stop < column + width:
            stop = column + width
        column += width
        if column >= stop:
            break
    return start, stop

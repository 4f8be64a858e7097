"""The first lines of the Compare screen: what is compared, what each side is about, and what came
out."""

from __future__ import annotations

import textwrap

from rich.style import Style

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import Comparison, Pair
from tracer.export.compare_text import NAMES, context_parts, switch
from tracer.export.page import Page
from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import ASCII, Look

VERDICT_ROWS = 3
"""Rows of the verdict at most."""
ONE_ROW_FROM = 80
"""Columns from which a side and all that qualifies it have room in one row."""


class CompareHead(Canvas):
    """A title row, a row or two a side, the verdict, and what is unlike about the sides."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="compare-head")
        self.add_class("tile")
        self.subject = ""
        self.comparison: Comparison | None = None
        self.pair: Pair | None = None
        self.waiting = ""
        self.status = ""
        self.status_style: Style = look.good

    def show(
        self,
        subject: str,
        comparison: Comparison | None,
        pair: Pair | None,
        waiting: str,
        status: str,
        style: Style,
    ) -> None:
        """Draw. `subject`: what is compared; `waiting`: why there is nothing yet."""
        self.subject, self.comparison, self.pair, self.waiting = subject, comparison, pair, waiting
        self.status, self.status_style = status, style
        self.repaint()

    def rows(self, width: int, height: int) -> int:
        """Rows wanted on a screen of this size."""
        if self.comparison is None:
            return 2
        sides = len(self.comparison.columns) * (2 if height >= 40 or width < ONE_ROW_FROM else 1)
        return (
            1
            + sides
            + len(self._verdict(width, height))
            + min(len(self._warnings()), self._room(height))
        )

    def _said(self, text: str) -> str:
        """A sentence as this look can show it."""
        return label(text) if self.look.glyphs is not ASCII else Page(1, False, False).plain(text)

    @staticmethod
    def _room(height: int) -> int:
        return 3 if height >= 40 else 1 if height >= 22 else 0

    def _verdict(self, width: int, height: int) -> list[str]:
        text = self.waiting if self.pair is None else self.pair.verdict
        most = VERDICT_ROWS if height >= 30 else 2 if height >= 16 else 1
        rows = textwrap.wrap(self._said(text), max(10, width - 2), break_on_hyphens=False) or [""]
        if len(rows) > most:
            rows = [*rows[: most - 1], rows[most - 1] + " " + self.look.glyphs.ellipsis]
        return rows

    def _warnings(self) -> tuple[str, ...]:
        return self.pair.warnings if self.pair is not None else ()

    def paint(self, width: int, height: int) -> list[Row]:
        """The rows."""
        look = self.look
        status = label(self.status)
        line = Line(width).put(" Compare ", look.accent)
        room = width - line.used - cell_width(status) - 2
        line.put_text(self.subject, look.text, max(0, min(room, cell_width(label(self.subject)))),
                      ellipsis=look.glyphs.ellipsis)  # fmt: skip
        if status and line.used + cell_width(status) < width:
            line.fill_to(width - cell_width(status) - 1, look.text)
            line.put_text(status, self.status_style)
        rows: list[Row] = [line.end(look.text)]
        screen = self.screen.size.height
        if self.comparison is None:
            rows.append(Line(width).put_text(f" {self.waiting}", look.warn, width).end(look.text))
            return rows[:height]
        for letter, context in zip(NAMES, self.comparison.columns, strict=False):
            rows.extend(
                self._side(width, letter, context, self.comparison.percentile, screen >= 40)
            )
        different = self.pair is not None and self.pair.differs
        style = look.warn if different else look.bold
        rows.extend(
            Line(width)
            .put(" ", look.text)
            .put_text(text, style, min(width - 1, cell_width(text)))
            .end(look.text)
            for text in self._verdict(width, screen)
        )
        warnings = self._warnings()
        shown = warnings[: self._room(screen)]
        for place, warning in enumerate(shown):
            hidden = len(warnings) - len(shown)
            more = f" (+{hidden} more)" if hidden and place == len(shown) - 1 else ""
            line = Line(width).put(f" {look.glyphs.warning} ", look.warn)
            text = self._said(warning)
            line.put_text(text, look.dim, min(cell_width(text), width - line.used - len(more) - 1),
                          ellipsis=look.glyphs.ellipsis)  # fmt: skip
            rows.append(line.put(more, look.dim).end(look.text))
        return rows[:height]

    def _side(
        self, width: int, letter: str, context: Context, percentile: str, two: bool
    ) -> list[Row]:
        """A side with what qualifies its figures, which is never cropped away: the name gives room
        first, then all of it goes on a row of its own."""
        look = self.look
        dot = f" {look.glyphs.dot} "
        parts = context_parts(context, percentile)
        name = label(context.name)
        must = [*parts[:4]]
        if cell_width(name) + len(dot.join([context.kind, *must])) + 8 > width:
            must = [
                parts[0],
                f"{context.concurrency:.1f} open",
                percentile,
                f"cache {switch(context.prefix_caching)}",
            ]
        line = Line(width).put(f" {letter} ", look.accent)
        if width < ONE_ROW_FROM:
            line.put_text(
                name,
                look.bold,
                max(1, min(cell_width(name), line.room - len(context.kind) - 4)),
                ellipsis=look.glyphs.ellipsis,
            ).put(dot, look.faint).put(context.kind, look.text)
            second = Line(width).put("   ", look.text)
            text = dot.join(must)
            if len(text) > second.room:
                text = " ".join(must).replace(" req/s", "/s").replace("not told", "?")
            return [line.end(look.text), second.put(text, look.text).end(look.text)]
        required = dot.join([context.kind, *must])
        given = max(6, width - line.used - len(required) - 4)
        line.put_text(name, look.bold, min(given, cell_width(name)), ellipsis=look.glyphs.ellipsis)
        line.put(dot, look.faint).put(required, look.text)
        rest = [label(part) for part in parts[4:] if part]
        if not two:
            self._more(line, rest)
            return [line.end(look.text)]
        row = Line(width).put("   ", look.text)
        self._more(row, rest, first=True)
        return [line.end(look.text), row.end(look.text)]

    def _more(self, line: Line, parts: list[str], *, first: bool = False) -> None:
        """As many of the parts as there is room for."""
        look = self.look
        for part in parts:
            cells = cell_width(part) + (0 if first else 3)
            if cells >= line.room:
                return
            if not first:
                line.put(f" {look.glyphs.dot} ", look.faint)
            line.put_text(part, look.dim)
            first = False

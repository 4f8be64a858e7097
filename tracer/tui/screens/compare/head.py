"""The first lines of the Compare screen: the sides, what qualifies them, and the verdict."""

from __future__ import annotations

from rich.style import Style

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import Comparison, Pair
from tracer.export.compare_text import NAMES, context_parts, switch
from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.words import paragraph

ONE_ROW_FROM = 80
"""Columns from which a side and all that qualifies it have room in one row."""
TWO_ROWS_FROM = 40
"""Rows from which a side has a second row for details."""


class CompareHead(Canvas):
    """A title row, a row or two a side, the verdict, and warnings."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="compare-head")
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
        """Return the rows wanted on a screen of this size."""
        return len(self._lines(width, height))

    def paint(self, width: int, height: int) -> list[Row]:
        return self._lines(width, self.screen.size.height)[:height]

    def _lines(self, width: int, screen: int) -> list[Row]:
        """Return all rows for a screen of so many rows."""
        look = self.look
        status, subject = label(self.status), label(self.subject)
        line = Line(width).add(" Compare ", look.accent)
        room = width - line.used - cell_width(status) - 2
        line.add_text(subject, look.text, max(0, min(room, cell_width(subject))))
        if status and line.used + cell_width(status) < width:
            line.fill_to(width - cell_width(status) - 1, look.text)
            line.add_text(status, self.status_style)
        rows: list[Row] = [line.end(look.text)]
        comparison, pair = self.comparison, self.pair
        if comparison is None or pair is None:
            rows.append(Line(width).add_text(f" {self.waiting}", look.warn, width).end(look.text))
            return rows
        for letter, context in zip(NAMES, comparison.columns, strict=False):
            rows += self._side(width, screen, letter, context, comparison.percentile)
        style = look.warn if pair.differs else look.bold
        verdict = paragraph(pair.verdict, max(10, width - 2), look)
        most = 3 if screen >= 30 else 2 if screen >= 16 else 1
        if len(verdict) > most:
            verdict = [*verdict[: most - 1], f"{verdict[most - 1]} {look.glyphs.ellipsis}"]
        for text in verdict:
            line = Line(width).add(" ", look.text)
            rows.append(line.add_text(text, style).end(look.text))
        shown = pair.warnings[: 3 if screen >= TWO_ROWS_FROM else 1 if screen >= 22 else 0]
        for place, warning in enumerate(shown, 1):
            hidden = len(pair.warnings) - len(shown) if place == len(shown) else 0
            more = f" (+{hidden} more)" if hidden else ""
            line = Line(width).add(f" {look.glyphs.warning} ", look.warn)
            text = label(warning)
            line.add_text(text, look.dim, min(cell_width(text), line.room - len(more) - 1))
            rows.append(line.add(more, look.dim).end(look.text))
        return rows

    def _side(
        self, width: int, screen: int, letter: str, context: Context, percentile: str
    ) -> list[Row]:
        """Return a side with what qualifies its figures, which is never cropped: the name gives
        room first, then a row of its own follows."""
        look = self.look
        dot = f" {look.glyphs.dot} "
        parts = context_parts(context, percentile)
        name = label(context.name)
        must = parts[:4]
        if cell_width(name) + len(dot.join([context.kind, *must])) + 8 > width:
            must = [
                parts[0],
                f"{context.concurrency:.1f} open",
                percentile,
                f"cache {switch(context.prefix_caching)}",
            ]
        line = Line(width).add(f" {letter} ", look.accent)
        second = Line(width).add("   ", look.text)
        if width < ONE_ROW_FROM:
            cells = max(1, min(cell_width(name), line.room - len(context.kind) - 4))
            line.add_text(name, look.bold, cells).add(dot, look.faint)
            text = dot.join(must)
            if len(text) > second.room:
                text = " ".join(must).replace(" req/s", "/s").replace("not told", "?")
            line.add(context.kind, look.text)
            return [line.end(look.text), second.add(text, look.text).end(look.text)]
        required = dot.join([context.kind, *must])
        cells = max(6, width - line.used - len(required) - 4)
        line.add_text(name, look.bold, min(cells, cell_width(name)))
        line.add(dot, look.faint).add(required, look.text)
        rows = [line, second] if screen >= TWO_ROWS_FROM else [line]
        for part in map(label, filter(None, parts[4:])):
            separator = "" if rows[-1].used == 3 else dot
            if cell_width(separator + part) >= rows[-1].room:
                break
            rows[-1].add(separator, look.faint).add_text(part, look.dim)
        return [row.end(look.text) for row in rows]

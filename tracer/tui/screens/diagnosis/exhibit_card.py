"""The evidence of a finding: each series as a small chart over the time of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.segment import Segment

from tracer.format import figures
from tracer.tui.screens.request.cards import bucketed
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.history import plot
from tracer.tui.toolkit.scroll_card import ScrollCard
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Exhibit, Finding

CHART = 8
"""Rows of a chart at most, where there is room for all of them."""
LABELS = 9
"""Cells of the scale at the left."""


class ExhibitCard(ScrollCard):
    """All exhibits of the selected finding, below each other."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="evidence")
        self.finding: Finding | None = None
        self.began = 0
        self.present = ""

    def show(self, finding: Finding | None, began: int, present: str) -> None:
        """Draw the evidence of a finding; times are counted from `began` (ns), `present` is a word
        for the last instant."""
        if finding is None or self.finding is None or finding.rule != self.finding.rule:
            self.top = 0
        self.finding, self.began, self.present = finding, began, present
        self.repaint()

    def title(self) -> str:
        return "evidence"

    def note(self) -> list[Segment]:
        found = self.finding
        if found is None:
            return []
        end = self.present if found.end is None else self._instant(found.end)
        return [Segment(f"{self._instant(found.start)} → {end}", self.look.dim)]

    def _instant(self, t: int) -> str:
        return figures.instant(t - self.began)

    def rows(self, width: int) -> list[Row]:
        look = self.look
        if self.finding is None:
            return []
        exhibits = self.finding.evidence
        if not exhibits:
            text = "no series: the state itself says so"
            return [Line(width).add_text(text, look.dim).end(look.text)]
        charts = max(1, sum(map(_is_chart, exhibits)))
        each = max(1, min(CHART, (self.inner[1] - 2 * len(exhibits)) // charts))
        rows: list[Row] = []
        for exhibit in exhibits:
            rows.append(self._heading(exhibit, width))
            if exhibit.unit == "id":
                text = "  " + " ".join(f"{value:.0f}" for _, value in exhibit.points)
                rows.append(Line(width).add_text(text, look.special).end(look.text))
            elif _is_chart(exhibit):
                rows += self._chart(exhibit, self.finding, width, each)
        return rows

    def _heading(self, exhibit: Exhibit, width: int) -> Row:
        """Return name, range and unit of a series."""
        look = self.look
        values = [value for _, value in exhibit.points]
        line = Line(width).add_text(exhibit.name, look.text)
        if values:
            low, high = min(values), max(values)
            line.add("  ", look.text).add(_figure(low), look.bold)
            if high > low:
                line.add(f" {look.glyphs.ellipsis} ", look.dim).add(_figure(high), look.bold)
        line.add(" ", look.text).add_text(exhibit.unit, look.dim)
        if exhibit.note and line.room > 4:
            line.add_text(f"  ({exhibit.note})", look.dim)
        if len(values) == 1 and self._over_time(exhibit):
            line.add(f"  at {self._instant(exhibit.points[0][0])}", look.dim)
        return line.end(look.text)

    def _chart(self, exhibit: Exhibit, finding: Finding, width: int, height: int) -> list[Row]:
        """Return a chart with its scale, and its axis below."""
        look = self.look
        labels = LABELS if width >= 40 else 0
        first, last = self._extent(exhibit, finding)
        columns = self._columns(exhibit, first, last, max(1, width - labels))
        top = max(1e-9, *(value for _, value in exhibit.points))
        style = look.accent if finding.stage is None else look.stage(finding.stage)
        scale = {height - 1: "0", 0: _figure(top)}
        rows: list[Row] = []
        for number, text in enumerate(plot(columns, look.glyphs.rises, height, top)):
            line = Line(width)
            if labels:
                line.add(scale.get(number, "").rjust(labels - 1) + " ", look.dim)
            rows.append(line.add(text, style).end(look.text))
        start, end = figures.count(first), figures.count(last)
        if self._over_time(exhibit):
            start, end = self._instant(first), self._instant(last)
        if width - labels < len(start) + len(end) + 2:
            return [*rows, blank(width, look.text)]
        line = Line(width).fill_to(labels, look.dim).add(start, look.dim)
        return [*rows, line.fill_to(width - len(end), look.dim).add(end, look.dim).end(look.dim)]

    def _over_time(self, exhibit: Exhibit) -> bool:
        """Return True if its first axis is the trace's clock; else its note names the axis."""
        return exhibit.points[0][0] >= self.began > 0

    def _extent(self, exhibit: Exhibit, finding: Finding) -> tuple[int, int]:
        """Return the first and last place of its axis; charts over time share theirs, because they
        are read below each other."""
        shown = [exhibit]
        if self._over_time(exhibit):
            shown = [one for one in finding.evidence if _is_chart(one) and self._over_time(one)]
        return min(one.points[0][0] for one in shown), max(one.points[-1][0] for one in shown)

    def _columns(
        self, exhibit: Exhibit, first: int, last: int, cells: int
    ) -> Sequence[float | None]:
        """Return the largest value of each stretch of the axis; None where there is none."""
        points = exhibit.points
        in_order = last > first and all(first <= at <= last for at, _ in points)
        if not (in_order and self._over_time(exhibit)):
            columns = bucketed([value for _, value in points], cells)
            return [columns[at * len(columns) // cells] for at in range(cells)]
        out: list[float | None] = [None] * cells
        for at, value in points:
            place = min(cells - 1, (at - first) * cells // (last - first))
            out[place] = max(value, out[place] or 0.0)
        return out


def _is_chart(exhibit: Exhibit) -> bool:
    return len(exhibit.points) > 1 and exhibit.unit != "id"


def wanted(finding: Finding | None) -> int:
    """Return the rows for the evidence of a finding, with its title and full charts."""
    exhibits = finding.evidence if finding is not None else ()
    return 1 + max(1, sum(CHART + 2 if _is_chart(exhibit) else 2 for exhibit in exhibits))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"

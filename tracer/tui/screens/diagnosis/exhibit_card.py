"""The evidence of a finding: each series as a small chart over the time of the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment

from tracer.tui.screens.request.itl_card import bucketed
from tracer.tui.toolkit import figures
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
        for the last."""
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
        begin = figures.instant(found.start - self.began)
        end = self.present if found.end is None else figures.instant(found.end - self.began)
        return [Segment(f"{begin} {self.look.glyphs.arrow} {end}", self.look.dim)]

    def rows(self, width: int) -> list[Row]:
        look = self.look
        if self.finding is None:
            return []
        exhibits = self.finding.evidence
        if not exhibits:
            text = "read off, not measured: there is no series to show"
            return [
                Line(width).put_text(text, look.dim, ellipsis=look.glyphs.ellipsis).end(look.text)
            ]
        _, height = self.inner
        charts = max(1, sum(map(_is_chart, exhibits)))
        each = max(1, min(CHART, (height - 2 * len(exhibits)) // charts))
        rows: list[Row] = []
        for exhibit in exhibits:
            rows += self._exhibit(exhibit, width, each)
        return rows

    def _exhibit(self, exhibit: Exhibit, width: int, height: int) -> list[Row]:
        look = self.look
        values = [value for _, value in exhibit.points]
        line = Line(width).put_text(exhibit.name, look.text, ellipsis=look.glyphs.ellipsis)
        if values:
            low, high = min(values), max(values)
            line.put("  ", look.text).put(_figure(low), look.bold)
            if high > low:
                line.put(f" {look.glyphs.ellipsis} ", look.dim).put(_figure(high), look.bold)
        line.put(" ", look.text).put_text(exhibit.unit, look.dim)
        note = f"  ({exhibit.note})" if exhibit.note else ""
        if note and line.room > 4:
            line.put_text(note, look.dim, ellipsis=look.glyphs.ellipsis)
        if len(values) == 1 and self._over_time(exhibit):
            line.put(f"  at {figures.instant(exhibit.points[0][0] - self.began)}", look.dim)
        rows: list[Row] = [line.end(look.text)]
        if exhibit.unit == "id":
            text = "  " + " ".join(f"{value:.0f}" for value in values)
            return [
                *rows,
                Line(width)
                .put_text(text, look.special, ellipsis=look.glyphs.ellipsis)
                .end(look.text),
            ]
        if not _is_chart(exhibit):
            return rows
        labels = LABELS if width >= 40 else 0
        columns = self._columns(exhibit, max(1, width - labels))
        top = max(max(values), 1e-9)
        style = (
            look.accent
            if self.finding is None or self.finding.stage is None
            else look.stage(self.finding.stage)
        )
        for number, text in enumerate(plot(columns, look.glyphs.rises, height, top)):
            line = Line(width)
            if labels:
                scale = (
                    _figure(top)
                    if number == 0
                    else "0"
                    if number == height - 1 and height > 1
                    else ""
                )
                line.put(scale.rjust(labels - 1) + " ", look.dim)
            rows.append(line.put(text, style).end(look.text))
        rows.append(self._axis(exhibit, width, labels))
        return rows

    def _over_time(self, exhibit: Exhibit) -> bool:
        """Whether its first axis is the trace's clock; else its note says what stands there."""
        return exhibit.points[0][0] >= self.began > 0

    def _extent(self, exhibit: Exhibit) -> tuple[int, int]:
        """First and last place of its axis; charts over time share theirs: they are read below each
        other."""
        if not self._over_time(exhibit) or self.finding is None:
            return exhibit.points[0][0], exhibit.points[-1][0]
        others = [one for one in self.finding.evidence if _is_chart(one) and self._over_time(one)]
        return min(one.points[0][0] for one in others), max(one.points[-1][0] for one in others)

    def _columns(self, exhibit: Exhibit, cells: int) -> list[float | None]:
        """The largest value of each stretch of the axis; None where there is none."""
        points = exhibit.points
        first, last = self._extent(exhibit)
        if (
            not self._over_time(exhibit)
            or last <= first
            or any(not first <= at <= last for at, _ in points)
        ):
            columns = bucketed([value for _, value in points], cells)
            return [columns[at * len(columns) // cells] for at in range(cells)]
        out: list[float | None] = [None] * cells
        for at, value in points:
            place = min(cells - 1, (at - first) * cells // (last - first))
            out[place] = value if out[place] is None else max(value, out[place] or 0.0)
        return out

    def _axis(self, exhibit: Exhibit, width: int, labels: int) -> Row:
        """First and last place under a chart: instants, unless the exhibit says what else stands
        there."""
        look = self.look
        first, last = self._extent(exhibit)
        if self._over_time(exhibit):
            begin, end = figures.instant(first - self.began), figures.instant(last - self.began)
        else:
            begin, end = figures.count(first), figures.count(last)
        if width - labels < len(begin) + len(end) + 2:
            return blank(width, look.text)
        line = Line(width).fill_to(labels, look.dim).put(begin, look.dim)
        return line.fill_to(width - len(end), look.dim).put(end, look.dim).end(look.dim)


def _is_chart(exhibit: Exhibit) -> bool:
    return len(exhibit.points) > 1 and exhibit.unit != "id"


def wanted(finding: Finding | None) -> int:
    """Rows for the evidence of a finding, its title included, with charts as high as they get."""
    exhibits = finding.evidence if finding is not None else ()
    return 1 + max(1, sum(CHART + 2 if _is_chart(exhibit) else 2 for exhibit in exhibits))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"

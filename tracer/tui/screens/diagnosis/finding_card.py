"""One finding in words, and the questions that a trace leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.scroll_card import ScrollCard
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.wrapped import wrap

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import CannotTell, Finding

LABEL = 10
"""Cells of the words at the left."""


class FindingCard(ScrollCard):
    """The selected finding: its statement, what to check first, its cause and consequences, and the
    thresholds used, which are folded by default."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="finding")
        self.finding: Finding | None = None
        self.unfolded = False

    def show(self, finding: Finding | None) -> None:
        if finding is None or self.finding is None or finding.rule != self.finding.rule:
            self.top = 0
        self.finding = finding
        self.repaint()

    def title(self) -> str:
        return "finding" if self.finding is None else self.finding.rule

    def note(self) -> list[Segment]:
        if self.finding is None:
            return []
        return [Segment(f"confidence {100 * self.finding.confidence:.0f} %", self.look.dim)]

    def rows(self, width: int) -> list[Row]:
        look, finding = self.look, self.finding
        if finding is None:
            return []
        from tracer.analysis.diagnosis.rules.used import thresholds_of

        rows = _paragraph(look, width, "", finding.statement, look.bold)
        rows.append(blank(width, look.text))
        rows += _paragraph(look, width, "check", finding.check, look.good)
        if finding.culprit is not None:
            rows += _paragraph(look, width, "caused by", finding.culprit, look.warn)
        for text in finding.explains:
            rows += _paragraph(look, width, "explains", text, look.text)
        rows.append(blank(width, look.text))
        used = thresholds_of(finding.rule).values()
        if used and not self.unfolded:
            rows += _paragraph(look, width, "x", f"{len(used)} thresholds used", look.dim)
        elif used:
            rows += _paragraph(look, width, "", "thresholds used", look.text)
            for threshold in used:
                text = f"{threshold.value:g} {threshold.unit}: {threshold.why}"
                rows += _paragraph(look, width, "", text, look.dim, indent=True)
        return rows


class OpenCard(ScrollCard):
    """The questions that a trace leaves open, and what to record to answer them."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="open")
        self.entries: tuple[CannotTell, ...] = ()

    def show(self, entries: tuple[CannotTell, ...]) -> None:
        if entries != self.entries:
            self.entries = entries
            self.repaint()

    def title(self) -> str:
        return "can't tell"

    def note(self) -> list[Segment]:
        return [Segment(str(len(self.entries)), self.look.dim)] if self.entries else []

    def rows(self, width: int) -> list[Row]:
        look = self.look
        if not self.entries:
            text = "nothing: all checks could be made"
            return [Line(width).add(text, look.dim).end(look.text)]
        rows: list[Row] = []
        for entry in self.entries:
            style = look.warn if entry.symptom else look.text
            rows += _paragraph(look, width, "", f"{entry.question}: {entry.reason}", style)
            if entry.record:
                rows += _paragraph(look, width, "record", entry.record, look.dim)
        return rows


def _paragraph(
    look: Look, width: int, label: str, text: str, style: Style, *, indent: bool = False
) -> list[Row]:
    """Return text behind a label in a column of its own; without a label over the whole width,
    unless `indent`."""
    left = LABEL + 1 if (label or indent) and width >= 3 * LABEL else 0
    rows: list[Row] = []
    for number, segments in enumerate(wrap(text, max(1, width - left), style, look.special)):
        line = Line(width)
        if left:
            line.add((label if number == 0 else "").rjust(LABEL) + " ", look.dim)
        line.add_segments(segments, sum(cell_width(piece.text) for piece in segments))
        rows.append(line.end(look.text))
    return rows

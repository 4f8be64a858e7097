"""One finding in words: what it says, what to check first, what follows from it, by which
thresholds it was made."""

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
    """The selected finding."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="finding")
        self.finding: Finding | None = None

    def show(self, finding: Finding | None) -> None:
        """Draw a finding."""
        if finding is None or self.finding is None or finding.rule != self.finding.rule:
            self.top = 0
        self.finding = finding
        self.repaint()

    def title(self) -> str:
        return "what was found" if self.finding is None else self.finding.rule

    def note(self) -> list[Segment]:
        return (
            [Segment(f"{self.finding.confidence:.0%} sure", self.look.dim)]
            if self.finding is not None
            else []
        )

    def rows(self, width: int) -> list[Row]:
        look, finding = self.look, self.finding
        if finding is None:
            return []
        rows = paragraph(look, width, "", finding.statement, look.bold)
        rows.append(blank(width, look.text))
        rows += paragraph(look, width, "check", finding.check, look.good)
        if finding.culprit is not None:
            rows += paragraph(look, width, "because of", finding.culprit, look.warn)
        for said in finding.explains:
            rows += paragraph(look, width, "explains", said, look.text)
        rows.append(blank(width, look.text))
        from tracer.analysis.diagnosis.rules.used import thresholds_of

        for number, (name, row) in enumerate(thresholds_of(finding.rule).items()):
            text = f"{name} {row.value:g} {row.unit}: {row.why}"
            rows += paragraph(
                look, width, "limits" if number == 0 else "", text, look.dim, indent=True
            )
        return rows


class OpenCard(ScrollCard):
    """What cannot be told, and what to record to be told."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="open")
        self.entries: tuple[CannotTell, ...] = ()

    def show(self, entries: tuple[CannotTell, ...]) -> None:
        """Draw what is left open."""
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
            text = "every question that is asked of this trace has an answer"
            return [Line(width).put(text, look.dim).end(look.text)]
        rows: list[Row] = []
        for entry in self.entries:
            rows += paragraph(look, width, "", f"{entry.question}: {entry.reason}",
                              look.warn if entry.symptom else look.text)  # fmt: skip
            if entry.record:
                rows += paragraph(look, width, "record", entry.record, look.dim)
        return rows


def paragraph(
    look: Look, width: int, label: str, text: str, style: Style, *, indent: bool = False
) -> list[Row]:
    """Text on as many rows as it takes, behind a word that stands in a column of its own; without
    one over the whole width, unless `indent`."""
    left = LABEL + 1 if (label or indent) and width >= 3 * LABEL else 0
    rows: list[Row] = []
    for number, segments in enumerate(wrap(text, max(1, width - left), style, look.special)):
        line = Line(width)
        if left:
            line.put((label if number == 0 else "").rjust(LABEL) + " ", look.dim)
        for piece, piece_style, _ in segments:
            if piece_style is not None:
                line.put_segments([Segment(piece, piece_style)], cell_width(piece))
        rows.append(line.end(look.text))
    return rows

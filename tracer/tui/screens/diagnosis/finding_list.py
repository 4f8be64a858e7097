"""The findings, a row each: the active ones first, by their cost; then those that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from engine_hooks.protocol.clock import NS_PER_S
from tracer.format import figures
from tracer.tui.naming import place_of
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.scroll_card import SelectionPanel
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Finding
    from tracer.tui.watch import Watch

COLUMNS = {
    "finding": 22,
    "stage": 14,
    "time lost": 12,
    "bar": 12,
    "confidence": 11,
    "from   until": 17,
    "requests": 9,
}
"""Headings and cells of the columns."""
LEAVING = ("bar", "requests", "from   until", "confidence")
"""Columns that leave a narrow list, in this order."""
ENDED_NS = 5 * NS_PER_S
"""A finding whose last sign lies so far back has ended: rules look at steps, and the last step is
not now."""


class FindingList(SelectionPanel):
    """The list, with a selection that stays on its finding when the order changes."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="findings")
        self.findings: Sequence[Finding] = ()
        self.began = 0
        self.until = 0
        self.hint = ""
        self.present = ""
        self.chosen: tuple[str, str] | None = None
        """Rule and engine of the selected finding."""

    def show(self, watch: Watch, hint: str) -> None:
        """Draw the findings of a watch; `hint` stands where there are none."""
        self.findings, self.hint, self.present = watch.findings, hint, watch.present
        self.began, self.until = watch.began, watch.until
        names = [(finding.rule, finding.engine) for finding in self.findings]
        self.selected = names.index(self.chosen) if self.chosen in names else 0
        self.repaint()

    @property
    def entries(self) -> int:
        return len(self.findings)

    @property
    def current(self) -> Finding | None:
        """The selected finding; the first unless the user chose another one."""
        return self.findings[self.selected] if self.findings else None

    def select(self, row: int) -> None:
        super().select(row)
        if self.current is not None:
            self.chosen = (self.current.rule, self.current.engine)

    def title(self) -> str:
        return "findings"

    def note(self) -> list[Segment]:
        total = len(self.findings)
        ended = sum(self._has_ended(finding) for finding in self.findings)
        if not total:
            return []
        if self.present != "now":
            return [Segment(figures.count(total), self.look.dim)]
        parts = ((total - ended, "active"), (ended, "ended"))
        text = ", ".join(f"{count} {word}" for count, word in parts if count)
        return [Segment(text, self.look.dim)]

    def _has_ended(self, finding: Finding) -> bool:
        return finding.end is not None and finding.end < self.until - ENDED_NS

    def wanted(self) -> int:
        """Return the rows wanted, title and heading included."""
        return max(1, len(self.findings)) + 2

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.findings:
            return [Line(width).add_text(f"  {self.hint}", look.dim).end(look.text)]
        columns = dict(COLUMNS)
        for name in LEAVING:
            if 4 + sum(columns.values()) > width:
                columns[name] = 0
        most = max(finding.lost_ms for finding in self.findings)
        rows: list[Row] = [self._heading(width, columns)]
        rows += [self._row(width, columns, place, most) for place in self.in_sight(height)]
        return rows

    def _heading(self, width: int, columns: dict[str, int]) -> Row:
        dim = self.look.dim
        line = Line(width).add("    ", dim)
        for name, cells in columns.items():
            text = "" if name == "bar" else name
            if name == "from   until":
                text = f"   {text}"
            left = name in ("finding", "stage", "from   until")
            line.add((text.ljust(cells) if left else text.rjust(cells))[:cells], dim)
        if line.room > 14:
            line.add("   caused by", dim)
        return line.end(dim)

    def _row(self, width: int, columns: dict[str, int], place: int, most: float) -> Row:
        look, glyphs = self.look, self.look.glyphs
        finding, selected = self.findings[place], place == self.selected
        ended = self._has_ended(finding)

        def on(style: Style) -> Style:
            return self.on(style, selected)

        plain = on(look.dim if ended else look.text)
        stage = on(look.dim if finding.stage is None else look.stage(finding.stage, bold=True))
        line = Line(width).add(glyphs.select if selected else " ", on(look.accent))
        mark = look.dim if ended else look.bad
        line.add(f"{glyphs.ring if ended else glyphs.bullet} ".ljust(3), on(mark))
        rule_style = on(look.dim if ended else look.bold)
        line.add_text(finding.rule, rule_style, columns["finding"] - 1).add(" ", plain)
        line.add_text(place_of(finding), stage, columns["stage"])
        lost = f"{figures.count(finding.lost_ms)} ms" if finding.lost_ms else figures.UNKNOWN
        line.add(lost.rjust(columns["time lost"]), plain)
        if columns["bar"]:
            cells = columns["bar"] - 2
            filled = max(1, round(cells * finding.lost_ms / most)) if finding.lost_ms else 0
            glyph = look.fill(finding.stage) if finding.stage else glyphs.track
            line.add("  ", plain).add(glyph * filled, stage).add(" " * (cells - filled), plain)
        if columns["confidence"]:
            text = f"{100 * finding.confidence:.0f} %"
            line.add(text.rjust(columns["confidence"]), plain)
        cells = columns["from   until"]
        start, end = figures.instant(finding.start - self.began), self.present
        if ended and finding.end is not None:
            end = figures.instant(finding.end - self.began)
        line.add(f"   {start:>5} {glyphs.arrow} {end}".ljust(cells)[:cells], plain)
        if columns["requests"]:
            line.add(figures.count(finding.affected_total).rjust(columns["requests"]), plain)
        if finding.culprit and line.room > 6:
            line.add("   ", plain).add_text(finding.culprit, on(look.warn))
        return line.end(plain)

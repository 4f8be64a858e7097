"""What was found, a row each: what goes on first, by what it costs; then what is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from engine_hooks.protocol.clock import NS_PER_S
from tracer.tui.naming import place_of
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Finding
    from tracer.tui.watch import Watch

RULE, PLACE, LOST, BAR, SURE, SPELL, COUNT = 25, 14, 12, 12, 6, 17, 9
"""Cells of the columns."""
OVER_NS = 5 * NS_PER_S
"""A finding whose last sign lies so far back is over: rules look at steps, and the last step is not
now."""


class FindingList(Panel):
    """The list, with a selection that stays on its finding when the order changes."""

    pad = 0

    class Opened(Message):
        """A row was clicked twice."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="findings")
        self.findings: Sequence[Finding] = ()
        self.going_on = 0
        self.began = 0
        self.until = 0
        self.hint = ""
        self.present = ""
        self.chosen: tuple[str, str] | None = None
        """Rule and engine of the one that is selected."""

    def show(self, watch: Watch, hint: str = "") -> None:
        """Draw what a watch has found; `hint` stands where there is nothing."""
        self.findings, self.going_on = watch.findings, watch.going_on
        self.began, self.until, self.hint, self.present = (
            watch.began,
            watch.until,
            hint,
            watch.present,
        )
        self.repaint()

    @property
    def selected(self) -> int:
        """Row of the selection."""
        for row, finding in enumerate(self.findings):
            if (finding.rule, finding.engine) == self.chosen:
                return row
        return 0

    @property
    def current(self) -> Finding | None:
        """The one that is selected; the first unless the user chose another one."""
        return self.findings[self.selected] if self.findings else None

    def move(self, rows: int) -> None:
        """Move the selection."""
        if self.findings:
            finding = self.findings[max(0, min(len(self.findings) - 1, self.selected + rows))]
            self.chosen = (finding.rule, finding.engine)
            self.repaint()

    def title(self) -> str:
        return "findings"

    def note(self) -> list[Segment]:
        look = self.look
        if not self.findings:
            return []
        over = sum(self.is_over(finding) for finding in self.findings)
        now = len(self.findings) - over
        if self.present != "now":
            return [Segment(figures.count(len(self.findings)), look.dim)]
        parts = []
        if now:
            parts.append(f"{now} {'goes' if now == 1 else 'go'} on")
        if over:
            parts.append(f"{over} {'is' if over == 1 else 'are'} over")
        return [Segment(", ".join(parts), look.dim)]

    def is_over(self, finding: Finding) -> bool:
        """Whether it has ended, as far as was looked."""
        return finding.end is not None and finding.end < self.until - OVER_NS

    def wanted(self) -> int:
        """Rows wanted, title and heading included."""
        return max(1, len(self.findings)) + 2

    def _top(self, height: int) -> int:
        room = max(1, height - 1)
        return max(0, min(self.selected - room + 1, len(self.findings) - room))

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.findings:
            return [
                Line(width)
                .put_text(f"  {self.hint}", look.dim, ellipsis=look.glyphs.ellipsis)
                .end(look.text)
            ]
        columns = _columns(width)
        rows: list[Row] = [self._heading(width, columns)]
        top = self._top(height)
        most = max((finding.lost_ms for finding in self.findings), default=0.0)
        for place, finding in enumerate(self.findings[top : top + max(0, height - 1)], top):
            rows.append(self._row(width, columns, finding, place == self.selected, most))
        return rows

    def _heading(self, width: int, columns: dict[str, int]) -> Row:
        dim = self.look.dim
        line = Line(width).put("    ", dim).put("finding".ljust(columns["rule"]), dim)
        line.put("stage".ljust(columns["place"]), dim).put("time lost".rjust(columns["lost"]), dim)
        line.put(" " * columns["bar"], dim).put("sure".rjust(columns["sure"]), dim)
        line.put(
            "   " + "from   until".ljust(columns["spell"] - 3) if columns["spell"] else "", dim
        )
        line.put("requests".rjust(columns["count"]) if columns["count"] else "", dim)
        if line.room > 14:
            line.put("   because of", dim)
        return line.end(dim)

    def _row(
        self, width: int, columns: dict[str, int], finding: Finding, selected: bool, most: float
    ) -> Row:
        look, glyphs = self.look, self.look.glyphs
        over = self.is_over(finding)
        back = look.palette.selected if selected else None

        def on(style: Style) -> Style:
            return style if back is None else look.on(style, back, reverse=True)

        plain = look.dim if over else look.text
        mark = look.dim if over else look.bad
        stage = look.dim if finding.stage is None else look.stage(finding.stage, bold=True)
        line = Line(width).put(glyphs.select if selected else " ", on(look.accent))
        line.put(f"{glyphs.ring if over else glyphs.bullet} ".ljust(3), on(mark))
        line.put_text(
            finding.rule,
            on(plain if over else look.bold),
            columns["rule"] - 1,
            ellipsis=glyphs.ellipsis,
        )
        line.put(" ", on(plain)).put_text(
            place_of(finding), on(stage), columns["place"], ellipsis=glyphs.ellipsis
        )
        line.put(
            (f"{figures.count(finding.lost_ms)} ms" if finding.lost_ms else "-").rjust(
                columns["lost"]
            ),
            on(plain),
        )
        if columns["bar"]:
            cells = columns["bar"] - 2
            filled = (
                max(1, round(cells * finding.lost_ms / most)) if most > 0 and finding.lost_ms else 0
            )
            line.put("  ", on(plain)).put(look.fill(finding.stage) * filled if finding.stage else
                                          glyphs.track * filled, on(stage))  # fmt: skip
            line.put(" " * (cells - filled), on(plain))
        line.put(f"{finding.confidence:.0%}".rjust(columns["sure"]), on(plain))
        if columns["spell"]:
            end = (
                figures.instant(finding.end - self.began)
                if over and finding.end is not None
                else self.present
            )
            text = f"   {figures.instant(finding.start - self.began):>5} {glyphs.arrow} {end}"
            line.put(text.ljust(columns["spell"])[: columns["spell"]], on(plain))
        if columns["count"]:
            line.put(figures.count(finding.affected_total).rjust(columns["count"]), on(plain))
        if finding.culprit and line.room > 6:
            line.put("   ", on(plain)).put_text(
                finding.culprit, on(look.warn), ellipsis=glyphs.ellipsis
            )
        return line.end(on(plain))

    def on_click(self, event: events.Click) -> None:
        """Select, and open what is clicked twice."""
        row = event.y - 2 + self._top(max(1, self.size.height - 1))
        if 0 <= row < len(self.findings):
            self.move(row - self.selected)
            if event.chain >= 2:
                self.post_message(self.Opened())


def _columns(width: int) -> dict[str, int]:
    """Cells of each column; the bar, the number of requests and the spell leave a narrow list in
    this order."""
    sizes = {
        "rule": RULE,
        "place": PLACE,
        "lost": LOST,
        "bar": BAR,
        "sure": SURE,
        "spell": SPELL,
        "count": COUNT,
    }
    for name in ("bar", "count", "spell", "sure"):
        if 4 + sum(sizes.values()) > width:
            sizes[name] = 0
    return sizes

"""The rows of a comparison: figures of both sides, the change with its noise, bars, and the band
around zero."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from engine_hooks.protocol.stages import info
from tracer.analysis.compare.result import Comparison, Pair
from tracer.analysis.compare.rows import TIMERS, Row
from tracer.export.compare_text import (
    NAMES,
    band_plot,
    matched_lines,
    method_line,
    ms,
    noise_cell,
    parts_line,
    percent,
    rates_line,
    reach_of,
    row_word,
    signed,
)
from tracer.tui.toolkit.canvas import Line
from tracer.tui.toolkit.canvas import Row as Cells
from tracer.tui.toolkit.scroll_card import SelectionPanel
from tracer.tui.toolkit.theme import ASCII, Look
from tracer.tui.toolkit.words import paragraph

LABEL = 16
"""Cells of a row's name."""
COLUMNS = {"before": 9, "after": 9, "change": 9, "relative": 9, "noise": 9, "word": 13}
"""Cells of the columns."""
FITTING = (
    ("before", "after", "change", "relative", "noise", "word"),
    ("before", "after", "change", "relative", "word"),
    ("before", "after", "relative", "word"),
    ("before", "after", "word"),
    ("before", "after", "relative"),
    ("before", "after"),
)
"""Columns shown, by falling width."""
PLOT, BARS = 21, 16
"""Least cells of the band, and of the bars beside it."""
MATCHES = {"length": "matched by length", "work": "matched by work", "none": "not matched"}


@dataclass(frozen=True, slots=True)
class _Layout:
    """Cells of the parts of a row; `reach` is the relative change at the edge of the band, and
    `longest` the ms of a full bar."""

    width: int
    columns: dict[str, int]
    bars: int
    plot: int
    reach: float
    longest: float


class CompareTable(SelectionPanel):
    """A row for each timer, a rule, and a row for each stage."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="compare-table")
        self.comparison: Comparison | None = None
        self.pair: Pair | None = None

    def show(self, comparison: Comparison | None, pair: Pair | None) -> None:
        """Draw a pair of a comparison."""
        self.comparison, self.pair = comparison, pair
        self.select(self.selected)

    @property
    def _rule(self) -> int:
        """The entry that is a rule: the one behind the timers."""
        return sum(row in TIMERS for row in self.comparison.rows) if self.comparison else 0

    @property
    def entries(self) -> int:
        return len(self.comparison.rows) + 1 if self.comparison is not None else 0

    def select(self, row: int) -> None:
        """Select an entry; the rule is stepped over."""
        if self._rule and row == self._rule:
            row += 1 if row > self.selected else -1
        super().select(row)

    @property
    def row(self) -> Row | None:
        """The selected row."""
        return None if self.comparison is None else self._row_at(self.comparison, self.selected)

    def _row_at(self, comparison: Comparison, entry: int) -> Row | None:
        """Return the row of an entry; None for the rule."""
        if entry == self._rule:
            return None
        return comparison.rows[entry - (entry > self._rule)]

    def title(self) -> str:
        if self.comparison is None or self.pair is None:
            return "stages and timers, ms"
        many = len(self.comparison.pairs) > 1
        which = f", {NAMES[self.pair.before]} and {NAMES[self.pair.after]}" if many else ""
        return f"stages and timers, {self.comparison.percentile} in ms{which}"

    def note(self) -> list[Segment]:
        if self.comparison is None:
            return []
        counts = " and ".join(str(count) for count in self.comparison.early.counts)
        ended = " and ".join(str(count) for count in self.comparison.late.counts)
        text = f"{counts} requests"
        if self.size.width >= 90:
            text = f"{MATCHES[self.comparison.match]}: {text}, {ended} ended"
        return [Segment(text, self.look.dim)]

    def body(self, width: int, height: int) -> list[Cells]:
        comparison, pair = self.comparison, self.pair
        if comparison is None or pair is None:
            return []
        layout = self._layout(width, comparison, pair)
        rows: list[Cells] = [self._heading(layout, pair)]
        for entry in self.in_sight(max(2, height)):
            row = self._row_at(comparison, entry)
            if row is None:
                rows.append(Line(width).end(self.look.faint, self.look.glyphs.horizontal))
            else:
                rows.append(self._row(layout, row, entry == self.selected, pair, comparison))
        return rows + self._below(width, height - len(rows), comparison, pair)

    def _layout(self, width: int, comparison: Comparison, pair: Pair) -> _Layout:
        columns: dict[str, int] = {}
        for names in FITTING:
            columns = {name: COLUMNS[name] for name in names}
            if LABEL + sum(columns.values()) <= width:
                break
        rest = width - LABEL - sum(columns.values()) - 1
        bars = min(30, rest // 2 - 1) if rest >= BARS + PLOT + 2 and self.look.fine else 0
        plot = rest - bars - (2 if bars else 1)
        reach = reach_of(comparison, pair) if plot >= PLOT else 0.0
        values = [
            _figure(comparison, row, side)
            for row in comparison.rows
            for side in (pair.before, pair.after)
        ]
        longest = max((value for value in values if value is not None), default=0.0)
        return _Layout(width, columns, bars, plot if reach else 0, reach, longest)

    def _below(self, width: int, height: int, comparison: Comparison, pair: Pair) -> list[Cells]:
        """Return, where there is room, the parts of the changes, the matched requests, and how the
        noise was found."""
        look = self.look
        parts = (("E2E", pair.e2e_parts), ("TTFT", pair.ttft_parts))
        texts = [f"mean {name} {parts_line(found)}" for name, found in parts if found]
        texts += [rates_line(pair)] if pair.rates else []
        texts += ["", *matched_lines(comparison), "", method_line(comparison)]
        rows: list[Cells] = [
            Line(width).add(" ", look.text).add_text(piece, look.dim).end(look.text)
            for text in ("", *texts)
            for piece in paragraph(text, max(10, width - 2), look)
        ]
        return rows[:height] if height >= min(4, len(rows)) else []

    def _heading(self, layout: _Layout, pair: Pair) -> Cells:
        look = self.look
        line = Line(layout.width).add(" " * LABEL, look.dim)
        before, after = NAMES[pair.before], NAMES[pair.after]
        names = {"before": before, "after": after, "change": "change", "noise": "noise"}
        for name, cells in layout.columns.items():
            line.add(names.get(name, "").rjust(cells), look.dim)
        if layout.bars:
            line.add(f"  {before} over {after}".ljust(layout.bars + 1), look.dim)
        if layout.plot:
            left, right = f"-{100 * layout.reach:.0f} %", f"+{100 * layout.reach:.0f} %"
            middle = layout.plot // 2
            scale = f"{left}{'0':>{middle - len(left) + 1}}{right:>{layout.plot - middle - 1}}"
            line.add(" " + scale, look.dim)
        return line.end(look.dim)

    def _row(
        self, layout: _Layout, row: Row, selected: bool, pair: Pair, comparison: Comparison
    ) -> Cells:
        look = self.look
        change = pair.change(row.key, comparison.percentile)
        back = look.palette.selected if selected else look.palette.back
        line = Line(layout.width)
        line.add(look.glyphs.select if selected else " ", look.on(look.accent, back))
        style = look.bold if row in TIMERS else look.dim
        if row.stage is not None:
            line.add(f"{int(row.stage):2d} ", look.on(look.dim, back))
            style = look.stage(row.stage, bold=selected)
        line.add(row.label.ljust(LABEL - line.used), look.on(style, back, reverse=selected))
        word = row_word(pair, row.key, comparison.percentile)
        style = word_style(look, word)
        before = _figure(comparison, row, pair.before)
        texts = {
            "before": ms(before),
            "after": ms(_figure(comparison, row, pair.after)),
            "change": "" if change.difference is None else signed(change.difference),
            "relative": percent(change),
            "noise": noise_cell(change, before),
            "word": word,
        }
        plain = look.on(look.text, back)
        for name, cells in layout.columns.items():
            coloured = name in ("change", "relative", "word")
            line.add(texts[name].rjust(cells), look.on(style, back) if coloured else plain)
        if layout.bars:
            sides = before, _figure(comparison, row, pair.after)
            line.add(" ", plain)
            self._bars(line, row, layout, back, sides)
        if layout.plot:
            glyphs = band_plot(change, layout.plot, layout.reach, look.glyphs is not ASCII)
            line.add(" ", plain).add(glyphs, look.on(style if change.differs else look.dim, back))
        return line.end(plain)

    def _bars(
        self,
        line: Line,
        row: Row,
        layout: _Layout,
        back: str,
        sides: tuple[float | None, float | None],
    ) -> None:
        """Append both bars: one side in the upper half of each cell, the other in the lower."""
        look = self.look
        colour = look.stage_colours[row.stage] if row.stage is not None else look.palette.dim
        style = look.style(colour, back)
        one, two = (
            max(1, round(value / layout.longest * layout.bars)) if value else 0 for value in sides
        )
        line.add("█" * min(one, two), style).add("▀" * (one - two), style)
        line.add("▄" * (two - one), style)
        line.add(" " * (layout.bars - max(one, two)), look.style("", back))

    def explained(self) -> str:
        """Return what the selected row measures."""
        row = self.row
        if row is None:
            return ""
        if row.stage is None:
            return f"{row.label}: {row.meaning}"
        stage = info(row.stage)
        return f"{stage.label}: {stage.begins} → {stage.ends}; worse with {stage.worse}"


def _figure(comparison: Comparison, row: Row, side: int) -> float | None:
    return comparison.figures[row.key][comparison.percentile].values[side]


def word_style(look: Look, word: str) -> Style:
    """Return the style of a change by its word."""
    return look.bad if "slower" in word else look.good if "faster" in word else look.dim

"""The rows of a comparison: figures of both sides, the change with its noise, bars, and the band
around zero."""

from __future__ import annotations

import textwrap

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from engine_hooks.protocol.stages import info
from tracer.analysis.compare.result import Change, Comparison, Pair
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
from tracer.export.page import Page
from tracer.tui.toolkit.canvas import Line, label
from tracer.tui.toolkit.canvas import Row as Cells
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import ASCII, Look

LABEL, FIGURE, SIGNED, RELATIVE, NOISE, WORD = 16, 9, 9, 9, 9, 13
"""Cells of the parts of a row."""
PLOT, BARS = 21, 16
"""Least cells of the band, and of the bars beside it."""


class CompareTable(Panel):
    """A row for each timer and stage; one is selected."""

    class Moved(Message):
        """Another row was selected."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="compare-table")
        self.comparison: Comparison | None = None
        self.pair: Pair | None = None
        self.selected = 0
        self.top = 0

    def show(self, comparison: Comparison | None, pair: Pair | None) -> None:
        """Draw a pair of a comparison."""
        self.comparison, self.pair = comparison, pair
        if comparison is not None:
            self.selected = min(self.selected, len(comparison.rows) - 1)
        self.repaint()

    @property
    def row(self) -> Row | None:
        """The selected row."""
        return None if self.comparison is None else self.comparison.rows[self.selected]

    def select(self, place: int) -> None:
        """Select a row by its place."""
        if self.comparison is not None:
            self.selected = max(0, min(len(self.comparison.rows) - 1, place))
            self.repaint()

    def title(self) -> str:
        if self.comparison is None or self.pair is None:
            return "stages and timers, ms"
        many = len(self.comparison.pairs) > 1
        which = f", {NAMES[self.pair.before]} and {NAMES[self.pair.after]}" if many else ""
        return f"stages and timers, {self.comparison.percentile} in ms{which}"

    def note(self) -> list[Segment]:
        if self.comparison is None:
            return []
        counts = " / ".join(str(count) for count in self.comparison.early.counts)
        ended = " / ".join(str(count) for count in self.comparison.late.counts)
        if self.size.width < 90:
            return [Segment(f"{counts} requests", self.look.dim)]
        match = {"length": "like lengths", "work": "like work", "none": "not matched"}[
            self.comparison.match
        ]
        return [Segment(f"{match}: {counts} requests, {ended} ended", self.look.dim)]

    def body(self, width: int, height: int) -> list[Cells]:
        """Heading and rows."""
        comparison, pair = self.comparison, self.pair
        if comparison is None or pair is None:
            return []
        look = self.look
        columns = _columns(width)
        rest = width - LABEL - sum(columns.values()) - 1
        bars = min(30, rest // 2 - 1) if rest >= BARS + PLOT + 2 and look.fine else 0
        plot = rest - bars - (2 if bars else 1)
        if plot < PLOT:
            plot = 0
        reach = reach_of(comparison, pair) if plot else 0.0
        rows: list[Cells] = [self._heading(width, columns, bars, plot, reach, pair)]
        order = self._lines(comparison)
        room = max(1, height - 1)
        place = order.index(self.selected)
        top = max(0, min(self.top, len(order) - room))
        top = min(place, max(top, place - room + 1))
        longest = max((value for row in comparison.rows for k in (pair.before, pair.after)
                       if (value := self._figure(row, k)) is not None), default=0.0)  # fmt: skip
        for index in order[top : top + room]:
            if index < 0:
                rows.append(Line(width).end(look.faint, look.glyphs.horizontal))
                continue
            row = comparison.rows[index]
            rows.append(
                self._row(width, row, index == self.selected, columns, bars, plot, reach, longest)
            )
        return rows + self._below(width, height - len(rows), comparison, pair)

    def _below(self, width: int, height: int, comparison: Comparison, pair: Pair) -> list[Cells]:
        """Where there is room: what the changes are made of, what was matched, and how the noise
        was found."""
        look = self.look
        lines = [f"mean {name} {parts_line(parts)}" for name, parts in (("E2E", pair.e2e_parts),
                 ("TTFT", pair.ttft_parts)) if parts]  # fmt: skip
        lines += [rates_line(pair)] if pair.rates else []
        lines += ["", *matched_lines(comparison), "", method_line(comparison)]
        rows: list[Cells] = []
        for text in ["", *lines]:
            text = label(text) if look.glyphs is not ASCII else Page(1, False, False).plain(text)
            pieces = textwrap.wrap(text, max(10, width - 2), break_on_hyphens=False) or [""]
            rows += [
                Line(width).put(" ", look.text).put_text(piece, look.dim).end(look.text)
                for piece in pieces
            ]
        return rows if len(rows) <= height else rows[: max(0, height)] if height >= 4 else []

    @staticmethod
    def _lines(comparison: Comparison) -> list[int]:
        """Places of the rows as they stand below each other; -1 is a rule."""
        timers = [place for place, row in enumerate(comparison.rows) if row in TIMERS]
        others = [place for place, row in enumerate(comparison.rows) if row not in TIMERS]
        return [*timers, -1, *others]

    def _heading(
        self, width: int, columns: dict[str, int], bars: int, plot: int, reach: float, pair: Pair
    ) -> Cells:
        look = self.look
        line = Line(width).put(" " * LABEL, look.dim)
        names = {
            "before": NAMES[pair.before],
            "after": NAMES[pair.after],
            "signed": "change",
            "relative": "",
            "noise": "noise",
            "word": "",
        }
        for name, cells in columns.items():
            line.put(names[name].rjust(cells), look.dim)
        if bars:
            line.put(f"  {NAMES[pair.before]} over {NAMES[pair.after]}".ljust(bars + 1), look.dim)
        if plot and reach:
            left, right = f"-{reach:.0%}", f"+{reach:.0%}"
            middle = plot // 2
            scale = f"{left}{'0':>{middle - len(left) + 1}}{right:>{plot - middle - 1}}"
            line.put(" " + scale, look.dim)
        return line.end(look.dim)

    def _row(
        self,
        width: int,
        row: Row,
        selected: bool,
        columns: dict[str, int],
        bars: int,
        plot: int,
        reach: float,
        longest: float,
    ) -> Cells:
        look, pair, comparison = self.look, self.pair, self.comparison
        assert pair is not None
        assert comparison is not None
        statistic = comparison.percentile
        change = pair.change(row.key, statistic)
        back = look.palette.selected if selected else look.palette.back
        mark = look.on(look.accent, back)
        line = Line(width).put(look.glyphs.select if selected else " ", mark)
        if row.stage is not None:
            line.put(f"{int(row.stage):2d} ", look.on(look.dim, back))
            line.put(
                row.label.ljust(LABEL - 4),
                look.on(look.stage(row.stage, bold=selected), back, reverse=selected),
            )
        else:
            named = look.bold if row in TIMERS else look.dim
            line.put(row.label.ljust(LABEL - 1), look.on(named, back, reverse=selected))
        said = row_word(pair, row.key, statistic)
        style = self._style(said)
        before = self._figure(row, pair.before)
        texts = {
            "before": ms(before), "after": ms(self._figure(row, pair.after)),
            "signed": "" if change.difference is None else signed(change.difference),
            "relative": percent(change), "noise": noise_cell(change, before), "word": said,
        }  # fmt: skip
        plain = look.on(look.text, back)
        for name, cells in columns.items():
            text = (
                texts[name]
                if look.glyphs is not ASCII
                else texts[name].replace("±", "~").replace("×", "x")
            )
            line.put(
                text.rjust(cells),
                look.on(style, back) if name in ("word", "signed", "relative") else plain,
            )
        if bars:
            line.put(" ", plain)
            self._bars(line, row, bars, longest, back, pair)
        if plot and reach:
            glyphs = band_plot(change, plot, reach, look.glyphs is not ASCII)
            line.put(" ", plain).put(glyphs, look.on(style if change.differs else look.dim, back))
        return line.end(plain)

    def _style(self, said: str) -> Style:
        look = self.look
        return look.bad if "slower" in said else look.good if "faster" in said else look.dim

    def _bars(
        self, line: Line, row: Row, cells: int, longest: float, back: str, pair: Pair
    ) -> None:
        """Both bars in one row: the first side in the upper half of each cell, the other one in the
        lower half."""
        look = self.look
        colour = look.stage_colours[row.stage] if row.stage is not None else look.palette.dim
        one, two = (
            0 if not value or not longest else max(1, round(value / longest * cells))
            for value in (self._figure(row, pair.before), self._figure(row, pair.after))
        )
        both = min(one, two)
        line.put("█" * both, look.style(colour, back))
        line.put("▀" * (one - both), look.style(colour, back)).put(
            "▄" * (two - both), look.style(colour, back)
        )
        line.put(" " * (cells - max(one, two)), look.style("", back))

    def _figure(self, row: Row, k: int) -> float | None:
        if self.comparison is None:
            return None
        return self.comparison.figures[row.key][self.comparison.percentile].values[k]

    def explained(self) -> str:
        """What the selected row is."""
        row = self.row
        if row is None:
            return ""
        if row.stage is None:
            text = f"{row.label}: {row.meaning}"
        else:
            stage = info(row.stage)
            text = f"{stage.label}: {stage.begins} → {stage.ends}; worse with {stage.worse}"
        return text if self.look.glyphs is not ASCII else Page(1, False, False).plain(text)

    def change(self) -> Change:
        """The change of the selected row."""
        if self.row is None or self.pair is None or self.comparison is None:
            return Change()
        return self.pair.change(self.row.key, self.comparison.percentile)

    def on_click(self, event: events.Click) -> None:
        """Select a row."""
        if self.comparison is None:
            return
        order = self._lines(self.comparison)
        room = max(1, self.size.height - 2)
        place = order.index(self.selected)
        top = min(place, max(0, place - room + 1))
        at = top + event.y - (2 if self.titled else 1)
        if 0 <= at < len(order) and order[at] >= 0:
            self.select(order[at])
            self.post_message(self.Moved())


def _columns(width: int) -> dict[str, int]:
    """The columns that fit, with their cells; figures and the word stay longest."""
    cells = {
        "before": FIGURE,
        "after": FIGURE,
        "signed": SIGNED,
        "relative": RELATIVE,
        "noise": NOISE,
        "word": WORD,
    }
    figures = ("before", "after")
    for names in (
        (*figures, "signed", "relative", "noise", "word"),
        (*figures, "signed", "relative", "word"),
        (*figures, "relative", "word"),
        (*figures, "word"),
        (*figures, "relative"),
    ):
        if LABEL + sum(cells[name] for name in names) <= width:
            return {name: cells[name] for name in names}
    return {name: cells[name] for name in figures}

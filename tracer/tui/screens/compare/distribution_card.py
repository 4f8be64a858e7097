"""How one row is spread on each side: a histogram, a line for each stretch of milliseconds, both
sides beside it."""

from __future__ import annotations

import numpy as np
from rich.segment import Segment
from rich.style import Style

from tracer.analysis.compare import Trace
from tracer.analysis.compare.result import STATISTICS, Comparison, Pair
from tracer.analysis.compare.rows import Row
from tracer.analysis.compare.samples import Floats, Ints, bin_ms
from tracer.export.compare_text import NAMES, ms, noise_cell, percent, signed, word
from tracer.tui.toolkit.canvas import Line
from tracer.tui.toolkit.canvas import Row as Cells
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import ASCII, Look

MOST_ROWS = 24
LABEL = 19
"""Cells of a stretch's bounds."""


class DistributionCard(Panel):
    """Shares of the matched requests (of gaps between tokens for ITL) by length, on a logarithmic
    scale."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="distribution")
        self.row: Row | None = None
        self.data: tuple[tuple[Floats, Floats], ...] = ()
        """For each side the values in ms and how much each counts."""
        self.names: tuple[str, str] = ("A", "B")
        self.comparison: Comparison | None = None
        self.pair: Pair | None = None

    def show(
        self,
        row: Row | None,
        traces: tuple[Trace, ...],
        comparison: Comparison | None,
        pair: Pair | None,
    ) -> None:
        """Draw the row of a pair."""
        self.row, self.comparison, self.pair = row, comparison, pair
        if row is None or comparison is None or pair is None or len(traces) <= pair.after:
            self.data = ()
        else:
            matched = comparison.late if row.late else comparison.early
            self.names = (NAMES[pair.before], NAMES[pair.after])
            self.data = tuple(
                _values(traces[k], row, matched.members[k]) for k in (pair.before, pair.after)
            )
        self.repaint()

    def title(self) -> str:
        return "distribution" if self.row is None else f"{self.row.label}, how it is spread"

    def note(self) -> list[Segment]:
        if not self.data or self.row is None:
            return []
        what = "gaps" if self.row.key == "itl" else "requests"
        counts = " / ".join(f"{counts.sum():,.0f}" for _, counts in self.data)
        return [Segment(f"{counts} {what}", self.look.dim)]

    def body(self, width: int, height: int) -> list[Cells]:
        """The statistics, then a heading and a line for each stretch."""
        look = self.look
        rows = self._statistics(width, height)
        height -= len(rows)
        known = [(values, counts) for values, counts in self.data if len(values)]
        if not known:
            return [
                *rows,
                Line(width).put("  nothing was measured on either side", look.dim).end(look.text),
            ]
        low = max(min(float(values.min()) for values, _ in known), 1e-3)
        high = max(max(float(values.max()) for values, _ in known), low * 1.02)
        lines = max(3, min(MOST_ROWS, height - 1))
        edges = np.geomspace(low, high * 1.0001, lines + 1)
        edges[0] = 0.0
        shares = [
            np.histogram(values, edges, weights=counts)[0] / max(1e-9, float(counts.sum()))
            if len(values)
            else np.zeros(lines)
            for values, counts in self.data
        ]
        middles = self._middles()
        bar = max(1, (width - LABEL - 2 * 5 - 2) // 2)
        top = max(float(share.max()) for share in shares) or 1.0
        head = Line(width).put("ms".rjust(LABEL - 2) + "  ", look.dim)
        for name, middle in zip(self.names, middles, strict=True):
            head.put(f" {name}, p50 {ms(middle)}".ljust(bar + 6)[: bar + 6], look.dim)
        rows.append(head.end(look.dim))
        edges[0] = low
        for place in range(lines):
            line = Line(width)
            span = f"{ms(float(edges[place]))} to {ms(float(edges[place + 1]))}"
            line.put(span.rjust(LABEL - 2)[: LABEL - 2] + "  ", look.dim)
            for k, share in enumerate(shares):
                value, middle = float(share[place]), middles[k]
                cells = 0 if value <= 0 else max(1, round(value / top * bar))
                here = middle is not None and edges[place] <= middle < edges[place + 1]
                style = self._style(k)
                text = f"{value:.0%}" if value >= 0.005 else ("<1%" if value > 0 else "")
                line.put(text.rjust(4) + " ", look.bold if here else look.dim)
                line.put(self._glyph(k) * cells, style).put(" " * (bar - cells), look.text).put(
                    " ", look.text
                )
            rows.append(line.end(look.text))
        return rows

    def _statistics(self, width: int, height: int) -> list[Cells]:
        """Every statistic of both sides with its change, where there is room for that as well."""
        look, row, comparison, pair = self.look, self.row, self.comparison, self.pair
        if row is None or comparison is None or pair is None or height < 14 or width < 56:
            return []
        heads = ("", *self.names, "change", "", "noise", "")
        cells = (6, 8, 8, 8, 9, 8, 9)
        line = Line(width)
        for text, size in zip(heads, cells, strict=True):
            line.put(text.rjust(size), look.dim)
        rows: list[Cells] = [line.end(look.dim)]
        for statistic in STATISTICS:
            figure, change = comparison.figures[row.key][statistic], pair.change(row.key, statistic)
            said = word(change)
            style = look.bad if said == "slower" else look.good if said == "faster" else look.dim
            before = figure.values[pair.before]
            line = Line(width).put(
                statistic.rjust(6), look.bold if statistic == comparison.percentile else look.dim
            )
            line.put(ms(before).rjust(8), look.text).put(
                ms(figure.values[pair.after]).rjust(8), look.text
            )
            line.put(
                ("" if change.difference is None else signed(change.difference)).rjust(8), style
            )
            line.put(percent(change).rjust(9), style)
            noise = noise_cell(change, before)
            line.put(
                (
                    noise if look.glyphs is not ASCII else noise.replace("±", "~").replace("×", "x")
                ).rjust(8),
                look.text,
            ).put(said.rjust(9), style)
            rows.append(line.end(look.text))
        why = pair.change(row.key, comparison.percentile).why
        rows.append(Line(width).put_text(f"  {why}", look.dim, width).end(look.text))
        return rows

    def _middles(self) -> list[float | None]:
        """The p50 of both sides as the rows have it, in which cells have weights."""
        if self.row is None or self.comparison is None or self.pair is None:
            return [None, None]
        values = self.comparison.figures[self.row.key]["p50"].values
        return [values[self.pair.before], values[self.pair.after]]

    def _style(self, k: int) -> Style:
        look = self.look
        stage = self.row.stage if self.row is not None else None
        if k:
            return look.stage(stage) if stage is not None else look.style(look.palette.accent)
        return look.dim

    def _glyph(self, k: int) -> str:
        look = self.look
        return ("█" if look.fine else "#") if k else ("▓" if look.fine else "=")


def _values(trace: Trace, row: Row, members: Ints) -> tuple[Floats, Floats]:
    """Values of the members in ms, and how much each counts."""
    if row.key == "itl":
        packed = [trace.samples.gaps[member] for member in members]
        if not packed:
            return np.zeros(0), np.zeros(0)
        bins = np.concatenate([found for found, _, _ in packed])
        return bin_ms(bins + 0.5), np.concatenate([counts for _, counts, _ in packed]).astype(
            np.float64
        )
    if row.key not in trace.samples.values:
        return np.zeros(0), np.zeros(0)
    values = trace.samples.values[row.key][members]
    values = values[~np.isnan(values)]
    return values, np.ones(len(values))

"""The distribution of one row: a histogram with both sides beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from rich.segment import Segment

from tracer.analysis.compare import Trace
from tracer.analysis.compare.result import STATISTICS, Comparison, Pair
from tracer.analysis.compare.rows import Row
from tracer.analysis.compare.samples import Floats, Ints, bin_ms
from tracer.export.compare_text import NAMES, ms, noise_cell, percent, signed, word
from tracer.tui.screens.compare.table import word_style
from tracer.tui.toolkit.canvas import Line
from tracer.tui.toolkit.canvas import Row as Cells
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

MOST_ROWS = 24
LABEL, SHARE = 19, 6
"""Cells of a stretch's bounds, and of a share."""


class DistributionCard(Panel):
    """Shares of the matched requests (of gaps between tokens for ITL) by length, on a logarithmic
    scale."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="distribution")
        self.row: Row | None = None
        self.data: tuple[tuple[Floats, Floats], ...] = ()
        """Values in ms of each side, and the weight of each value."""
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
        self.data = ()
        if row is not None and comparison is not None and pair is not None:
            matched = comparison.late if row.late else comparison.early
            sides = (pair.before, pair.after) if len(traces) > pair.after else ()
            self.data = tuple(_values(traces[k], row, matched.members[k]) for k in sides)
        self.repaint()

    def title(self) -> str:
        return "distribution" if self.row is None else f"{self.row.label} distribution"

    def note(self) -> list[Segment]:
        if not self.data or self.row is None:
            return []
        unit = "gaps" if self.row.key == "itl" else "requests"
        counts = " and ".join(f"{weights.sum():,.0f}" for _, weights in self.data)
        return [Segment(f"{counts} {unit}", self.look.dim)]

    def body(self, width: int, height: int) -> list[Cells]:
        row, comparison, pair = self.row, self.comparison, self.pair
        known = [values for values, _ in self.data if len(values)]
        if row is None or comparison is None or pair is None or not known:
            text = "  no values on either side"
            return [Line(width).add(text, self.look.dim).end(self.look.text)]
        rows: list[Cells] = []
        if height >= 14 and width >= 56:
            rows = self._statistics(width, row, comparison, pair)
        height -= len(rows)
        low = max(min(float(values.min()) for values in known), 1e-3)
        high = max(max(float(values.max()) for values in known), low * 1.02)
        lines = max(3, min(MOST_ROWS, height - 1))
        edges = np.geomspace(low, high * 1.0001, lines + 1)
        edges[0] = 0.0
        shares = [
            np.histogram(values, edges, weights=weights)[0] / max(1e-9, float(weights.sum()))
            if len(values)
            else np.zeros(lines)
            for values, weights in self.data
        ]
        edges[0] = low
        # the p50 of the rows, in which cells have weights
        p50 = comparison.figures[row.key]["p50"].values
        middles = (p50[pair.before], p50[pair.after])
        return [*rows, *self._histogram(width, row, pair, edges, shares, middles)]

    def _histogram(
        self,
        width: int,
        row: Row,
        pair: Pair,
        edges: Floats,
        shares: Sequence[Floats],
        middles: tuple[float | None, float | None],
    ) -> list[Cells]:
        """Return a heading and a line for each stretch of milliseconds."""
        look = self.look
        bar = max(1, (width - LABEL - 2 * (SHARE + 1) - 1) // 2)
        top = max(float(share.max()) for share in shares) or 1.0
        head = Line(width).add("ms".rjust(LABEL - 2) + "  ", look.dim)
        for name, middle in zip((NAMES[pair.before], NAMES[pair.after]), middles, strict=True):
            cells = SHARE + 1 + bar
            head.add(f" {name}, p50 {ms(middle)}".ljust(cells)[:cells], look.dim)
        rows: list[Cells] = [head.end(look.dim)]
        colour = look.stage(row.stage) if row.stage is not None else look.style(look.palette.accent)
        sides = (("▓" if look.fine else "=", look.dim), ("█" if look.fine else "#", colour))
        for place, (start, end) in enumerate(pairwise(edges)):
            line = Line(width)
            span = f"{ms(float(start))} to {ms(float(end))}"
            line.add(span.rjust(LABEL - 2)[: LABEL - 2] + "  ", look.dim)
            for share, middle, (glyph, style) in zip(shares, middles, sides, strict=True):
                value = float(share[place])
                here = middle is not None and start <= middle < end
                text = "" if value <= 0 else "<1 %" if value < 0.005 else f"{100 * value:.0f} %"
                line.add(text.rjust(SHARE - 1) + " ", look.bold if here else look.dim)
                cells = 0 if value <= 0 else max(1, round(value / top * bar))
                line.add(glyph * cells, style).add(" " * (bar - cells + 1), look.text)
            rows.append(line.end(look.text))
        return rows

    def _statistics(self, width: int, row: Row, comparison: Comparison, pair: Pair) -> list[Cells]:
        """Return every statistic of both sides with its change."""
        look = self.look
        heads = ("", NAMES[pair.before], NAMES[pair.after], "change", "", "noise", "")
        cells = (6, 8, 8, 8, 9, 8, 9)
        line = Line(width)
        for text, size in zip(heads, cells, strict=True):
            line.add(text.rjust(size), look.dim)
        rows: list[Cells] = [line.end(look.dim)]
        for statistic in STATISTICS:
            values = comparison.figures[row.key][statistic].values
            change = pair.change(row.key, statistic)
            style = word_style(look, word(change))
            texts = (
                (statistic, look.bold if statistic == comparison.percentile else look.dim),
                (ms(values[pair.before]), look.text),
                (ms(values[pair.after]), look.text),
                ("" if change.difference is None else signed(change.difference), style),
                (percent(change), style),
                (noise_cell(change, values[pair.before]), look.text),
                (word(change), style),
            )
            line = Line(width)
            for (text, text_style), size in zip(texts, cells, strict=True):
                line.add(text.rjust(size), text_style)
            rows.append(line.end(look.text))
        why = pair.change(row.key, comparison.percentile).why
        rows.append(Line(width).add_text(f"  {why}", look.dim, width).end(look.text))
        return rows


def _values(trace: Trace, row: Row, members: Ints) -> tuple[Floats, Floats]:
    """Return the values of the members in ms, and the weight of each."""
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

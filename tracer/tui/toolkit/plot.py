"""A plot: a titled panel with a scale on the left, columns, and labels below.

Our own lines of cells rather than a plotting widget: textual-plotext takes 3.9 ms for a bar chart
of 60 × 15 cells, and every update sends all of them; columns on a `Canvas` take 0.33 ms and send
what changed (measured side by side; see docs/numbers.md). What is drawn here are quantities over
ranges or over time: columns in eighths of cells show them as they are, from zero on; braille dots
would show points.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.segment import Segment

from engine_hooks.protocol.stages import Stage
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.columns import Cell, Tone, blank_column, rows_of
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

LEFT = 7
"""Cells of the scale."""


@dataclass(slots=True)
class Chart:
    """What fills a plot: columns of cells, what stands at the upper and the lower end of the scale,
    labels below as (column, text), and a line in words."""

    columns: list[list[Cell]] = field(default_factory=list)
    top: str = ""
    bottom: str = "0"
    labels: list[tuple[int, str]] = field(default_factory=list)
    words: list[Segment] = field(default_factory=list)
    middle: str = ""


class Plot(Panel):
    """See the module. Subclasses give `chart` for a size, and `empty` words for when there is
    nothing to draw."""

    pad = 1
    empty = "nothing yet"

    @abstractmethod
    def chart(self, cells: int, height: int) -> Chart | None:
        """Return the chart for so many cells; None when there is nothing to draw."""

    def legend(self) -> list[Segment]:
        """Return the meaning of the tones."""
        return []

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        spoken = height >= 5
        chart_height = height - 1 - (1 if spoken else 0)
        cells = width - LEFT - 1
        chart = self.chart(cells, chart_height) if cells >= 8 and chart_height >= 2 else None
        if chart is None:
            return [Line(width).add(self.empty, look.dim).end(look.text)]
        columns = [
            *chart.columns[:cells],
            *[blank_column(look, chart_height)] * (cells - len(chart.columns)),
        ]
        rows: list[Row] = []
        for y, segments in enumerate(rows_of(columns, chart_height)):
            label = chart.top if y == 0 else chart.bottom if y == chart_height - 1 else ""
            if chart_height >= 5 and y == chart_height // 2:
                label = label or chart.middle
            line = Line(width).add(label.rjust(LEFT)[-LEFT:], look.dim)
            line.add(look.glyphs.vertical, look.grid if not label else look.faint).add_segments(
                segments, cells
            )
            rows.append(line.end(look.text))
        rows.append(self._labels(chart, width))
        if spoken:
            line = Line(width)
            words = chart.words or self.legend()
            for text, style, _ in words:
                line.add(text, style or look.dim)
            rows.append(line.end(look.text))
        return rows

    def _labels(self, chart: Chart, width: int) -> Row:
        look = self.look
        line = Line(width).fill_to(LEFT + 1, look.dim)
        for column, text in chart.labels:
            at = LEFT + 1 + column
            if at >= line.used + (1 if line.used > LEFT + 1 else 0) and at + len(text) <= width:
                line.fill_to(at, look.dim).add(text, look.dim)
        return line.end(look.text)


def tone(
    look: Look, stage: Stage, glyph: str = "█", plain: str = "#", *, quiet: bool = False
) -> Tone:
    """Return the tone of a stage; `quiet` beyond the main part of a column."""
    return Tone((look.wait_colours if quiet else look.stage_colours)[stage], glyph, plain)


def swatches(look: Look, parts: Sequence[tuple[Tone, str]]) -> list[Segment]:
    """Return a legend: each tone with its word."""
    segments: list[Segment] = []
    for each, word in parts:
        glyph = "█" if look.fine else each.glyph if look.glyphs.ellipsis == "…" else each.ascii
        segments += [Segment(glyph, look.style(each.colour)), Segment(f" {word}  ", look.dim)]
    return segments

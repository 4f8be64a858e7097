"""Inter-token latency of one request: a column for each token (or for some), its spikes, and the
batch beneath."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.segment import Segment

from engine_hooks.protocol.stages import Stage
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.history import nice_top, plot
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look


class ItlCard(Panel):
    """Gaps between tokens over the output, highest in each column; gaps far above the median stand
    out."""

    pad = 1

    SPIKE = 2.0
    """A gap of so many medians is drawn as a spike."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="itl", edge=True, first=True)
        self.gaps: tuple[float, ...] = ()
        self.batches: tuple[int, ...] = ()

    def show(self, gaps: tuple[float, ...], batches: tuple[int, ...]) -> None:
        """Draw gaps in ms, and the batch size of the step that gave each token."""
        self.gaps, self.batches = gaps, batches
        self.repaint()

    def title(self) -> str:
        return "inter-token latency" if self.size.width >= 72 else "ITL"

    def note(self) -> list[Segment]:
        look = self.look
        if not self.gaps:
            return []
        ordered = sorted(self.gaps)
        parts = (
            ("p50", quantile(ordered, 0.5)),
            ("p95", quantile(ordered, 0.95)),
            ("max", ordered[-1]),
        )
        segments: list[Segment] = []
        for name, value in parts:
            segments.append(Segment(("  " if segments else "") + name + " ", look.dim))
            segments.append(Segment(figures.milliseconds(value), look.bold))
        return [*segments, Segment(" ms", look.dim)]

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.gaps:
            return [Line(width).put("no second token yet", look.dim).end(look.text)]
        labels = 8 if width >= 40 and height >= 3 else 0
        cells = max(1, width - labels)
        columns = bucketed(self.gaps, cells)
        with_batch = height >= 4 and bool(self.batches)
        lines = max(1, height - (2 if with_batch else 1) if height >= 3 else height)
        median = quantile(sorted(self.gaps), 0.5)
        top = nice_top(max(self.gaps))
        rows = plot_rows(look, columns, lines, top, median * self.SPIKE, cells)
        result: list[Row] = []
        for index, segments in enumerate(rows):
            line = Line(width)
            if labels:
                label = (
                    figures.milliseconds(top)
                    if index == 0
                    else "0"
                    if index == lines - 1 and lines > 1
                    else ""
                )
                line.put(label.rjust(labels - 1) + " ", look.dim)
            line.put_segments(segments, sum(len(segment.text) for segment in segments))
            result.append(line.end(look.text))
        if with_batch:
            sizes = bucketed([float(size) for size in self.batches], cells)
            most = max(sizes)
            line = Line(width)
            if labels:
                line.put(f"b {most:.0f}".rjust(labels - 1) + " ", look.dim)
            result.append(
                line.put(plot(sizes, look.glyphs.rises, 1, most)[0], look.stage(Stage.DECODE)).end(
                    look.text
                )
            )
        if height >= 3:
            line = Line(width).fill_to(labels, look.dim).put("token 2", look.dim)
            end = figures.count(len(self.gaps) + 1)
            line.fill_to(min(width, labels + len(columns)) - len(end), look.dim).put(end, look.dim)
            result.append(line.end(look.text))
        return result


def plot_rows(
    look: Look, columns: Sequence[float], height: int, top: float, spike: float, cells: int
) -> list[list[Segment]]:
    """Columns as rows of glyphs, the first row on top; columns above `spike` take the colour of a
    warning."""
    calm, high = look.stage(Stage.DECODE), look.warn
    rows: list[list[Segment]] = []
    for text in plot(columns, look.glyphs.rises, height, top):
        segments: list[Segment] = []
        begin = 0
        for index in range(1, len(text) + 1):
            if index == len(text) or (columns[index] > spike) != (columns[begin] > spike):
                segments.append(
                    Segment(text[begin:index], high if columns[begin] > spike else calm)
                )
                begin = index
        rest = cells - len(text)
        if rest > 0:
            segments.append(Segment(" " * rest, look.text))
        rows.append(segments)
    return rows


def bucketed(values: Sequence[float], cells: int) -> list[float]:
    """At most `cells` values: the largest of each run of neighbours, so that a spike never
    disappears."""
    if len(values) <= cells:
        return list(values)
    edges = [index * len(values) // cells for index in range(cells + 1)]
    return [max(values[a:b]) for a, b in itertools.pairwise(edges)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at a share of a sorted sequence."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

"""Decode step time by batch size: flat while the weights are read, rising past the ridge."""

from __future__ import annotations

import math

from rich.segment import Segment
from rich.style import Style

from engine_hooks.protocol.stages import Stage
from tracer.analysis.budget.budget import Budget
from tracer.analysis.model.costs import Costs
from tracer.format import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.history import nice_top, plot
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

LARGEST = 1024
"""Batch at the right end, unless the present one or the ridge is larger."""
_LABELS = 9
"""Cells of the scale at the left."""


class RidgeChart(Panel):
    """Columns of step time on a logarithmic axis of batch sizes; the present batch and the ridge
    are marked below."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="ridge")
        self.made: Budget | None = None

    def show(self, made: Budget) -> None:
        self.made = made
        self.repaint()

    def title(self) -> str:
        return "decode step by batch"

    def note(self) -> list[Segment]:
        if self.made is None:
            return []
        text = f"others' context {figures.count(_context(self.made))} tokens"
        return [Segment(text, self.look.dim)]

    def body(self, width: int, height: int) -> list[Row]:
        made, look = self.made, self.look
        cells, rows = width - _LABELS, height - 1
        if made is None or cells < 12 or rows < 2:
            return []
        ridge = math.ceil(min(made.ridge_batch, 100_000.0) * 1.5)
        largest = max(LARGEST, 2 * made.workload.batch, ridge)
        costs = Costs(
            made.model, made.device, made.efficiency, made.counting, made.tp, made.ignore_kv
        )
        own, others = float(made.workload.prompt), float(_context(made))
        times = [
            float(costs.decode_step(own, batch, others).ms) + float(costs.host_ms(batch))
            for batch in (largest ** (column / (cells - 1)) for column in range(cells))
        ]
        top = nice_top(max(times))
        drawn: list[Row] = []
        colour = look.stage(Stage.DECODE)
        here = _column(made.workload.batch, largest, cells)
        scale = {0: f"{figures.milliseconds(top)} ms", rows - 1: "0"}
        for number, text in enumerate(plot(times, look.glyphs.rises, rows, top)):
            line = Line(width).add(scale.get(number, "").rjust(_LABELS - 1) + " ", look.dim)
            line.add(text[:here], colour).add(text[here : here + 1], look.bold)
            drawn.append(line.add(text[here + 1 :], colour).end(look.text))
        drawn.append(self._axis(width, cells, made, largest))
        return drawn

    def _axis(self, width: int, cells: int, made: Budget, largest: int) -> Row:
        """Return the marks: the present batch, the ridge, the largest, 1."""
        look, glyphs = self.look, self.look.glyphs
        here = _column(made.workload.batch, largest, cells)
        marks = [(here, f"{glyphs.up}{made.workload.batch:,}", look.bold)]
        ridge = made.ridge_batch_here
        if ridge is not None and 1 <= ridge <= largest:
            text = f"{glyphs.tick}compute-bound from {ridge:,.0f}"
            marks.append((_column(ridge, largest, cells), text, look.warn))
        marks.append((cells - len(str(largest)), str(largest), look.dim))
        marks.append((0, "1", look.dim))
        taken: list[tuple[int, str, Style]] = []
        for at, text, style in marks:  # the present batch first: it must be seen
            at = max(0, min(at, cells - len(text)))
            if all(at + len(text) < other or at > other + len(word) for other, word, _ in taken):
                taken.append((at, text, style))
        line = Line(width)
        for at, text, style in sorted(taken, key=lambda mark: mark[0]):
            line.fill_to(_LABELS + at, look.text).add(text, style)
        return line.end(look.text)


def _context(made: Budget) -> int:
    """Return the tokens of each other sequence: those set, or as many as this one has."""
    return made.workload.context if made.workload.batch > 1 else made.workload.prompt


def _column(batch: float, largest: int, cells: int) -> int:
    return round(math.log(max(1.0, batch)) / math.log(largest) * (cells - 1))

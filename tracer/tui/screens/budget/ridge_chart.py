"""How long a step takes by how many sequences are in it: flat while the weights are read, rising
past the ridge."""

from __future__ import annotations

import math

from rich.segment import Segment
from rich.style import Style

from engine_hooks.protocol.stages import Stage
from tracer.analysis.budget.budget import Budget
from tracer.analysis.model.costs import Costs
from tracer.tui.toolkit import figures
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
        """Draw the step of a budget for all batches."""
        self.made = made
        self.repaint()

    def title(self) -> str:
        return "a decode step by batch"

    def note(self) -> list[Segment]:
        made, look = self.made, self.look
        if made is None:
            return []
        return [Segment(f"others hold {figures.count(self._held(made))} tokens each", look.dim)]

    @staticmethod
    def _held(made: Budget) -> int:
        """Tokens of each other sequence: those that were said, or as many as this one has."""
        workload = made.workload
        return workload.context if workload.batch > 1 else workload.prompt

    def body(self, width: int, height: int) -> list[Row]:
        made, look = self.made, self.look
        cells, rows = width - _LABELS, height - 1
        if made is None or cells < 12 or rows < 2:
            return []
        largest = max(
            LARGEST, 2 * made.workload.batch, math.ceil(min(made.ridge_batch, 100_000.0) * 1.5)
        )
        costs = Costs(
            made.model, made.device, made.efficiency, made.counting, made.tp, made.ignore_kv
        )
        batches = [largest ** (column / (cells - 1)) for column in range(cells)]
        own, others = float(made.workload.prompt), float(self._held(made))
        times = [
            float(costs.decode_step(own, batch, others).ms) + float(costs.host_ms(batch))
            for batch in batches
        ]
        top = nice_top(max(times))
        drawn: list[Row] = []
        colour = look.stage(Stage.DECODE)
        here = self._column(made.workload.batch, largest, cells)
        ridge = made.ridge_batch_here
        edge = (
            self._column(ridge, largest, cells)
            if ridge is not None and 1 <= ridge <= largest
            else cells
        )
        for number, text in enumerate(plot(times, look.glyphs.rises, rows, top)):
            scale = (
                f"{figures.milliseconds(top)} ms"
                if number == 0
                else "0"
                if number == rows - 1
                else ""
            )
            line = Line(width).put(scale.rjust(_LABELS - 1) + " ", look.dim)
            line.put(text[:here], colour).put(text[here : here + 1], look.bold).put(
                text[here + 1 :], colour
            )
            drawn.append(line.end(look.text))
        drawn.append(self._foot(width, here, edge, cells, made, largest))
        return drawn

    @staticmethod
    def _column(batch: float, largest: int, cells: int) -> int:
        return round(math.log(max(1.0, batch)) / math.log(largest) * (cells - 1))

    def _foot(
        self, width: int, here: int, edge: int, cells: int, made: Budget, largest: int
    ) -> Row:
        """The axis: 1, the present batch, the ridge, the largest."""
        look, glyphs = self.look, self.look.glyphs
        marks = [(0, "1", look.dim), (cells - len(str(largest)), str(largest), look.dim)]
        if edge < cells:
            marks.append((edge, f"{glyphs.tick}ridge {made.ridge_batch_here:,.0f}", look.warn))
        marks.append((here, f"{glyphs.up}{made.workload.batch:,}", look.bold))
        taken: list[tuple[int, str, Style]] = []
        for at, text, style in reversed(marks):  # the present batch first: it must be seen
            at = max(0, min(at, cells - len(text)))
            if all(at + len(text) < other or at > other + len(word) for other, word, _ in taken):
                taken.append((at, text, style))
        line = Line(width)
        for at, text, style in sorted(taken, key=lambda mark: mark[0]):
            line.fill_to(_LABELS + at, look.text).put(text, style)
        return line.end(look.text)

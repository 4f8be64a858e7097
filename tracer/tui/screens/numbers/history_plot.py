"""One engine over time: how long its steps took and where they stalled; its blocks and its queue.

Time fills the plot and then jumps by a quarter of it: a plot that crept by a column would send all
of itself each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.segment import Segment

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.state.metrics.numbers import Gauges, History, Numbers, Stretch
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import label
from tracer.tui.toolkit.columns import Cell, column_cells
from tracer.tui.toolkit.history import nice_top
from tracer.tui.toolkit.plot import Chart, Plot, swatches, tone
from tracer.tui.toolkit.theme import Look


class HistoryPlot(Plot):
    """What both share: the page of time."""

    empty = "no engine has made a step yet"

    def __init__(self, look: Look, id: str) -> None:
        super().__init__(look, id=id)
        self.history = History()
        self.gauges = Gauges()
        self.now_s = 0.0
        self.window_s = 60.0

    def show(self, numbers: Numbers) -> None:
        """Draw the engine's history up to now."""
        self.history, self.gauges = numbers.history, numbers.gauges
        self.now_s = (numbers.now - numbers.began) / NS_PER_S
        self.window_s = (
            numbers.window_s if math.isfinite(numbers.window_s) else max(self.now_s, 1.0)
        )
        self.repaint()

    def note(self) -> list[Segment]:
        title = self.history.title or self.history.engine
        return [Segment(label(title)[:24], self.look.dim)] if title else []

    def page(self, cells: int) -> tuple[list[list[Stretch]], float, float]:
        """The stretches of each column, the instant at which the page begins and the length of a
        column (s)."""
        grain = self.history.grain_s
        per = grain * max(1, math.ceil(min(self.window_s, max(self.now_s, grain)) / grain / cells))
        if self.now_s <= self.window_s:  # all of it, from the begin
            end = max(cells, math.floor(self.now_s / per) + 1)
        else:
            jump = max(1, cells // 4)
            end = (math.floor(self.now_s / per) // jump + 1) * jump
        first = end - cells
        columns: list[list[Stretch]] = [[] for _ in range(cells)]
        for stretch in self.history.stretches:
            at = math.floor(stretch.begin_s / per) - first
            if 0 <= at < cells:
                columns[at].append(stretch)
        return columns, first * per, per

    def ticks(self, cells: int, begin: float, per: float) -> list[tuple[int, str]]:
        """Instants below, since the trace began."""
        step = max(1, cells // 5)
        return [
            (at, figures.instant(round((begin + at * per) * NS_PER_S)))
            for at in range(0, cells - 4, step)
        ]


class StepPlot(HistoryPlot):
    """Mean step time, up to the longest above it; a mark where members waited and no step ran."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, "step-plot")

    def title(self) -> str:
        return "step time"

    def chart(self, cells: int, height: int) -> Chart | None:
        look = self.look
        if not self.history.stretches:
            return None
        columns, begin, per = self.page(cells)
        stalls = self._stalls(columns, per)
        known = [column for column in columns if column]
        middle = max((_mean(column) for column in known), default=0.0)
        top = nice_top(
            min(max((_peak(column) for column in known), default=0.0), 4 * middle) or 1.0
        )
        solid = tone(look, Stage.LM_HEAD if not look.fine else Stage.DECODE)
        quiet = tone(look, Stage.DECODE, "░", ".", quiet=True)
        drawn: list[list[Cell]] = []
        for index, column in enumerate(columns):
            parts = (
                ((_mean(column), solid), (_peak(column) - _mean(column), quiet)) if column else ()
            )
            own = column_cells(look, parts, height, top)
            if index in stalls:
                own[0] = (look.glyphs.warning, look.bad)
            drawn.append(own)
        words = self.legend()
        longest = max(
            (stretch.wait for column in columns for stretch in column if stretch.stalled),
            default=0.0,
        )
        if stalls:
            waited = f"members waited up to {figures.milliseconds(longest)} ms between steps"
            words = [Segment(f"{look.glyphs.warning} stalled: {waited}", look.bad)]
        return Chart(
            drawn, f"{top:g} ms", "0", self.ticks(cells, begin, per), words, f"{top / 2:g}"
        )

    @staticmethod
    def _stalls(columns: Sequence[Sequence[Stretch]], per: float) -> set[int]:
        """Columns in which no step ran although there were members: a stall ends with the step that
        tells of it."""
        found: set[int] = set()
        for index, column in enumerate(columns):
            for stretch in column:
                if stretch.stalled:
                    found.update(range(max(0, index - int(stretch.wait / 1000 / per)), index + 1))
        return found

    def legend(self) -> list[Segment]:
        look = self.look
        return swatches(
            look,
            [
                (tone(look, Stage.DECODE), "mean"),
                (tone(look, Stage.DECODE, "░", ".", quiet=True), "longest   no stall"),
            ],
        )


class PoolPlot(HistoryPlot):
    """Blocks that requests hold and blocks kept for reuse, as shares of all; below, on its own
    scale, the queue."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, "pool-plot")

    def title(self) -> str:
        return "KV cache and queue"

    def chart(self, cells: int, height: int) -> Chart | None:
        look = self.look
        if not self.history.stretches:
            return None
        columns, begin, per = self.page(cells)
        queue_height = max(1, height // 3)
        longest = max((stretch.waiting for column in columns for stretch in column), default=0)
        deep = float(nice_top(max(1, longest)))
        live, cached = tone(look, Stage.DECODE), tone(look, Stage.TEMPLATE, "░", ":", quiet=True)
        wait = tone(look, Stage.ADMISSION, "▒", "w")
        drawn: list[list[Cell]] = []
        used, kept, total = 0.0, 0.0, 0.0
        for index, column in enumerate(columns):
            if begin + index * per > self.now_s:
                break
            # what nothing changed is as it was
            used, kept, total = _pool(column) or (used, kept, total)
            parts = ((used / total, live), (kept / total, cached)) if total else ()
            above = column_cells(look, parts, height - queue_height, 1.0)
            most = float(max((stretch.waiting for stretch in column), default=0))
            below = column_cells(look, ((most, wait),) if most else (), queue_height, deep)
            drawn.append([*above, *below])
        words = [
            *swatches(look, [(live, "live"), (cached, "cached")]),
            *swatches(look, [(wait, f"queue, up to {figures.count(longest)}")]),
        ]
        return Chart(drawn, "100 %", "queue", self.ticks(cells, begin, per), words)


def _mean(column: Sequence[Stretch]) -> float:
    return _weighted(column, lambda stretch: stretch.step)


def _weighted(column: Sequence[Stretch], value: Callable[[Stretch], float]) -> float:
    steps = sum(stretch.steps for stretch in column)
    return sum(value(stretch) * stretch.steps for stretch in column) / steps if steps else 0.0


def _peak(column: Sequence[Stretch]) -> float:
    return max((stretch.step_max for stretch in column), default=0.0)


def _pool(column: Sequence[Stretch]) -> tuple[float, float, float] | None:
    """Blocks in use and kept at the end of a column, and all of them; None where that is not
    told."""
    for stretch in reversed(column):
        if stretch.used is not None and stretch.free is not None:
            kept = stretch.cached or 0
            return stretch.used, kept, stretch.used + kept + stretch.free
    return None

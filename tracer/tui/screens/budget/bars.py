"""The twelve stages of a budget: bars on the axis of the request, times, and what was measured."""

from __future__ import annotations

from rich.segment import Segment

from engine_hooks.protocol.stages import STAGES, Stage, StageInfo
from tracer.analysis.budget.budget import Budget
from tracer.format import figures
from tracer.state.view import RequestView
from tracer.tui.naming import short_id
from tracer.tui.screens.budget.model import modelled_view
from tracer.tui.screens.request.axis import RequestAxis, Scale, axis_of
from tracer.tui.toolkit.bar import Bars, Stretch
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

VALUE, SHARE = 11, 8
"""Cells of a time and of a share, with the cell behind."""


class BudgetBars(Panel):
    """A row for each stage. With a measured request its times stand beside, and a tick on each bar
    shows where it ended."""

    ROWS = 1 + 1 + len(STAGES)
    """Title, axis, stages: the least height."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="bars")
        self.made: Budget | None = None
        self.measured: RequestView | None = None
        self.scale = Scale.ELASTIC
        self._view: RequestView | None = None

    def show(self, made: Budget, measured: RequestView | None) -> None:
        """Draw a budget beside a measured request, if there is one."""
        if made is not self.made:
            self._view = modelled_view(made)
        self.made, self.measured = made, measured
        self.repaint()

    def title(self) -> str:
        if self.measured is None:
            return "twelve stages, modelled"
        name = short_id(self.measured.id, max(3, min(24, len(self.measured.id))))
        return f"twelve stages, modelled  {self.look.glyphs.expected} measured: {name}"

    def note(self) -> list[Segment]:
        look = self.look
        parts = [
            Segment(f"{scale.value}  ", look.bold if scale is self.scale else look.faint)
            for scale in Scale
        ]
        return [
            Segment("x ", look.accent),
            *parts[:-1],
            Segment(parts[-1].text[:-2], parts[-1].style),
        ]

    def body(self, width: int, height: int) -> list[Row]:
        made, view, look = self.made, self._view, self.look
        if made is None or view is None:
            return []
        names = 16 if width >= 64 else 13
        measured = VALUE if self.measured is not None and width >= 60 else 0
        share = SHARE if width >= 50 else 0
        bound = 46 if width >= 150 else 30 if width >= 118 else 18 if width >= 96 else 0
        cells = max(0, width - names - VALUE - share - measured - bound - 1)
        axis = axis_of(view, view.closed or 0, cells, Bars(look, cells).unit, self.scale)
        grid = [" "] * cells
        line = Line(width).add(" stage", look.dim).fill_to(names, look.dim)
        for tick in axis.ticks():
            if 0 < tick.column < cells:
                grid[tick.column] = look.glyphs.grid
            if names + tick.column >= line.used and tick.column + len(tick.label) < cells:
                line.fill_to(names + tick.column, look.dim)
                line.add(look.glyphs.tick + tick.label, look.dim)
        line.fill_to(names + cells + 1, look.dim).add(
            "measured".rjust(measured)[:measured], look.dim
        )
        line.add("ms".rjust(VALUE - 1) + " ", look.dim)
        line.add(("share".rjust(SHARE - 1) + " ")[:share], look.dim)
        line.add(" bound by"[:bound], look.dim)
        bars = Bars(look, cells, "".join(grid))
        rows: list[Row] = [line.end(look.dim)]
        for known in STAGES:
            row = self._stage(Line(width), names, bars, axis, known)
            self._values(row, made, known.stage, measured, share, bound)
            rows.append(row.end(look.text))
        if height > len(rows):
            total = Line(width).add("     total", look.dim).fill_to(names + cells + 1, look.text)
            if measured and self.measured is not None:
                text = figures.aligned_milliseconds(self.measured.e2e_ms, measured)
                total.add(text, look.dim)
            text = figures.aligned_milliseconds(made.total_ms, VALUE - 1)
            rows.append(total.add(text, look.bold).end(look.text))
        return rows[:height]

    def _stage(
        self, line: Line, names: int, bars: Bars, axis: RequestAxis, known: StageInfo
    ) -> Line:
        """Append the name and the bar of a stage."""
        look = self.look
        assert self._view is not None
        line.add(" ", look.text).add(look.fill(known.stage), look.stage(known.stage))
        line.add(f" {int(known.stage):2d} " if names >= 16 else " ", look.dim)
        line.add(known.label, look.text).fill_to(names, look.text)
        place = self._view.stages[known.stage - 1]
        begin, end = place.begin or 0, place.end or 0
        stretches: list[Stretch] = []
        tick = None
        if not axis.beyond(begin):
            stretches.append(Stretch(axis.place(begin), axis.place(end), int(known.stage)))
            measured = self._measured(known.stage)
            if measured is not None:
                until = begin + round(measured * 1e6)
                tick = bars.units if axis.beyond(until) else axis.place(until)
        drawn = bars.draw(stretches, keep_short=True, expected=tick)
        return line.add_segments(drawn, bars.width).add(" ", look.text)

    def _values(
        self, line: Line, made: Budget, stage: Stage, measured: int, share: int, bound: int
    ) -> None:
        """Append the figures of a stage and what binds it."""
        look, row = self.look, made.stage(stage)
        if measured:
            text = figures.aligned_milliseconds(self._measured(stage), measured)
            line.add(text, look.dim)
        line.add(figures.aligned_milliseconds(row.ms, VALUE - 1) + " ", look.bold)
        if share:
            line.add(f"{figures.percent(row.share)} %".rjust(share - 1) + " ", look.text)
        if bound:
            text = row.bound_by + (f": {row.detail}" if row.detail and bound >= 46 else "")
            line.add(" ", look.dim).add_text(text, look.dim, line.room)

    def _measured(self, stage: Stage) -> float | None:
        return None if self.measured is None else self.measured.stages[stage - 1].ms

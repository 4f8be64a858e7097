"""The twelve stages of a budget: bars on the axis of the request, what they take, and what was
measured."""

from __future__ import annotations

from rich.segment import Segment

from engine_hooks.protocol.stages import STAGES, Stage, StageInfo
from tracer.analysis.budget.budget import Budget
from tracer.state.view import RequestView
from tracer.tui.naming import short_id
from tracer.tui.screens.budget.desk import modelled_view
from tracer.tui.screens.request.axis import RequestAxis, Scale, axis_of
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.bar import Bars, Stretch
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look


class BudgetBars(Panel):
    """Twelve rows. With a measured request its figures stand beside, and a tick on each bar says
    where it ended."""

    ROWS = 1 + 1 + len(STAGES)
    """Title, axis, stages: what it needs at least."""

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
        text = "twelve stages, modelled"
        if self.measured is not None:
            name = short_id(
                self.measured.id, max(3, min(24, len(self.measured.id))), self.look.glyphs.ellipsis
            )
            text += f"  {self.look.glyphs.expected} measured: {name}"
        return text

    def note(self) -> list[Segment]:
        look = self.look
        parts: list[Segment] = []
        for scale in Scale:
            style = look.bold if scale is self.scale else look.faint
            parts.append(Segment(("" if not parts else "  ") + scale.value, style))
        return [Segment("x ", look.accent), *parts]

    def body(self, width: int, height: int) -> list[Row]:
        made, view = self.made, self._view
        if made is None or view is None:
            return []
        look = self.look
        names = 16 if width >= 64 else 13
        beside = 11 if self.measured is not None and width >= 60 else 0
        bound = 46 if width >= 150 else 30 if width >= 118 else 18 if width >= 96 else 0
        cells = max(0, width - names - 11 - (7 if width >= 50 else 0) - beside - bound - 1)
        bars = Bars(look, cells)
        axis = axis_of(view, view.closed or 0, cells, bars.unit, self.scale)
        grid = [" "] * cells
        ticks = axis.ticks()
        for tick in ticks:
            if 0 < tick.column < cells:
                grid[tick.column] = look.glyphs.grid
        bars = Bars(look, cells, "".join(grid))
        line = Line(width).put(" stage", look.dim).fill_to(names, look.dim)
        for tick in ticks:
            if names + tick.column >= line.used and tick.column + len(tick.label) < cells:
                line.fill_to(names + tick.column, look.dim).put(
                    look.glyphs.tick + tick.label, look.dim
                )
        line.fill_to(names + cells + 1, look.dim)
        if beside:
            line.put("measured".rjust(beside), look.dim)
        line.put("ms".rjust(10) + " ", look.dim)
        if width >= 50:
            line.put("share".rjust(6) + " ", look.dim)
        if bound:
            line.put(" bound by", look.dim)
        rows: list[Row] = [line.end(look.dim)]
        rows += [self._row(width, names, bars, axis, known, beside, bound) for known in STAGES]
        if height > len(rows):
            rows.append(self._total(width, names + cells + 1, beside))
        return rows[:height]

    def _row(
        self,
        width: int,
        names: int,
        bars: Bars,
        axis: RequestAxis,
        known: StageInfo,
        beside: int,
        bound: int,
    ) -> Row:
        look, made, view = self.look, self.made, self._view
        assert made is not None and view is not None
        row, place = made.stage(known.stage), view.stages[known.stage - 1]
        line = Line(width).put(" ", look.text).put(look.fill(known.stage), look.stage(known.stage))
        line.put(f" {int(known.stage):2d} " if names >= 16 else " ", look.dim).put(
            known.label, look.text
        )
        line.fill_to(names, look.text)
        stretches: list[Stretch] = []
        begin, end, tick = place.begin or 0, place.end or 0, None
        measured = self._measured(known.stage)
        if not axis.beyond(begin):
            stretches.append(Stretch(axis.place(begin), axis.place(end), int(known.stage)))
            if measured is not None:
                until = begin + round(measured * 1e6)
                tick = bars.units if axis.beyond(until) else axis.place(until)
        line.put_segments(bars.draw(stretches, keep_short=True, expected=tick), bars.width).put(
            " ", look.text
        )
        if beside:
            line.put(figures.aligned_milliseconds(measured, beside), look.dim)
        line.put(figures.aligned_milliseconds(row.ms, 10) + " ", look.bold)
        if width >= 50:
            line.put(f"{figures.percent(row.share)}%".rjust(6) + " ", look.text)
        if bound:
            text = row.bound_by + (f": {row.detail}" if row.detail and bound >= 46 else "")
            line.put(" ", look.dim).put_text(
                text, look.dim, line.room, ellipsis=look.glyphs.ellipsis
            )
        return line.end(look.text)

    def _measured(self, stage: Stage) -> float | None:
        return None if self.measured is None else self.measured.stages[stage - 1].ms

    def _total(self, width: int, at: int, beside: int) -> Row:
        look, made = self.look, self.made
        assert made is not None
        line = Line(width).put("     total", look.dim).fill_to(at, look.text)
        if beside:
            measured = self.measured.e2e_ms if self.measured is not None else None
            line.put(figures.aligned_milliseconds(measured, beside), look.dim)
        return line.put(figures.aligned_milliseconds(made.total_ms, 10), look.bold).end(look.text)

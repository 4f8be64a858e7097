"""The twelve stages of one request: bar, duration, share, waiting, and what bounds each."""

from __future__ import annotations

from collections.abc import Mapping

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from engine_hooks.protocol.stages import STAGES, Stage, StageInfo
from tracer.state.view import RequestView, StageView, Status
from tracer.tui.screens.request.axis import RequestAxis, Scale, axis_of
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.bar import WAIT, Bars, Stretch
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

STATUS_MARKS = {
    Status.MEASURED: " ",
    Status.ESTIMATED: "~",
    Status.UNAVAILABLE: "-",
    Status.MISSING: "?",
    Status.RUNNING: ">",
}

EXPECTED_FROM = 96
"""Columns from which expected values stand in figures beside the measured ones; the ticks are there
always."""


class StageTable(Panel):
    """Twelve rows on the request's own axis, what no stage covers, and the selected stage
    explained."""

    class Moved(Message):
        """Another stage was selected."""

    ROWS = 1 + 1 + len(STAGES)
    """Title, axis, stages: what it needs at least."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="stages")
        self.view: RequestView | None = None
        self.now = 0
        self.scale = Scale.ELASTIC
        self.selected = Stage.RECEIVE
        self.expected: Mapping[Stage, float] = {}
        """Expected ms of the stages, as far as there are any."""
        self.expected_from = ""
        """What they follow from, or why there are none."""
        self.chosen = False
        """Whether a stage was selected by hand; before that nothing is highlighted."""

    def show(
        self,
        view: RequestView,
        now: int,
        expected: Mapping[Stage, float] | None = None,
        expected_from: str = "",
    ) -> None:
        """Draw a request at an instant, with ticks and figures of what was expected of its stages
        (ms)."""
        self.view, self.now = view, now
        self.expected, self.expected_from = expected or {}, expected_from
        self.repaint()

    def select(self, stage: int) -> None:
        """Select a stage by number; out of range is ignored."""
        self.chosen = True
        self.selected = Stage(max(1, min(len(STAGES), stage)))
        self.repaint()

    def title(self) -> str:
        return "twelve stages" + (
            f"  {self.look.glyphs.expected} expected" if self.expected else ""
        )

    def note(self) -> list[Segment]:
        look = self.look
        parts: list[Segment] = []
        for scale in Scale:
            style = look.bold if scale is self.scale else look.faint
            parts.append(Segment(("" if not parts else "  ") + scale.value, style))
        return [Segment("x ", look.accent), *parts]

    def body(self, width: int, height: int) -> list[Row]:
        view = self.view
        if view is None:
            return []
        look = self.look
        names = 16 if width >= 64 else 10
        figures_cells, bound = _columns(width, self._told(width))
        bar_at = names
        bar_cells = max(0, width - names - figures_cells - bound - 2)
        bars = Bars(look, bar_cells)
        axis = axis_of(view, self.now, bar_cells, bars.unit, self.scale)
        bars = Bars(look, bar_cells, _grid(bar_cells, axis, look))
        rows: list[Row] = [self._axis_row(width, bar_at, bar_cells, bound, axis)]
        for info, stage in zip(STAGES, view.stages, strict=True):
            rows.append(self._stage_row(width, names, bars, bound, axis, info, stage))
        room = height - len(rows)
        if room >= 1:
            rows.append(self._rest_row(width, bar_at, bar_cells, view))
        if room >= 2:
            rows.extend(self._explained(width, room - 1))
        return rows[:height]

    def _told(self, width: int) -> bool:
        """Whether expected values stand in a column of their own."""
        return bool(self.expected) and width >= EXPECTED_FROM

    def _axis_row(
        self, width: int, bar_at: int, bar_cells: int, bound: int, axis: RequestAxis
    ) -> Row:
        look = self.look
        line = Line(width).put(" stage", look.dim).fill_to(bar_at, look.dim)
        for tick in axis.ticks():
            if bar_at + tick.column >= line.used and tick.column + len(tick.label) < bar_cells:
                line.fill_to(bar_at + tick.column, look.dim)
                line.put(look.glyphs.tick + tick.label, look.dim)
        line.fill_to(bar_at + bar_cells + 1, look.dim)
        line.put("ms".rjust(10) + " ", look.dim)
        if width >= 64:
            line.put("share".rjust(6), look.dim)
        if self._told(width):
            line.put("expected".rjust(10), look.dim)
        if width >= 84:
            line.put("wait".rjust(9), look.dim)
        if bound:
            line.put("  bounded by", look.dim)
        return line.end(look.dim)

    def _stage_row(
        self,
        width: int,
        names: int,
        bars: Bars,
        bound: int,
        axis: RequestAxis,
        info: StageInfo,
        stage: StageView,
    ) -> Row:
        look, palette = self.look, self.look.palette
        chosen = self.chosen and self.selected is info.stage
        back = palette.selected if chosen else palette.back
        known = stage.status in (Status.MEASURED, Status.ESTIMATED, Status.RUNNING)

        def on(style: Style) -> Style:
            return look.on(style, back, reverse=chosen) if chosen else style

        text, dim, bold = on(look.text), on(look.dim), on(look.bold)
        line = Line(width)
        line.put(look.glyphs.select if chosen else " ", on(look.accent))
        line.put(look.fill(info.stage), on(look.stage(info.stage)))
        line.put(f" {int(info.stage):2d} " if names >= 13 else " ", dim)
        line.put(info.label, text if known else dim)
        line.fill_to(names, text)
        if stage.ms is None and stage.reason:
            reason = f"{stage.status}: {stage.reason}"
            line.put_text(reason, dim, bars.width, ellipsis=look.glyphs.ellipsis)
        else:
            line.put_segments(
                self._bar(bars, axis, info.stage, stage, back if chosen else None), bars.width
            )
        pending = (
            stage.begin is None
            and not stage.reason
            and self.view is not None
            and self.view.closed is None
        )
        mark_style = look.good if stage.status is Status.RUNNING else look.warn
        line.put(" " if pending else STATUS_MARKS[stage.status], on(mark_style))
        line.put(figures.aligned_milliseconds(stage.ms, 10) + " ", bold if known else dim)
        if width >= 64:
            share = "" if stage.share is None else f"{figures.percent(stage.share)}%"
            line.put(share.rjust(6), text)
        if self._told(width):
            should = self.expected.get(info.stage)
            line.put(
                figures.aligned_milliseconds(should, 10) if should is not None else " " * 10, dim
            )
        if width >= 84:
            wait = figures.aligned_milliseconds(stage.wait_ms, 9) if stage.wait_ms else " " * 9
            line.put(wait, dim)
        if bound:
            line.put("  " + info.bounded_by, dim)
        return line.end(text)

    def _bar(
        self, bars: Bars, axis: RequestAxis, number: Stage, stage: StageView, back: str | None
    ) -> list[Segment]:
        view = self.view
        stretches: list[Stretch] = []
        if view is not None and stage.begin is not None and not axis.beyond(stage.begin):
            end = stage.end if stage.end is not None else self.now
            stretches.append(Stretch(axis.place(stage.begin), axis.place(end), int(number)))
            for segment in view.segments:
                if segment.stage is number and segment.waiting:
                    last = segment.end if segment.end is not None else self.now
                    stretches.append(
                        Stretch(axis.place(segment.begin), axis.place(last), int(number) | WAIT)
                    )
        should, tick = self.expected.get(number), None
        if should is not None and stretches:
            end = (stage.begin or 0) + round(should * 1e6)
            tick = bars.units if axis.beyond(end) else axis.place(end)
        return bars.draw(stretches, back, keep_short=True, expected=tick)

    def _rest_row(self, width: int, bar_at: int, bar_cells: int, view: RequestView) -> Row:
        look = self.look
        line = Line(width).put("     unattributed" if bar_at >= 13 else " rest", look.dim)
        line.fill_to(bar_at + bar_cells + 1, look.dim)
        line.put(figures.aligned_milliseconds(view.unattributed_ms, 10) + " ", look.dim)
        if width >= 64 and view.unattributed_ms is not None and view.e2e_ms:
            line.put(f"{figures.percent(view.unattributed_ms / view.e2e_ms)}%".rjust(6), look.dim)
        return line.end(look.dim)

    def _explained(self, width: int, rows: int) -> list[Row]:
        """The selected stage in words, and its parts."""
        view = self.view
        if view is None or not self.chosen:
            hint: Row = (
                Line(width)
                .put("  up and down explain a stage", self.look.faint)
                .end(self.look.text)
            )
            return [hint, self._legend(width)][:rows]
        look = self.look
        info, stage = STAGES[self.selected - 1], view.stages[self.selected - 1]
        first = Line(width).put(f"  {info.label}: ", look.stage(self.selected, bold=True))
        first.put(f"{info.begins} {look.glyphs.arrow} {info.ends}", look.text)
        second = Line(width).put(
            f"  {info.where}, bounded by {info.bounded_by}; worse with {info.worse}", look.dim
        )
        lines = [first, second]
        if stage.parts:
            third = Line(width).put("  of which ", look.dim)
            for index, (name, ms) in enumerate(stage.parts):
                third.put_text(("  " if index else "") + name, look.dim).put(
                    " " + figures.milliseconds(ms), look.text
                )
            lines.insert(1, third)
        should = self.expected.get(self.selected)
        if should is not None:
            fourth = (
                Line(width)
                .put("  expected ", look.dim)
                .put(f"{figures.milliseconds(should)} ms", look.text)
            )
            if stage.ms and should > 0 and stage.status is not Status.RUNNING:
                fourth.put(f", took {stage.ms / should:,.2g} times as long", look.dim)
            lines.insert(1, fourth)
        return [line.end(look.text) for line in lines[:rows]]

    def _legend(self, width: int) -> Row:
        """What the tick on the bars means, or why there is none."""
        look = self.look
        if not self.expected_from:
            return Line(width).end(look.text)
        line = Line(width)
        if self.expected:
            line.put(f"  {look.glyphs.expected} ", look.text).put("expected from ", look.faint)
        else:
            line.put("  no expected values: ", look.faint)
        line.put_text(self.expected_from, look.faint, ellipsis=look.glyphs.ellipsis)
        return line.end(look.text)

    def on_click(self, event: events.Click) -> None:
        """Select a stage."""
        if 2 <= event.y < 2 + len(STAGES):
            self.select(event.y - 1)
            self.post_message(self.Moved())


def _columns(width: int, told: bool) -> tuple[int, int]:
    """Cells for the figures (expected ones where they are `told`), and for what bounds a stage."""
    cells = 11 + (6 if width >= 64 else 0) + (9 if width >= 84 else 0) + (10 if told else 0)
    return cells, (44 if width >= 170 else 32 if width >= 130 else 0)


def _grid(cells: int, axis: RequestAxis, look: Look) -> str:
    text = [" "] * cells
    for tick in axis.ticks():
        if 0 < tick.column < cells:
            text[tick.column] = look.glyphs.grid
    return "".join(text)

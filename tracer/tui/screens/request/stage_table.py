"""The twelve stages of one request: bar, duration, share, waiting, and what bounds each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual import events

from engine_hooks.protocol.stages import STAGES, Stage, StageInfo
from tracer.format import figures
from tracer.state.view import RequestView, Status
from tracer.tui.screens.live.rows import add_ticks, grid_of, words
from tracer.tui.screens.request.axis import RequestAxis, Scale, axis_of
from tracer.tui.toolkit.bar import WAIT, Bars, Stretch
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

STATUS_MARKS = {
    Status.MEASURED: " ",
    Status.ESTIMATED: "~",
    Status.UNAVAILABLE: figures.UNKNOWN,
    Status.MISSING: "?",
    Status.RUNNING: ">",
}

EXPECTED_FROM = 96
"""Columns from which expected values stand in figures beside the measured ones; the ticks are there
always."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Cells of each column for one width; 0: not shown."""

    names: int
    bar: int
    figures: tuple[int, ...]
    """Of ms, share, expected, wait."""
    bound: int

    @classmethod
    def of(cls, width: int, *, expected: bool) -> Columns:
        wide = width >= 64
        names = 16 if wide else 14
        told = 10 if expected and width >= EXPECTED_FROM else 0
        cells = (10, 7 if wide else 0, told, 9 if width >= 84 else 0)
        bound = 44 if width >= 170 else 32 if width >= 130 else 0
        return cls(names, max(0, width - names - sum(cells) - bound - 2), cells, bound)

    def add_figures(self, line: Line, *texts: str, styles: Sequence[Style]) -> None:
        """Put ms, share, expected and wait into their columns, as far as these are shown."""
        for cells, text, style in zip(self.figures, texts, styles, strict=True):
            line.add(text.rjust(cells)[:cells], style)


class StageTable(Panel):
    """Twelve rows on the request's own axis, what no stage covers, and the selected stage
    explained."""

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
        self, view: RequestView, now: int, expected: Mapping[Stage, float], expected_from: str
    ) -> None:
        """Draw a request at an instant, with ticks and figures of what was expected of its stages
        (ms)."""
        self.view, self.now = view, now
        self.expected, self.expected_from = expected, expected_from
        self.repaint()

    def select(self, stage: int) -> None:
        """Select a stage by number, the nearest one if there is no such stage."""
        self.chosen = True
        self.selected = Stage(max(1, min(len(STAGES), stage)))
        self.repaint()

    def title(self) -> str:
        expected = f"  {self.look.glyphs.expected} expected" if self.expected else ""
        return "twelve stages" + expected

    def note(self) -> list[Segment]:
        look = self.look
        parts = [Segment("x", look.accent)]
        for scale in Scale:
            style = look.bold if scale is self.scale else look.faint
            parts += [Segment(" " if len(parts) == 1 else "  ", style), Segment(scale.value, style)]
        return parts

    def body(self, width: int, height: int) -> list[Row]:
        view, look = self.view, self.look
        if view is None:
            return []
        columns = Columns.of(width, expected=bool(self.expected))
        axis = axis_of(view, self.now, columns.bar, Bars(look, 0).unit, self.scale)
        rows: list[Row] = [self._head(width, columns, axis)]
        rows += [self._stage(width, columns, axis, view, info) for info in STAGES]
        if height > len(rows):
            rows.append(self._rest(width, columns, view))
        return [*rows, *self._explained(width, view)][:height]

    def _head(self, width: int, columns: Columns, axis: RequestAxis) -> Row:
        look = self.look
        line = Line(width).add(" stage", look.dim).fill_to(columns.names, look.dim)
        add_ticks(line, look, columns.names, columns.bar, axis.ticks())
        line.add(" ", look.dim)
        columns.add_figures(line, "ms", "share", "expected", "wait", styles=[look.dim] * 4)
        line.add("  bounded by" if columns.bound else "", look.dim)
        return line.end(look.dim)

    def _stage(
        self, width: int, columns: Columns, axis: RequestAxis, view: RequestView, info: StageInfo
    ) -> Row:
        look, stage = self.look, view.stages[info.stage - 1]
        chosen = self.chosen and self.selected is info.stage
        back = look.palette.selected if chosen else None
        known = stage.status in (Status.MEASURED, Status.ESTIMATED, Status.RUNNING)

        def on(style: Style) -> Style:
            return style if back is None else look.on(style, back, reverse=True)

        text, dim, bold = on(look.text), on(look.dim), on(look.bold)
        line = Line(width).add(look.glyphs.select if chosen else " ", on(look.accent))
        line.add(look.fill(info.stage), on(look.stage(info.stage)))
        line.add(f" {int(info.stage):2d} " if columns.names == 16 else " ", dim)
        line.add(info.label, text if known else dim).fill_to(columns.names, text)
        if stage.ms is None and stage.reason:
            reason = f"{stage.status}: {stage.reason}"
            line.add_text(reason, dim, columns.bar, ellipsis=look.glyphs.ellipsis)
        else:
            line.add_segments(self._bar(axis, view, info.stage, back), columns.bar)
        pending = stage.begin is None and not stage.reason and view.closed is None
        mark_style = look.good if stage.status is Status.RUNNING else look.warn
        line.add(" " if pending else STATUS_MARKS[stage.status], on(mark_style))
        should = self.expected.get(info.stage)
        columns.add_figures(
            line,
            figures.aligned_milliseconds(stage.ms, 10),
            "" if stage.share is None else figures.percentage(stage.share),
            "" if should is None else figures.aligned_milliseconds(should, 10),
            figures.aligned_milliseconds(stage.wait_ms, 9) if stage.wait_ms else "",
            styles=[bold if known else dim, text, dim, dim],
        )
        line.add(f"  {info.bounded_by}" if columns.bound else "", dim)
        return line.end(text)

    def _bar(
        self, axis: RequestAxis, view: RequestView, number: Stage, back: str | None
    ) -> list[Segment]:
        cells = axis.units // axis.unit
        bars = Bars(self.look, cells, grid_of(self.look, cells, axis.ticks()))
        stage = view.stages[number - 1]
        if stage.begin is None or axis.beyond(stage.begin):
            return bars.draw([], back)

        def stretch(begin: int, end: int | None, code: int) -> Stretch:
            return Stretch(axis.place(begin), axis.place(self.now if end is None else end), code)

        stretches = [stretch(stage.begin, stage.end, int(number))]
        stretches += [
            stretch(segment.begin, segment.end, int(number) | WAIT)
            for segment in view.segments
            if segment.stage is number and segment.waiting
        ]
        tick = None
        if number in self.expected:
            end = stage.begin + round(self.expected[number] * 1e6)
            tick = bars.units if axis.beyond(end) else axis.place(end)
        return bars.draw(stretches, back, keep_short=True, expected=tick)

    def _rest(self, width: int, columns: Columns, view: RequestView) -> Row:
        """Draw what no stage covers."""
        look = self.look
        name = "     unattributed" if columns.names == 16 else " rest"
        line = Line(width).add(name, look.dim).fill_to(columns.names + columns.bar + 1, look.dim)
        rest = view.unattributed_ms
        share = figures.percentage(rest / view.e2e_ms) if rest is not None and view.e2e_ms else ""
        ms = figures.aligned_milliseconds(rest, 10)
        columns.add_figures(line, ms, share, "", "", styles=[look.dim] * 4)
        return line.end(look.dim)

    def _explained(self, width: int, view: RequestView) -> list[Row]:
        """Explain the selected stage, and give its parts."""
        look, should = self.look, self.expected.get(self.selected)
        if not self.chosen:
            hint = words(look, width, "  Up and Down explain a stage", look.faint)
            return [hint, self._legend(width)]
        info, stage = STAGES[self.selected - 1], view.stages[self.selected - 1]
        line = Line(width).add(f"  {info.label}: ", look.stage(self.selected, bold=True))
        lines = [line.add(f"{info.begins} {look.glyphs.arrow} {info.ends}", look.text)]
        if should is not None:
            line = Line(width).add("  expected ", look.dim)
            line.add(f"{figures.milliseconds(should)} ms", look.text)
            if stage.ms and should > 0 and stage.status is not Status.RUNNING:
                line.add(f", took {stage.ms / should:,.2g} times as long", look.dim)
            lines.append(line)
        if stage.parts:
            line = Line(width).add("  of which", look.dim)
            for name, ms in stage.parts:
                line.add(" " if line.used == 10 else "  ", look.dim).add_text(name, look.dim)
                line.add(f" {figures.milliseconds(ms)}", look.text)
            lines.append(line)
        bound = f"  {info.where}, bounded by {info.bounded_by}; worse with {info.worse}"
        lines.append(Line(width).add(bound, look.dim))
        return [line.end(look.text) for line in lines]

    def _legend(self, width: int) -> Row:
        """Explain the tick on the bars, or why there is none."""
        look = self.look
        line = Line(width)
        if self.expected:
            line.add(f"  {look.glyphs.expected} ", look.text).add("expected from ", look.faint)
        elif self.expected_from:
            line.add("  no expected values: ", look.faint)
        line.add_text(self.expected_from, look.faint, ellipsis=look.glyphs.ellipsis)
        return line.end(look.text)

    def on_click(self, event: events.Click) -> None:
        if 2 <= event.y < 2 + len(STAGES):
            self.select(event.y - 1)

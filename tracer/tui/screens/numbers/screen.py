"""The Numbers screen: every figure over every window, split by engine, route or tenant, and what
they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget
from textual.widgets import Input

from tracer.state.metrics.numbers import DIMENSIONS, Ask, Numbers
from tracer.state.metrics.slo import SloError, parse
from tracer.tui.screens.banner import Banner
from tracer.tui.screens.base import FrameScreen, column
from tracer.tui.screens.context_strip import ContextStrip
from tracer.tui.screens.numbers.figure_table import FigureTable
from tracer.tui.screens.numbers.gauge_line import GaugeLine
from tracer.tui.screens.numbers.group_table import GroupTable
from tracer.tui.screens.numbers.history_plot import PoolPlot, StepPlot
from tracer.tui.screens.numbers.itl_plot import ItlPlot, cause_of, causes_of, scale_of
from tracer.tui.screens.numbers.prompt_plot import PromptPlot
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.line_input import LineInput, LineLabel
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.tab_line import TabLine
from tracer.tui.toolkit.theme import Look

ALL_FROM = Size(132, 34)
"""Screens at least this large show all plots; on smaller ones one at a time, chosen on the tab
line."""
EVERY = 5
"""Frames between updates: twice a second. Figures that change faster cannot be read."""


class NumbersScreen(FrameScreen):
    """See the module."""

    NAME = "Numbers"
    AUTO_FOCUS = "#figures"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "leave", "back", show=False),
        Binding("slash", "filter", "filter by engine, route or tenant", show=False),
        Binding("G", "group", "by engine, route or tenant", show=False),
        Binding("o", "objectives", "targets for latencies", show=False),
        Binding("c", "plot(1)", "next plot", show=False),
        Binding("C", "plot(-1)", "plot before", show=False),
        Binding("m", "maximise", "maximise the focused part", show=False),
        Binding("up", "move(-1)", "group before", show=False),
        Binding("down", "move(1)", "next group", show=False),
        Binding("enter", "only", "only the chosen group", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.context = ContextStrip(look)
        self.gauges = GaugeLine(look)
        self.banner = Banner(look)
        self.figures = FigureTable(look)
        self.by_batch = ItlPlot(look, "batch size", "batch-plot")
        self.by_position = ItlPlot(look, "sequence position", "position-plot")
        self.prompts = PromptPlot(look)
        self.steps = StepPlot(look)
        self.pool = PoolPlot(look)
        self.groups = GroupTable(look)
        self.parts: tuple[Panel, ...] = (
            self.by_batch, self.by_position, self.prompts, self.steps, self.pool, self.groups,
        )  # fmt: skip
        self.part = 0
        self.tabs = TabLine(
            look, ("ITL/batch", "ITL/position", "TTFT/prompt", "steps", "KV", "groups")
        )
        self.line = LineInput(look)
        self.line_label = LineLabel(look)
        self.text = ""
        self.dimension = DIMENSIONS[-1]
        self.numbers: Numbers | None = None

    def compose(self) -> ComposeResult:
        """All parts; `tiles` decides which of them are seen."""
        yield self.context
        yield self.gauges
        yield self.banner
        yield self.figures
        yield self.tabs
        yield from self.parts
        yield self.line_label
        yield self.line
        yield self.key_bar

    # --- layout

    def _all(self, size: Size) -> bool:
        return size.width >= ALL_FROM.width and size.height >= ALL_FROM.height

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """Strips on top, the table, and below it all plots in three columns or the chosen one."""
        width, height = size
        context = 1 if height >= 3 else 0
        gauges = 1 if height >= 8 else 0
        keys = 1 if height >= 5 else 0
        line = 1 if self.line.shown else 0
        banner = min(self.banner.rows, max(0, height - 6))
        top = context + gauges + banner
        main = max(1, height - top - keys - line)
        regions = column(
            0, 0, width, [(self.context, context), (self.gauges, gauges), (self.banner, banner)]
        )
        name = min(9, width // 3)
        regions.update(column(0, top + main, name, [(self.line_label, line)]))
        regions.update(column(name, top + main, width - name, [(self.line, line)]))
        regions.update(column(0, top + main + line, width, [(self.key_bar, keys)]))
        regions.update(self._main(size, top, main))
        return regions

    def _main(self, size: Size, top: int, height: int) -> dict[Widget, Region]:
        width = size.width
        maximised = self.maximised_panel
        self._edges(False)
        if maximised is not None and (maximised is self.figures or maximised in self.parts):
            return {maximised: Region(0, top, width, height)}
        if not self._all(size):
            if height < 12:
                return {self.figures: Region(0, top, width, height)}
            table = max(8, min(self.figures.wanted(width), height - max(8, height // 3) - 1))
            self._titles(False)
            rest = height - table - 1
            return column(
                0,
                top,
                width,
                [(self.figures, table), (self.tabs, 1), (self.parts[self.part], rest)],
            )
        table = min(self.figures.wanted(width), height // 2)
        regions = column(0, top, width, [(self.figures, table)])
        self._edges(True)
        rest = height - table
        upper = rest - rest // 2
        widths = [width // 3 + (width % 3 > place) for place in range(3)]
        y = top + table
        for row, parts in ((upper, self.parts[:3]), (rest - upper, self.parts[3:])):
            x = 0
            for cells, part in zip(widths, parts, strict=True):
                regions[part] = Region(x, y, cells, row)
                x += cells
            y += row
        return regions

    def _edges(self, edge: bool) -> None:
        """Lines between neighbours; the first of a row has none at its left."""
        self._titles(True)
        for place, part in enumerate(self.parts):
            part.edge = edge and place % 3 > 0
            part.first = False

    def _titles(self, titled: bool) -> None:
        for part in self.parts:
            part.titled = titled

    # --- drawing

    def draw(self) -> None:
        """One frame; most of them only keep the status right."""
        if not self.is_mounted or not self.figures.is_mounted:
            return
        app = self.tracer
        due = self.frame % EVERY == 0 or self.numbers is None
        self.frame += 1
        if not due:
            return
        ask = Ask(self.text, app.slo, (self.dimension,), (app.lens.window_s,))
        snapshot = app.lens.numbers(ask)
        numbers = self.numbers = snapshot.numbers
        status, style = app.status_of(snapshot)
        self.context.show(snapshot, status, style)
        if numbers is not None:
            before = self.figures.wanted(self.size.width)
            self.gauges.show(numbers.gauges)
            self.figures.show(numbers)
            scale = scale_of(numbers)
            ridge, cache = causes_of(numbers)
            self.by_batch.show(numbers.by_batch, scale, ridge)
            self.by_position.show(numbers.by_position, scale, cache)
            self.prompts.show(numbers.by_prompt)
            self.steps.show(numbers)
            self.pool.show(numbers)
            titles = {engine.source: engine.title for engine in snapshot.engines}
            self.groups.show(numbers, self.dimension, titles)
            if before != self.figures.wanted(self.size.width):
                self.place()
        note = self.parts[self.part].note()
        self.tabs.show(self.part, note)
        self.key_bar.show(self.keys(), self._said(numbers), news=bool(app.note_is_news))
        if self.banner.show(app.notices(snapshot)):
            self.place()

    def _said(self, numbers: Numbers | None) -> str:
        """News of the app, else what the curves say."""
        app = self.tracer
        if app.note_is_news or numbers is None:
            return app.note
        return cause_of(numbers)[0]

    def redraw(self) -> None:
        """Draw everything now."""
        self.frame = 0
        self.draw()

    def keys(self) -> Sequence[Key]:
        """Keys of the last line."""
        app = self.tracer
        keys = [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key("w", "window", "app.window"),
            Key("/", "filter", "filter", bool(self.text)),
            Key("G", f"by {self.dimension}", "group"),
            Key("o", "targets", "objectives", bool(app.slo)),
        ]
        if not self._all(self.size):
            keys.append(Key("c", "plot", "plot(1)"))
        keys += [
            Key("Tab", "focus", "app.focus_next"),
            Key("Space", "pause", "app.pause", app.lens.paused),
            Key("m", "maximise", "maximise", self.maximised_panel is not None),
            Key("q", "quit", "app.quit"),
        ]
        return keys

    # --- what the user does

    def action_leave(self) -> None:
        """Out of what is open: a maximised part, the filter, the screen."""
        if self.maximised_panel is not None:
            self.maximised_panel = None
            self.place()
        elif self.text:
            self.text = ""
            self.redraw()
        else:
            self.tracer.action_tab(1)

    def action_group(self) -> None:
        """The next dimension."""
        place = DIMENSIONS.index(self.dimension)
        self.dimension = DIMENSIONS[(place + 1) % len(DIMENSIONS)]
        self.groups.chosen = 0
        self.part = self.parts.index(self.groups)
        self.place()
        self.redraw()

    def action_plot(self, steps: int) -> None:
        """Another plot, where one is shown at a time."""
        self.part = (self.part + steps) % len(self.parts)
        if self.focused in self.parts:
            self.set_focus(self.parts[self.part])
        if self.maximised_panel in self.parts:
            self.maximised_panel = self.parts[self.part]
        self.place()

    def on_tab_line_chosen(self, message: TabLine.Chosen) -> None:
        """A plot was clicked."""
        self.part = message.index
        self.place()

    def action_move(self, rows: int) -> None:
        """Choose another group."""
        self.groups.chosen = max(0, min(self.groups.chosen + rows, len(self.groups.rows) - 1))
        self.set_focus(self.groups if self.groups.is_on_screen else self.focused)
        self.redraw()

    def action_only(self) -> None:
        """Filter by the chosen group."""
        if self.focused is self.groups and self.groups.rows:
            self.text = "" if self.text else self.groups.choice
            self.redraw()

    def action_filter(self) -> None:
        """Type what engine, route or tenant must hold."""
        self.line_label.show("filter")
        self.line.open("filter", self.text, "part of an engine, route or tenant")
        self.place()

    def action_objectives(self) -> None:
        """Type what latencies are to stay within."""
        self.line_label.show("targets")
        self.line.open(
            "targets", str(self.tracer.slo), "ttft=500ms,itl=50ms; also queue, prefill, tpot, e2e"
        )
        self.place()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self.line.purpose == "filter" and self.line.shown:
            self.text = event.value.strip()
            self.redraw()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        if self.line.purpose == "targets":
            try:
                self.tracer.slo = parse(event.value)
            except SloError as error:
                self.tracer.say(str(error), grave=True)
                return
        self._close_line()

    @on(LineInput.Cancelled)
    def _cancelled(self) -> None:
        if self.line.purpose == "filter":
            self.text = ""
        self._close_line()

    def _close_line(self) -> None:
        self.line.close()
        self.set_focus(self.figures)
        self.place()
        self.redraw()

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
from tracer.tui.screens.base import column
from tracer.tui.screens.cards import CardScreen
from tracer.tui.screens.context_strip import ContextStrip
from tracer.tui.screens.numbers.plots import ItlPlot, PoolPlot, PromptPlot, StepPlot, cause_of
from tracer.tui.screens.numbers.tables import FigureTable, GaugeLine, GroupTable, NumbersPart
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.line_input import LineInput, LineLabel
from tracer.tui.toolkit.theme import Look

EVERY = 5
"""Frames between updates: twice a second. Figures that change faster cannot be read."""


class NumbersScreen(CardScreen):
    """See the module."""

    NAME = "Numbers"
    CARDS_FROM = Size(132, 34)
    AUTO_FOCUS = "#figures"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "leave", "back", show=False),
        Binding("slash", "filter", "filter by engine, route or tenant", show=False),
        Binding("G", "group", "by engine, route or tenant", show=False),
        Binding("o", "objectives", "latency targets", show=False),
        Binding("c", "card(1)", "next plot", show=False),
        Binding("C", "card(-1)", "plot before", show=False),
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
        plots = (self.by_batch, self.by_position, self.prompts, self.steps, self.pool, self.groups)
        self.drawn: tuple[NumbersPart, ...] = (self.gauges, self.figures, *plots)
        self.hold(plots, ("ITL/batch", "ITL/position", "TTFT/prompt", "steps", "KV", "groups"))
        self.line = LineInput(look)
        self.line_label = LineLabel(look)
        self.text = ""
        self.dimension = DIMENSIONS[-1]
        self.numbers: Numbers | None = None

    def compose(self) -> ComposeResult:
        yield from (self.context, self.gauges, self.banner, self.figures, self.tabs)
        yield from self.cards
        yield from (self.line_label, self.line, self.key_bar)

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        width, height = size
        line, keys = 1 if self.line.shown else 0, 1 if height >= 5 else 0
        top = [
            (self.context, 1 if height >= 3 else 0),
            (self.gauges, 1 if height >= 8 else 0),
            (self.banner, min(self.banner.rows, max(0, height - 6))),
        ]
        above = sum(rows for _, rows in top)
        main = max(1, height - above - keys - line)
        name = min(9, width // 3)
        below = above + main
        return {
            **column(0, 0, width, top),
            **self._main(size, above, main),
            **column(0, below, name, [(self.line_label, line)]),
            **column(name, below, width - name, [(self.line, line)]),
            **column(0, below + line, width, [(self.key_bar, keys)]),
        }

    def _main(self, size: Size, top: int, height: int) -> dict[Widget, Region]:
        width, maximised = size.width, self.maximised_panel
        everything = self.all_cards(size)
        for place, plot in enumerate(self.cards):
            # lines between neighbours; the first of a row has none at its left
            plot.edge = everything and maximised is None and place % 3 > 0
            plot.titled = everything or maximised is not None
        if maximised in (self.figures, *self.cards):
            return column(0, top, width, [(maximised, height)])
        wanted = self.figures.wanted(width)
        if not everything:
            if height < 12:
                return column(0, top, width, [(self.figures, height)])
            table = max(8, min(wanted, height - max(8, height // 3) - 1))
            card = (self.cards[self.card], height - table - 1)
            return column(0, top, width, [(self.figures, table), (self.tabs, 1), card])
        table = min(wanted, height // 2)
        upper = (height - table) - (height - table) // 2
        regions = column(0, top, width, [(self.figures, table)])
        x = 0
        for place in range(3):
            cells = width // 3 + (width % 3 > place)
            pair = [(self.cards[place], upper), (self.cards[place + 3], height - table - upper)]
            regions |= column(x, top + table, cells, pair)
            x += cells
        return regions

    def draw(self) -> None:
        if not self.is_mounted or not self.figures.is_mounted:
            return
        app = self.tracer
        due = self.frame % EVERY == 0 or self.numbers is None
        self.frame += 1
        if not due:
            return
        ask = Ask(self.text, app.slo, (self.dimension,), (app.frozen.window_s,))
        snapshot = app.frozen.numbers(ask)
        self.numbers = snapshot.numbers
        self.context.show(snapshot, *app.status_of(snapshot))
        if self.numbers is not None:
            before = self.figures.wanted(self.size.width)
            self.groups.dimension = self.dimension
            self.groups.titles = {engine.source: engine.title for engine in snapshot.engines}
            for part in self.drawn:
                part.show(self.numbers)
            if before != self.figures.wanted(self.size.width):
                self.place()
        self.tabs.show(self.card, self.cards[self.card].note())
        # News of the app, else what the curves say.
        note = app.note
        if self.numbers is not None and not app.note_is_news:
            note = cause_of(self.numbers)
        self.key_bar.show(self.keys(), note, news=app.note_is_news)
        if self.banner.show(app.notices(snapshot)):
            self.place()

    def redraw(self) -> None:
        self.frame = 0
        self.draw()

    def keys(self) -> Sequence[Key]:
        app = self.tracer
        keys = [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key("w", "window", "app.window"),
            Key("/", "filter", "filter", bool(self.text)),
            Key("G", f"by {self.dimension}", "group"),
            Key("o", "targets", "objectives", bool(app.slo)),
        ]
        if not self.all_cards(self.size):
            keys.append(Key("c", "plot", "card(1)"))
        return [
            *keys,
            Key("Tab", "focus", "app.focus_next"),
            Key("Space", "pause", "app.pause", app.frozen.paused),
            Key("m", "maximise", "maximise", self.maximised_panel is not None),
            Key("q", "quit", "app.quit"),
        ]

    def leave(self) -> None:
        """Drop the filter, or go back to the list."""
        if self.text:
            self.text = ""
            self.redraw()
        else:
            self.tracer.action_tab(1)

    def action_group(self) -> None:
        place = DIMENSIONS.index(self.dimension)
        self.dimension = DIMENSIONS[(place + 1) % len(DIMENSIONS)]
        self.groups.chosen = 0
        self.card = self.cards.index(self.groups)
        self.place()
        self.redraw()

    def action_card(self, steps: int) -> None:
        """Show another plot, also where one is maximised."""
        if self.maximised_panel in self.cards:
            self.maximised_panel = self.cards[(self.card + steps) % len(self.cards)]
        super().action_card(steps)

    def action_move(self, rows: int) -> None:
        self.groups.chosen = max(0, min(self.groups.chosen + rows, len(self.groups.rows) - 1))
        self.set_focus(self.groups if self.groups.is_on_screen else self.focused)
        self.redraw()

    def action_only(self) -> None:
        """Filter by the chosen group."""
        if self.focused is self.groups and self.groups.rows:
            self.text = "" if self.text else self.groups.choice
            self.redraw()

    def action_filter(self) -> None:
        self.line_label.show("filter")
        self.line.open("filter", self.text, "part of an engine, route or tenant")
        self.place()

    def action_objectives(self) -> None:
        self.line_label.show("targets")
        example = "ttft=500ms,itl=50ms; also queue, prefill, tpot, e2e"
        self.line.open("targets", str(self.tracer.slo), example)
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
                self.tracer.report(str(error), grave=True)
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

"""The Budget screen: sliders, and what the twelve stages of such a request must take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget

from tracer.analysis.budget.budget import Budget
from tracer.analysis.errors import AnalysisError
from tracer.state.view import RequestDetail, Snapshot
from tracer.tui.listing import Query
from tracer.tui.screens.base import FrameScreen, column
from tracer.tui.screens.budget.bars import BudgetBars
from tracer.tui.screens.budget.card import BudgetCard, BudgetLine, BudgetNotes, Sentence
from tracer.tui.screens.budget.desk import WORKLOADS, Desk
from tracer.tui.screens.budget.head import BudgetHead
from tracer.tui.screens.budget.ridge_chart import RidgeChart
from tracer.tui.screens.budget.sliders import Sliders
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.theme import ASCII, Look

CHOICES_FROM = 27
"""Rows from which model and device have rows of their own."""
CARD_FROM = 76
"""Columns from which the figures stand in a card beside the sliders."""
CHART_FROM = 6
"""Rows below the bars from which the chart of batches has room."""
LOOKED_THROUGH = 50
"""Newest requests among which one that is over is looked for."""


class BudgetScreen(FrameScreen):
    """See the module. It starts from the traced engine and the request chosen on the Live screen,
    where enough is known of them; what was measured then stays beside what is modelled."""

    NAME = "Budget"
    AUTO_FOCUS = "#sliders"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", show=False),
        Binding("up", "row(-1)", "the slider above", show=False),
        Binding("down", "row(1)", "the slider below", show=False),
        Binding("left", "move(-1)", "less", show=False),
        Binding("right", "move(1)", "more", show=False),
        Binding("shift+left", "nudge(-1)", "one less", show=False),
        Binding("shift+right", "nudge(1)", "one more", show=False),
        Binding("pagedown", "move(-6)", "much less", show=False),
        Binding("pageup", "move(6)", "much more", show=False),
        Binding("home", "edge(0)", "the least", show=False),
        Binding("end", "edge(1)", "the most", show=False),
        Binding("p", "load(1)", "next load", show=False),
        Binding("P", "load(-1)", "load before", show=False),
        Binding("o", "model(1)", "next model", show=False),
        Binding("O", "model(-1)", "model before", show=False),
        Binding("d", "device(1)", "next device", show=False),
        Binding("D", "device(-1)", "device before", show=False),
        Binding("y", "roofline", "how arithmetic and memory add up", show=False),
        Binding("x", "scale", "elastic, linear or first-token axis", show=False),
        Binding("a", "traced", "as the traced engine and request", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.head = BudgetHead(look)
        self.sentence = Sentence(look)
        self.sliders = Sliders(look)
        self.card = BudgetCard(look)
        self.figures = BudgetLine(look)
        self.bars = BudgetBars(look)
        self.notes = BudgetNotes(look)
        self.chart = RidgeChart(look)
        self._drawn: object = None
        self._tried = False

    def compose(self) -> ComposeResult:
        """All parts; `tiles` decides which of them are seen."""
        yield self.head
        yield self.sentence
        yield self.sliders
        yield self.card
        yield self.figures
        yield self.bars
        yield self.notes
        yield self.chart
        yield self.key_bar

    @property
    def desk(self) -> Desk:
        """The setting, which outlives the screen."""
        return self.tracer.desk

    # --- layout

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """Head, sliders with the figures beside them, bars; on low screens the figures in one
        row."""
        width, height = size
        self.sliders.with_choices(height >= CHOICES_FROM)
        head, keys = 1 if height >= 2 else 0, 1 if height >= 5 else 0
        main = max(0, height - head - keys)
        bars = min(main, BudgetBars.ROWS + (1 if main >= 24 else 0))
        card = width >= CARD_FROM and main - bars >= 6
        sliders = min(self.sliders.rows + 1, max(0, main - bars))
        left = main - bars - sliders
        line = 0 if card or left < 1 else 1
        words = max(0, min(2, left - line))
        notes = left - line - words
        if notes < 3 or width < 50:
            words, notes = words + notes, 0
        y = head
        regions = column(0, 0, width, [(self.head, head), (self.sentence, words)])
        y += words
        if card:
            right = max(29, min(58, width * 2 // 5 if width >= 100 else 0))
            regions.update(column(0, y, width - right, [(self.sliders, sliders)]))
            regions.update(column(width - right, y, right, [(self.card, sliders)]))
        else:
            regions.update(column(0, y, width, [(self.sliders, sliders), (self.figures, line)]))
        self.card.titled = sliders > 6
        y += sliders + line
        regions.update(
            column(0, y, width, [(self.bars, bars), (self.notes, notes), (self.key_bar, keys)])
        )
        if notes >= CHART_FROM:
            chart = min(notes, 16)
            side = width * 3 // 5 if width >= 110 else width
            regions[self.chart] = Region(0, y + bars, side, chart)
            below = notes - chart
            if side < width:
                regions[self.notes] = Region(side, y + bars, width - side, notes)
            elif below >= 3:
                regions[self.notes] = Region(0, y + bars + chart, width, below)
            else:
                del regions[self.notes]
        self.notes.edge = self.notes in regions and regions[self.notes].x > 0
        return regions

    # --- drawing

    def draw(self) -> None:
        """One frame: nothing is drawn again unless the setting has changed."""
        if not self.is_mounted or not self.bars.is_mounted:
            return
        app, desk = self.tracer, self.desk
        if not self._tried and not desk.set_by_hand:
            self._tried = self._take_over()
        status, style = self._status()
        drawn = (
            desk.version,
            self.size,
            self.bars.scale,
            self.sliders.row,
            status,
            app.note,
            app.note_is_news,
        )
        if drawn != self._drawn:
            self._drawn = drawn
            self._show(desk, status, style)
        self.frame += 1

    def _status(self) -> tuple[str, Style]:
        """Nothing on this screen is measured but what says so."""
        return "modelled as traced" if self.desk.as_traced else "modelled", self.look.warn

    def _show(self, desk: Desk, status: str, style: Style) -> None:
        made: Budget | None = None
        trouble = ""
        try:
            made = desk.budget
        except AnalysisError as error:
            trouble = str(error)
        self.sentence.show(made, trouble)
        self.sliders.show(desk)
        if made is not None:
            self.head.show(made, desk.basis, status, style)
            self.card.show(made)
            self.figures.show(made)
            self.bars.show(made, desk.traced[1] if desk.traced else None)
            self.notes.show(made, desk.finding)
            if self.chart.is_on_screen:
                self.chart.show(made)
        self.key_bar.show(self.keys(), self.tracer.note, news=self.tracer.note_is_news)

    def redraw(self) -> None:
        """Draw everything now."""
        self._drawn = None
        self.draw()

    def keys(self) -> Sequence[Key]:
        """Keys of the last line."""
        arrows = "←→" if self.look.glyphs is not ASCII else "</>"
        traced = (
            [Key("a", "as traced", "traced", self.desk.as_traced)]
            if self.desk.traced is not None
            else []
        )
        return [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key(arrows, "move", "move(1)"),
            Key("p", "load", "load(1)", bool(self.desk.preset)),
            Key("o", "model", "model(1)"),
            Key("d", "device", "device(1)"),
            *traced,
            Key("x", f"axis {self.bars.scale.value}", "scale"),
            Key("y", "roofline", "roofline"),
            Key("7", "journey", "app.tab(7)"),
            Key("q", "quit", "app.quit"),
        ]

    # --- the traced engine

    def _take_over(self) -> bool:
        """Start from what is traced; whether there was an engine to look at."""
        snapshot = self.tracer.lens.snapshot(Query(limit=LOOKED_THROUGH))
        engines = [engine for engine in engines_of(snapshot) if engine.name]
        if not engines:
            return False
        detail = self._chosen(snapshot)
        source = detail.view.source if detail is not None else ""
        engine = next((each for each in engines if each.source == source), engines[0])
        if not self.desk.take(engine, detail, self.tracer.beside):
            self.tracer.note = self.tracer.beside.basis(engine).text
        return True

    def _chosen(self, snapshot: Snapshot) -> RequestDetail | None:
        """The request chosen on the Live screen, else the newest one that is over."""
        lens, chosen = self.tracer.lens, self.tracer.live.listing.chosen_id
        detail = lens.detail(chosen) if chosen is not None else None
        if detail is not None and detail.view.prompt_tokens:
            return detail
        over = (
            view for view in snapshot.requests if view.closed is not None and view.output_tokens > 0
        )
        found = next(over, None)
        return lens.detail(found.id) if found is not None else None

    # --- what the user does

    def on_sliders_changed(self, message: Sliders.Changed) -> None:
        """The mouse or a key moved one."""
        self.draw()

    def action_leave(self) -> None:
        """Back to the list."""
        self.tracer.action_tab(1)

    def action_row(self, rows: int) -> None:
        """Another slider."""
        self.sliders.select(self.sliders.row + rows)

    def action_move(self, steps: int) -> None:
        """Move it."""
        self.sliders.move(steps)

    def action_nudge(self, by: int) -> None:
        """Move it by one."""
        self.sliders.nudge(by)

    def action_edge(self, end: int) -> None:
        """To its begin or end."""
        self.sliders.to_end(float(end))

    def action_load(self, steps: int) -> None:
        """The next load that has a name."""
        names = [name for name, _ in WORKLOADS]
        at = names.index(self.desk.preset) if self.desk.preset else -1 if steps > 0 else 0
        self.desk.load(WORKLOADS[(at + steps) % len(names)][1])
        self.draw()

    def action_model(self, steps: int) -> None:
        """The next model that is known by name."""
        self.desk.next_model(steps)
        self.draw()

    def action_device(self, steps: int) -> None:
        """The next device."""
        self.desk.next_device(steps)
        self.draw()

    def action_roofline(self) -> None:
        """Another way to add up arithmetic and memory."""
        self.desk.next_roofline()
        self.draw()

    def action_scale(self) -> None:
        """The next scale of the axis."""
        self.bars.scale = self.bars.scale.next
        self.draw()

    def action_traced(self) -> None:
        """Back to what is traced."""
        if not self._take_over():
            self.tracer.say("no engine is traced here")
        elif self.desk.traced is None:
            self.tracer.say(self.tracer.note or "not enough is known of the traced engine")
        self.redraw()

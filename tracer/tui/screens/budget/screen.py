"""The Budget screen: sliders, and the times of the twelve stages that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

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
from tracer.tui.screens.budget.card import BudgetCard, BudgetHead, BudgetLine, BudgetNotes, Sentence
from tracer.tui.screens.budget.model import BudgetModel
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
SEARCHED = 50
"""Newest requests among which one that has ended is searched."""


class BudgetScreen(FrameScreen):
    """Sliders that start from the traced engine and the request chosen on the Live screen, where
    enough is known of them; measured times then stand beside the modelled ones."""

    NAME = "Budget"
    AUTO_FOCUS = "#sliders"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", show=False),
        Binding("up", "row(-1)", "previous slider", show=False),
        Binding("down", "row(1)", "next slider", show=False),
        Binding("left", "move(-1)", "less", show=False),
        Binding("right", "move(1)", "more", show=False),
        Binding("shift+left", "nudge(-1)", "less by one", show=False),
        Binding("shift+right", "nudge(1)", "more by one", show=False),
        Binding("pagedown", "move(-6)", "much less", show=False),
        Binding("pageup", "move(6)", "much more", show=False),
        Binding("home", "edge(0)", "minimum", show=False),
        Binding("end", "edge(1)", "maximum", show=False),
        Binding("p", "load(1)", "next workload", show=False),
        Binding("P", "load(-1)", "previous workload", show=False),
        Binding("o", "model(1)", "next model", show=False),
        Binding("O", "model(-1)", "previous model", show=False),
        Binding("d", "device(1)", "next device", show=False),
        Binding("D", "device(-1)", "previous device", show=False),
        Binding("y", "roofline", "how arithmetic and memory times combine", show=False),
        Binding("x", "scale", "axis: elastic, linear or first token", show=False),
        Binding("a", "traced", "back to the traced engine and request", show=False),
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
        yield from (self.head, self.sentence, self.sliders, self.card, self.figures)
        yield from (self.bars, self.notes, self.chart, self.key_bar)

    @property
    def model(self) -> BudgetModel:
        """The setting, which outlives the screen."""
        return self.tracer.budget_model

    # --- layout

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """Place sliders with the figures beside them, bars, chart and assumptions; on narrow
        screens the figures have one row."""
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
        """Draw a frame, if the setting has changed."""
        if not self.is_mounted or not self.bars.is_mounted:
            return
        app, model = self.tracer, self.model
        if not self._tried and not model.set_by_hand and model.traced is None:
            self._tried = self._adopt()
        status = "modelled as traced" if model.as_traced else "modelled"
        drawn = (
            model.version,
            self.size,
            self.bars.scale,
            self.sliders.row,
            status,
            app.note,
            app.note_is_news,
        )
        if drawn != self._drawn:
            self._drawn = drawn
            self._show(model, status)
        self.frame += 1

    def _show(self, model: BudgetModel, status: str) -> None:
        made: Budget | None = None
        trouble = ""
        try:
            made = model.budget
        except AnalysisError as error:
            trouble = str(error)
        self.sentence.show(made, trouble)
        self.sliders.show(model)
        if made is not None:
            self.head.show(made, model.basis, status, self.look.warn)
            self.card.show(made)
            self.figures.show(made)
            self.bars.show(made, model.traced[1] if model.traced else None)
            self.notes.show(made, model.finding)
            if self.chart.is_on_screen:
                self.chart.show(made)
        self.key_bar.show(self.keys(), self.tracer.note, news=self.tracer.note_is_news)

    def redraw(self) -> None:
        self._drawn = None
        self.draw()

    def keys(self) -> Sequence[Key]:
        model = self.model
        keys = [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key("</>" if self.look.glyphs is ASCII else "←→", "move", "move(1)"),
            Key("p", "workload", "load(1)", bool(model.preset)),
            Key("o", "model", "model(1)"),
            Key("d", "device", "device(1)"),
            Key("x", f"axis {self.bars.scale.value}", "scale"),
            Key("y", "roofline", "roofline"),
            Key("7", "journey", "app.tab(7)"),
            Key("q", "quit", "app.quit"),
        ]
        if model.traced is not None:
            keys.insert(6, Key("a", "as traced", "traced", model.as_traced))
        return keys

    # --- the traced engine

    def _adopt(self) -> bool:
        """Start from the traced engine; return False if none has said what it is."""
        snapshot = self.tracer.frozen.snapshot(Query(limit=SEARCHED))
        engines = [engine for engine in engines_of(snapshot) if engine.name]
        if not engines:
            return False
        detail = self._chosen(snapshot)
        source = detail.view.source if detail is not None else ""
        engine = next((each for each in engines if each.source == source), engines[0])
        if not self.model.adopt(engine, detail, self.tracer.beside):
            self.tracer.note = self.tracer.beside.basis(engine).text
        return True

    def _chosen(self, snapshot: Snapshot) -> RequestDetail | None:
        """Return the request chosen on the Live screen, else the newest one that has ended."""
        frozen, chosen = self.tracer.frozen, self.tracer.live.listing.chosen_id
        detail = frozen.detail(chosen) if chosen is not None else None
        if detail is not None and detail.view.prompt_tokens:
            return detail
        for view in snapshot.requests:
            if view.closed is not None and view.output_tokens > 0:
                return frozen.detail(view.id)
        return None

    # --- what the user does

    def on_sliders_changed(self) -> None:
        self.draw()

    def action_leave(self) -> None:
        self.tracer.action_tab(1)

    def action_row(self, rows: int) -> None:
        self.sliders.select(self.sliders.row + rows)

    def action_move(self, steps: int) -> None:
        self.sliders.move(steps)

    def action_nudge(self, by: int) -> None:
        self.sliders.nudge(by)

    def action_edge(self, end: int) -> None:
        self.sliders.place(self.sliders.dial, end)

    def action_load(self, steps: int) -> None:
        self.model.next_workload(steps)
        self.draw()

    def action_model(self, steps: int) -> None:
        self.model.next_model(steps)
        self.draw()

    def action_device(self, steps: int) -> None:
        self.model.next_device(steps)
        self.draw()

    def action_roofline(self) -> None:
        self.model.next_roofline()
        self.draw()

    def action_scale(self) -> None:
        self.bars.scale = self.bars.scale.next
        self.draw()

    def action_traced(self) -> None:
        if not self._adopt():
            self.tracer.report("no engine is traced")
        elif self.model.traced is None:
            self.tracer.report(self.tracer.note or "too little is known of the traced engine")
        self.redraw()

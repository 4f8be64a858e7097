"""Sliders: a row each, moved by keys, clicks, drags and the wheel."""

from __future__ import annotations

from rich.segment import Segment
from textual import events
from textual.message import Message

from tracer.format import figures
from tracer.format.text import cell_width
from tracer.tui.screens.budget.model import DIALS, WORKLOADS, BudgetModel, Dial
from tracer.tui.toolkit.canvas import Line, Row, label
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

CHOICES = ("model", "device")
"""Rows above the sliders that go through names, where there is room for them."""
WORKLOADS_FROM = 76
"""Columns from which all workloads stand in the title row."""
_NAMES, _VALUES = 16, 9
"""Cells of a row's name and of its number."""


class Sliders(Panel):
    """The setting of a budget. Rows are numbered from the first one that is shown."""

    pad = 1

    class Changed(Message):
        """The setting has changed."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="sliders")
        self.model: BudgetModel | None = None
        self.row = 0
        self.choices = 0
        """Rows of names shown above the sliders: all of `CHOICES`, or none."""
        self._drag: Dial | None = None

    def show(self, model: BudgetModel) -> None:
        self.model = model
        self.repaint()

    # --- rows

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(DIALS) + self.choices

    @property
    def dial(self) -> Dial | None:
        """The slider that is selected; None on a row of names."""
        return DIALS[self.row - self.choices] if self.row >= self.choices else None

    def with_choices(self, shown: bool) -> None:
        """Show or hide the rows of names; the selection stays, or goes to the first slider."""
        choices = len(CHOICES) if shown else 0
        self.row = max(0, self.row + choices - self.choices)
        self.choices = choices

    def select(self, row: int) -> None:
        """Select a row, or the one nearest to it."""
        self.row = max(0, min(self.rows - 1, row))
        self.repaint()

    def move(self, steps: int) -> None:
        """Move the selected slider by so many stops, or go to another name."""
        model, dial = self.model, self.dial
        if model is None:
            return
        if dial is not None:
            model.step(dial, steps)
        elif CHOICES[self.row] == "model":
            model.next_model(1 if steps > 0 else -1)
        else:
            model.next_device(1 if steps > 0 else -1)
        self.post_message(self.Changed())

    def nudge(self, by: int) -> None:
        """Change the selected number by so much."""
        model, dial = self.model, self.dial
        if model is None or dial is None:
            self.move(by)
            return
        model.set(dial.field, max(dial.least, min(model.most(dial), model.value(dial) + by)))
        self.post_message(self.Changed())

    def place(self, dial: Dial | None, share: float) -> None:
        """Put a slider at a share of its track (0-1)."""
        if self.model is not None and dial is not None:
            self.model.place(dial, share)
            self.post_message(self.Changed())

    # --- drawing

    def title(self) -> str:
        return "workload"

    def note(self) -> list[Segment]:
        look = self.look
        preset = self.model.preset if self.model is not None else ""
        names = [name for name, _ in WORKLOADS]
        if self.size.width < WORKLOADS_FROM:
            names = [preset or "preset"]
        parts = [
            Segment(
                name + "  " * (name is not names[-1]), look.bold if name == preset else look.dim
            )
            for name in names
        ]
        return [Segment("p ", look.accent), *parts]

    def body(self, width: int, height: int) -> list[Row]:
        model = self.model
        if model is None:
            return []
        values = (f"{model.model.name} {model.model.weight_dtype}", model.device.title)
        named = list(zip(CHOICES, values, strict=True))[: self.choices]
        rows = [
            self._choice(width, name, value, row == self.row)
            for row, (name, value) in enumerate(named)
        ]
        rows += [
            self._slider(width, dial, row == self.row, model)
            for row, dial in enumerate(DIALS, self.choices)
        ]
        return rows[:height]

    def _line(self, width: int, name: str, chosen: bool, dim: bool = False) -> Line:
        look = self.look
        style = look.accent if chosen else look.dim if dim else look.text
        if chosen and not look.palette.accent:
            style = look.style("", None, "bold reverse")
        line = Line(width).add(look.glyphs.select if chosen else " ", look.accent)
        return line.add(name.ljust(_NAMES)[:_NAMES], style)

    def _choice(self, width: int, name: str, value: str, chosen: bool) -> Row:
        look = self.look
        line = self._line(width, name, chosen)
        arrows = look.accent if chosen else look.faint
        cells = min(cell_width(label(value)), max(0, line.room - 4))
        line.add("< ", arrows).add_text(value, look.bold, cells)
        return line.add(" >", arrows).end(look.text)

    def _track(self, width: int) -> tuple[int, int]:
        """Return the first cell and the cells of a track on a row of `width`."""
        begin = 1 + _NAMES + _VALUES + 2
        return begin, max(0, width - begin - 1)

    def _slider(self, width: int, dial: Dial, chosen: bool, model: BudgetModel) -> Row:
        look, glyphs = self.look, self.look.glyphs
        idle = dial.field == "context" and model.workload.batch == 1
        line = self._line(width, dial.label, chosen, dim=idle)
        value = figures.count(model.value(dial)).rjust(_VALUES)
        line.add(value, look.dim if idle else look.bold).add("  ", look.text)
        cells = self._track(width)[1]
        if cells < 4:
            return line.end(look.text)
        place = round(model.share(dial) * (cells - 1))
        full = look.faint if idle else look.accent if chosen else look.text
        line.add(glyphs.line * place, full)
        line.add(glyphs.bullet, full if not idle else look.dim)
        line.add(glyphs.track * (cells - 1 - place), look.faint)
        return line.end(look.text)

    # --- mouse

    def _row_at(self, y: int) -> int:
        return y - self.titled

    def _hit(self, event: events.MouseEvent) -> Dial | None:
        """Select the row under the mouse and return its slider, if the mouse is on the track."""
        row = self._row_at(event.y)
        if not 0 <= row < self.rows:
            return None
        self.select(row)
        begin, cells = self._track(self.size.width - 2 * self.pad)
        return self.dial if begin - 1 <= event.x - self.pad <= begin + cells else None

    def _drag_to(self, x: int) -> None:
        begin, cells = self._track(self.size.width - 2 * self.pad)
        if cells > 1:
            self.place(self._drag, (x - self.pad - begin) / (cells - 1))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        dial = self._hit(event)
        if dial is not None and event.button == 1:
            self._drag = dial
            self.capture_mouse()
            self._drag_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._drag_to(event.x)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._drag is not None:
            self._drag = None
            self.release_mouse()

    def on_click(self, event: events.Click) -> None:
        """Choose a workload in the title row, or go on by the arrows beside model and device."""
        row = self._row_at(event.y)
        if row < 0:
            self._click_title(event.x)
        elif row < self.choices:
            self.select(row)
            self.move(-1 if event.x < self.pad + 1 + _NAMES + 2 else 1)

    def _click_title(self, x: int) -> None:
        if self.size.width < WORKLOADS_FROM or self.model is None:
            return
        at = self.size.width - 2 - sum(len(name) + 2 for name, _ in WORKLOADS) + 2
        for name, workload in WORKLOADS:
            if at <= x < at + len(name):
                self.model.load(workload)
                self.post_message(self.Changed())
            at += len(name) + 2

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        if self._hit(event) is not None:
            self.move(1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        if self._hit(event) is not None:
            self.move(-1)

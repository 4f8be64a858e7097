"""Sliders: a row each, moved by keys, clicks, drags and the wheel."""

from __future__ import annotations

from rich.segment import Segment
from textual import events
from textual.message import Message

from tracer.format.text import cell_width
from tracer.tui.screens.budget.desk import DIALS, WORKLOADS, Desk, Dial
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row, label
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

CHOICES = ("model", "device")
"""Rows above the sliders that go through names, where there is room for them."""
LOADS_FROM = 76
"""Columns from which all loads stand in the title row."""
_NAMES, _VALUES = 14, 9
"""Cells of a row's name and of its number."""


class Sliders(Panel):
    """The setting of a desk. Rows are numbered from the first one that is shown."""

    pad = 1

    class Changed(Message):
        """The setting is another one."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="sliders")
        self.desk: Desk | None = None
        self.row = 0
        self.choices = False
        """Whether model and device have rows of their own."""
        self._drag: Dial | None = None

    def show(self, desk: Desk) -> None:
        """Draw a setting."""
        self.desk = desk
        self.repaint()

    # --- rows

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(DIALS) + (len(CHOICES) if self.choices else 0)

    @property
    def dial(self) -> Dial | None:
        """The slider that is selected; None on a row of names."""
        place = self.row - (len(CHOICES) if self.choices else 0)
        return DIALS[place] if 0 <= place < len(DIALS) else None

    def with_choices(self, shown: bool) -> None:
        """Show or hide the rows of names; the selection stays on what it is on, or goes to the
        first slider."""
        if shown != self.choices:
            self.row = max(0, self.row + (len(CHOICES) if shown else -len(CHOICES)))
            self.choices = shown

    def select(self, row: int) -> None:
        """Select a row; out of range is held back."""
        self.row = max(0, min(self.rows - 1, row))
        self.repaint()

    def move(self, steps: int) -> None:
        """Move the selected slider by so many stops, or go to another name."""
        desk, dial = self.desk, self.dial
        if desk is None:
            return
        if dial is not None:
            desk.step(dial, steps)
        elif CHOICES[self.row] == "model":
            desk.next_model(1 if steps > 0 else -1)
        else:
            desk.next_device(1 if steps > 0 else -1)
        self.post_message(self.Changed())

    def nudge(self, by: int) -> None:
        """Change the selected number by so much."""
        desk, dial = self.desk, self.dial
        if desk is None or dial is None:
            self.move(by)
            return
        value = int(getattr(desk.workload, dial.field)) + by
        desk.set(dial.field, max(dial.least, min(desk.most(dial), value)))
        self.post_message(self.Changed())

    def to_end(self, end: float) -> None:
        """Put the selected slider to its begin (0) or its end (1)."""
        if self.desk is not None and self.dial is not None:
            self.desk.place(self.dial, end)
            self.post_message(self.Changed())

    # --- drawing

    def title(self) -> str:
        return "what is asked"

    def note(self) -> list[Segment]:
        look, desk = self.look, self.desk
        if self.size.width < LOADS_FROM:
            name = desk.preset if desk is not None else ""
            return [
                Segment("p ", look.accent),
                Segment(name or "load", look.bold if name else look.dim),
            ]
        parts = [Segment("p ", look.accent)]
        for index, (name, _) in enumerate(WORKLOADS):
            on = desk is not None and desk.preset == name
            parts.append(Segment(("" if not index else "  ") + name, look.bold if on else look.dim))
        return parts

    def body(self, width: int, height: int) -> list[Row]:
        desk = self.desk
        if desk is None:
            return []
        rows: list[Row] = []
        names = {
            "model": f"{desk.model.name} {desk.model.weight_dtype}",
            "device": desk.device.title,
        }
        for index in range(self.rows):
            at = index - (len(CHOICES) if self.choices else 0)
            chosen = index == self.row
            if at < 0:
                rows.append(self._choice(width, CHOICES[index], names[CHOICES[index]], chosen))
            else:
                rows.append(self._slider(width, DIALS[at], chosen, desk))
        return rows[:height]

    def _begin(self, width: int, name: str, chosen: bool, dim: bool = False) -> Line:
        look = self.look
        style = look.accent if chosen else look.dim if dim else look.text
        if chosen and not look.palette.accent:
            style = look.style("", None, "bold reverse")
        line = Line(width).put(look.glyphs.select if chosen else " ", look.accent)
        return line.put(name.ljust(_NAMES)[:_NAMES], style)

    def _choice(self, width: int, name: str, value: str, chosen: bool) -> Row:
        look = self.look
        line = self._begin(width, name, chosen)
        arrows = look.accent if chosen else look.faint
        line.put("< ", arrows).put_text(
            value, look.bold, min(cell_width(label(value)), max(0, line.room - 2))
        )
        return line.put(" >", arrows).end(look.text)

    def _track(self, width: int) -> tuple[int, int]:
        """First cell and cells of a track on a row of `width`."""
        begin = 1 + _NAMES + _VALUES + 2
        return begin, max(0, width - begin - 1)

    def _slider(self, width: int, dial: Dial, chosen: bool, desk: Desk) -> Row:
        look, glyphs = self.look, self.look.glyphs
        idle = dial.field == "context" and desk.workload.batch == 1
        line = self._begin(width, dial.label, chosen, dim=idle)
        value = int(getattr(desk.workload, dial.field))
        line.put(figures.count(value).rjust(_VALUES), look.dim if idle else look.bold).put(
            "  ", look.text
        )
        cells = self._track(width)[1]
        if cells < 4:
            return line.end(look.text)
        place = round(desk.share(dial) * (cells - 1))
        full = look.faint if idle else look.accent if chosen else look.text
        line.put(glyphs.line * place, full)
        line.put(glyphs.bullet, full if not idle else look.dim)
        line.put(glyphs.track * (cells - 1 - place), look.faint)
        return line.end(look.text)

    # --- mouse

    def _hit(self, event: events.MouseEvent) -> Dial | None:
        """Select the row under the mouse; its slider when that is on the track."""
        row = event.y - (1 if self.titled else 0)
        if not 0 <= row < self.rows:
            return None
        self.select(row)
        begin, cells = self._track(self.size.width - 2 * self.pad)
        return self.dial if begin - 1 <= event.x - self.pad <= begin + cells else None

    def _drag_to(self, dial: Dial, x: int) -> None:
        begin, cells = self._track(self.size.width - 2 * self.pad)
        if self.desk is not None and cells > 1:
            self.desk.place(dial, (x - self.pad - begin) / (cells - 1))
            self.post_message(self.Changed())

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Take hold of a slider."""
        dial = self._hit(event)
        if dial is not None and event.button == 1:
            self._drag = dial
            self.capture_mouse()
            self._drag_to(dial, event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Drag it."""
        if self._drag is not None:
            self._drag_to(self._drag, event.x)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        """Let go."""
        if self._drag is not None:
            self._drag = None
            self.release_mouse()

    def on_click(self, event: events.Click) -> None:
        """A name in the title row is a load; the arrows beside model and device go to another
        one."""
        if event.y == 0 and self.titled:
            self._click_title(event.x)
            return
        row = event.y - (1 if self.titled else 0)
        if self.choices and 0 <= row < len(CHOICES):
            self.select(row)
            self.move(-1 if event.x < self.pad + 1 + _NAMES + 2 else 1)

    def _click_title(self, x: int) -> None:
        if self.size.width < LOADS_FROM:
            return
        names = [name for name, _ in WORKLOADS]
        cells = 2 + sum(map(len, names)) + 2 * (len(names) - 1)
        at = self.size.width - cells - 2 + 2
        for name, load in WORKLOADS:
            if at <= x < at + len(name) and self.desk is not None:
                self.desk.load(load)
                self.post_message(self.Changed())
                return
            at += len(name) + 2

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """More."""
        event.stop()
        if self._hit(event) is not None:
            self.move(1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Less."""
        event.stop()
        if self._hit(event) is not None:
            self.move(-1)

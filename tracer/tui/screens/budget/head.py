"""The first line of the Budget screen: model, device and what they are taken to reach."""

from __future__ import annotations

from rich.style import Style

from tracer.analysis.budget.budget import Budget
from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.words import plain


class BudgetHead(Canvas):
    """One row: everything that qualifies the figures below, and at the right whether they are
    modelled or as traced."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="head")
        self.add_class("tile")
        self.made: Budget | None = None
        self.basis = ""
        self.status = ""
        self.status_style: Style = look.warn

    def show(self, made: Budget, basis: str, status: str, style: Style) -> None:
        """Draw what a budget is about; `basis`: what its shares of the device come from, if not
        from the device."""
        self.made, self.basis, self.status, self.status_style = made, basis, status, style
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """The row."""
        look, made = self.look, self.made
        line = Line(width).put(" ", look.text)
        if made is None:
            return [line.end(look.text)]
        room = max(0, width - len(self.status) - 3)
        tuned = made.efficiency
        count = f" {look.glyphs.times} {made.tp}" if made.tp > 1 else ""
        host = f" host {tuned.host_ms:.2g} ms" if tuned.host_ms else ""
        parts = [
            f"{made.model.name} {made.model.weight_dtype}",
            made.device.title + count,
            f"MFU {tuned.mfu:.0%} MBU {tuned.mbu:.0%}{host}",
            f"{tuned.roofline.value}, {made.counting.value}",
            self.basis,
        ]
        for index, part in enumerate(filter(None, parts)):
            text = label(plain(part, look))
            if line.used + cell_width(text) + 3 > room:
                continue
            if index:
                line.put(f" {look.glyphs.dot} ", look.faint)
            line.put_text(text, look.accent if not index else look.text)
        line.fill_to(width - len(self.status) - 1, look.text)
        return [line.put(self.status, self.status_style).end(look.text)]

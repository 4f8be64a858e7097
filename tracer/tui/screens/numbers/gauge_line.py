"""The engines now, in one row: KV blocks by what they are for, queue, batch, preemptions."""

from __future__ import annotations

from rich.style import Style

from tracer.state.metrics.numbers import Gauges
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look


class GaugeLine(Canvas):
    """Figures with their names; names shorten, then the least telling figures leave, when the row
    gets narrow."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="gauges")
        self.add_class("tile")
        self.gauges = Gauges()

    def show(self, gauges: Gauges) -> None:
        """Draw these."""
        self.gauges = gauges
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """The row."""
        look = self.look
        wide = width >= 132
        line = Line(width).put(" ", look.text)
        for name, value, more in self._items(wide):
            cells = len(name) + len(value) + len(more) + 4
            if line.room < cells:
                break
            style: Style = look.bold
            line.put(name + " ", look.accent).put(value, style).put(more + "   ", look.dim)
        return [line.end(look.text)]

    def _items(self, wide: bool) -> list[tuple[str, str, str]]:
        gauges = self.gauges

        def blocks(value: int | None) -> tuple[str, str]:
            share = gauges.share(value)
            count = f" {figures.count(value)}" if wide and value is not None else ""
            return (figures.UNKNOWN, "") if share is None else (f"{figures.percent(share)}%", count)

        def of(value: int | None, most: int | None) -> tuple[str, str]:
            return figures.count(
                value
            ), f"/{figures.count(most)}" if most is not None and value is not None else ""

        return [
            ("KV live", *blocks(gauges.live)),
            ("cached", *blocks(gauges.cached)),
            ("free", *blocks(gauges.free)),
            ("queue" if wide else "Q", figures.count(gauges.waiting), ""),
            ("running" if wide else "run", figures.count(gauges.running), ""),
            ("batch" if wide else "B", *of(gauges.batch, gauges.max_batch)),
            ("preempted" if wide else "P", figures.count(gauges.preemptions), ""),
            ("step tokens", *of(gauges.step_tokens, gauges.max_batch_tokens)),
            ("evicted", figures.count(gauges.evicted), " blocks"),
        ]

"""Engines, routes or tenants beside each other, over the chosen window."""

from __future__ import annotations

from rich.segment import Segment

from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.numbers import GroupFigures, Numbers
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

COLUMNS = (
    ("req/s", 7),
    ("TTFT p50", 9),
    ("p95", 8),
    ("ITL p50", 8),
    ("p95", 8),
    ("out/s", 7),
    ("hits", 6),
    ("good", 6),
    ("QUEUE p95", 10),
    ("E2E p50", 9),
    ("n", 6),
)
"""Heads and cells, the most telling first: what does not fit is left out."""


class GroupTable(Panel):
    """A row a group; `top` is the first that is seen."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="groups")
        self.dimension = "tenant"
        self.rows: tuple[GroupFigures, ...] = ()
        self.more = False
        self.window_s = 60.0
        self.titles: dict[str, str] = {}
        self.chosen = 0

    def show(self, numbers: Numbers | None, dimension: str, titles: dict[str, str]) -> None:
        """Draw the groups of a dimension. `titles`: names for people of engines."""
        self.dimension, self.titles = dimension, titles
        if numbers is not None:
            self.window_s = numbers.window_s
            self.rows = numbers.window(numbers.window_s).groups.get(dimension, ())
            self.more = numbers.overflow
        self.chosen = max(0, min(self.chosen, len(self.rows) - 1))
        self.repaint()

    def title(self) -> str:
        return f"by {self.dimension}"

    def note(self) -> list[Segment]:
        more = ", the rest as other" if self.more else ""
        window = figures.span(self.window_s)
        return [Segment(f"{len(self.rows)}{more}, {window}", self.look.dim)]

    @property
    def choice(self) -> str:
        """The chosen group's name."""
        return self.rows[self.chosen].name if self.rows else ""

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.rows:
            return [
                Line(width)
                .put(f"no {self.dimension} has sent a request yet", look.dim)
                .end(look.text)
            ]
        first = max(10, min(28, width // 3))
        line = Line(width).put(self.dimension.ljust(first), look.dim)
        shown = []
        for head, cells in COLUMNS:
            if line.room < cells:
                break
            shown.append(head)
            line.put(head.rjust(cells), look.dim)
        rows: list[Row] = [line.end(look.text)]
        seen = max(1, height - 1)
        top = max(0, min(self.chosen - seen // 2, len(self.rows) - seen))
        for index, group in enumerate(self.rows[top : top + seen], top):
            rows.append(
                self._row(group, width, first, len(shown), index == self.chosen and self.has_focus)
            )
        return rows

    def _row(self, group: GroupFigures, width: int, first: int, shown: int, chosen: bool) -> Row:
        look = self.look
        name = self.titles.get(group.name) or group.name or "(none)"
        mark = look.glyphs.select if chosen else " "
        line = Line(width).put(mark, look.accent)
        line.put_text(
            name, look.bold if chosen else look.text, first - 1, ellipsis=look.glyphs.ellipsis
        )
        for (_, cells), text in zip(COLUMNS[:shown], _values(group), strict=False):
            line.put(text.rjust(cells)[-cells:], look.dim if text == figures.UNKNOWN else look.text)
        return line.end(look.text)


def _values(group: GroupFigures) -> list[str]:
    figure = group.figures
    ttft, itl = figure.timers.get("ttft", Quantiles()), figure.timers.get("itl", Quantiles())
    queue, e2e = figure.timers.get("queue", Quantiles()), figure.timers.get("e2e", Quantiles())
    share = None if figure.slo is None else figure.slo.share
    return [
        figures.rate(figure.request_rate),
        figures.milliseconds(ttft.p50),
        figures.milliseconds(ttft.p95),
        figures.milliseconds(itl.p50),
        figures.milliseconds(itl.p95),
        figures.short_count(figure.tokens_out),
        _percent(figure.hit_share),
        _percent(share),
        figures.milliseconds(queue.p95),
        figures.milliseconds(e2e.p50),
        figures.short_count(ttft.count),
    ]


def _percent(share: float | None) -> str:
    return figures.UNKNOWN if share is None else f"{figures.percent(share)}%"

"""The requests that a finding touches, with what they waited for; one of them is selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from tracer.state.view import RequestView
from tracer.tui.naming import phase_text, short_id
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Finding

Ask = Callable[[str], RequestView | None]

NAMES = (("prompt", 8), ("out", 6), ("queue", 9), ("TTFT", 9), ("TPOT", 8), ("E2E", 9))
"""Columns and their cells; the later ones leave a narrow card first."""
ID, PHASE = 20, 12


class TouchedCard(Panel):
    """Ids in the order in which they were touched; the one that caused it all comes first."""

    pad = 1

    class Opened(Message):
        """A request was clicked twice."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="touched", edge=True)
        self.ids: Sequence[str] = ()
        self.culprit: str | None = None
        self.total = 0
        self.selected = 0
        self._views: dict[str, RequestView | None] = {}

    def show(self, finding: Finding | None, ask: Ask) -> None:
        """Draw the requests of a finding; `ask` tells what is known of one. Only those in sight are
        asked for."""
        culprit = finding.culprit if finding is not None else None
        ids = finding.affected if finding is not None else ()
        if culprit is not None:
            ids = (culprit, *[name for name in ids if name != culprit])
        if self.ids[:1] != ids[:1]:
            self.selected = 0
        self.ids, self.culprit = ids, culprit
        self.selected = max(0, min(self.selected, len(ids) - 1))
        self.total = finding.affected_total if finding is not None else 0
        room = max(1, self.size.height)
        top = self._top(room)
        self._views = {name: ask(name) for name in ids[top : top + room]}
        self.repaint()

    def move(self, rows: int) -> None:
        """Move the selection."""
        self.selected = max(0, min(len(self.ids) - 1, self.selected + rows))
        self.repaint()

    @property
    def current(self) -> str | None:
        """The selected id."""
        return self.ids[self.selected] if self.ids else None

    def title(self) -> str:
        return "requests"

    def note(self) -> list[Segment]:
        if not self.total:
            return []
        text = figures.count(self.total)
        if self.total > len(self.ids):
            text = f"the first {len(self.ids)} of {text}"
        return [Segment(text, self.look.dim)]

    def _top(self, height: int) -> int:
        room = max(1, height - 1)
        return max(0, min(self.selected - room + 1, len(self.ids) - room))

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.ids:
            return [Line(width).put("none by name", look.dim).end(look.text)]
        columns = [(name, cells) for place, (name, cells) in enumerate(NAMES)
                   if ID + 2 + sum(size for _, size in NAMES[: place + 1]) <= width]  # fmt: skip
        heading = Line(width).put("request".ljust(ID + 2), look.dim)
        for name, cells in columns:
            heading.put(name.rjust(cells), look.dim)
        rows: list[Row] = [heading.end(look.text)]
        top = self._top(height)
        for place, name in enumerate(self.ids[top : top + max(0, height - 1)], top):
            rows.append(self._row(width, columns, name, place == self.selected))
        return rows

    def _row(self, width: int, columns: list[tuple[str, int]], name: str, selected: bool) -> Row:
        look = self.look
        back = look.palette.selected if selected else None

        def on(style: Style) -> Style:
            return style if back is None else look.on(style, back, reverse=True)

        view = self._views.get(name)
        style = look.warn if name == self.culprit else look.text
        line = Line(width).put(look.glyphs.select if selected else " ", on(look.accent))
        line.put_text(short_id(name, ID, look.glyphs.ellipsis), on(style), ID).put(
            " ", on(look.text)
        )
        if view is None:
            line.put("not kept, or not there yet", on(look.dim))
            return line.end(on(look.text))
        values = {
            "prompt": figures.count(view.prompt_tokens),
            "out": figures.count(view.output_tokens),
            "queue": figures.milliseconds(view.queue_ms),
            "TTFT": figures.milliseconds(view.ttft_ms),
            "TPOT": figures.milliseconds(view.tpot_ms),
            "E2E": figures.milliseconds(view.e2e_ms),
        }
        for column, cells in columns:
            line.put(values[column].rjust(cells), on(look.text))
        if line.room > PHASE:
            phase, phase_style = phase_text(view, look)
            line.put("  ", on(look.text)).put_text(
                phase, on(phase_style), ellipsis=look.glyphs.ellipsis
            )
        return line.end(on(look.text))

    def on_click(self, event: events.Click) -> None:
        """Select, and open what is clicked twice."""
        row = event.y - (2 if self.titled else 1) + self._top(max(1, self.size.height - 1))
        if 0 <= row < len(self.ids):
            self.move(row - self.selected)
            if event.chain >= 2:
                self.post_message(self.Opened())

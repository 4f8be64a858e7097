"""The requests that a finding touches, with their latencies; one of them is selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from tracer.format import figures
from tracer.state.view import RequestView
from tracer.tui.naming import phase_text, short_id
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.scroll_card import SelectionPanel
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Finding

COLUMNS = {"prompt": 8, "out": 6, "queue": 9, "TTFT": 9, "TPOT": 8, "E2E": 9}
"""Headings and cells; the later ones leave a narrow card first."""
ID, PHASE = 20, 12


class TouchedCard(SelectionPanel):
    """Ids in the order in which they were touched, after the one that caused it all."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="touched", edge=True)
        self.ids: Sequence[str] = ()
        self.culprit: str | None = None
        self.total = 0
        self._views: dict[str, RequestView | None] = {}

    def show(self, finding: Finding | None, view_of: Callable[[str], RequestView | None]) -> None:
        """Draw the requests of a finding. `view_of` is called for those in sight only."""
        culprit = finding.culprit if finding is not None else None
        ids = finding.affected if finding is not None else ()
        if culprit is not None:
            ids = (culprit, *[name for name in ids if name != culprit])
        if self.ids[:1] != ids[:1]:
            self.selected = 0
        self.ids, self.culprit = ids, culprit
        self.total = finding.affected_total if finding is not None else 0
        self.select(self.selected)
        seen = self.in_sight(self.size.height)
        self._views = {ids[place]: view_of(ids[place]) for place in seen}
        self.repaint()

    @property
    def entries(self) -> int:
        return len(self.ids)

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
            text = f"first {len(self.ids)} of {text}"
        return [Segment(text, self.look.dim)]

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.ids:
            return [Line(width).add("no request is named", look.dim).end(look.text)]
        heading = Line(width).add("request".ljust(ID + 2), look.dim)
        columns: list[str] = []
        for name, cells in COLUMNS.items():
            if heading.room < cells:
                break
            columns.append(name)
            heading.add(name.rjust(cells), look.dim)
        rows: list[Row] = [heading.end(look.text)]
        rows += [self._row(width, columns, place) for place in self.in_sight(height)]
        return rows

    def _row(self, width: int, columns: Sequence[str], place: int) -> Row:
        look, name, selected = self.look, self.ids[place], place == self.selected

        def on(style: Style) -> Style:
            return self.on(style, selected)

        view = self._views.get(name)
        style = look.warn if name == self.culprit else look.text
        line = Line(width).add(look.glyphs.select if selected else " ", on(look.accent))
        line.add_text(short_id(name, ID), on(style), ID).add(" ", on(look.text))
        if view is None:
            return line.add("not in memory", on(look.dim)).end(on(look.text))
        values = {
            "prompt": figures.count(view.prompt_tokens),
            "out": figures.count(view.output_tokens),
            "queue": figures.milliseconds(view.queue_ms),
            "TTFT": figures.milliseconds(view.ttft_ms),
            "TPOT": figures.milliseconds(view.tpot_ms),
            "E2E": figures.milliseconds(view.e2e_ms),
        }
        for column in columns:
            line.add(values[column].rjust(COLUMNS[column]), on(look.text))
        if line.room > PHASE:
            phase, phase_style = phase_text(view, look)
            line.add("  ", on(look.text)).add_text(phase, on(phase_style))
        return line.end(on(look.text))

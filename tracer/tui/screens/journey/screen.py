"""The Journey screen: one request, one stage a page, for an audience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget

from tracer.analysis.errors import AnalysisError
from tracer.state.view import RequestDetail, Snapshot
from tracer.tui.listing import Query
from tracer.tui.screens.base import FrameScreen
from tracer.tui.screens.journey.data import Journey, modelled, traced
from tracer.tui.screens.journey.page import FIRST, LAST, JourneyPage
from tracer.tui.screens.request.shapes import engine_of
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.theme import ASCII, Look

LOOKED_THROUGH = 50
"""Newest requests among which one that is over is looked for."""


class JourneyScreen(FrameScreen):
    """Follows the request chosen on the Live screen (else the newest one that is over); where
    nothing is traced, or when asked for, of the one on the Budget screen."""

    NAME = "Journey"
    AUTO_FOCUS = "#page"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", show=False),
        Binding("right,down,enter,pagedown", "turn(1)", "the next stage", show=False),
        Binding("left,up,backspace,pageup", "turn(-1)", "the stage before", show=False),
        Binding("home", "turn(-100)", "to the start", show=False),
        Binding("end", "turn(100)", "to token 1 against token 2", show=False),
        Binding("o", "other", "measured or modelled", show=False),
        Binding("n", "neighbour(1)", "the next request", show=False),
        Binding("p", "neighbour(-1)", "the request before", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.page = JourneyPage(look)
        self.number = FIRST
        self.modelled = False
        """Whether the request of the Budget screen was asked for, though one is traced."""
        self.request_id: str | None = None
        self._chosen_on_list: str | None = None
        self._made: tuple[int, Journey] | None = None

    def compose(self) -> ComposeResult:
        yield self.page
        yield self.key_bar

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        width, height = size
        keys, air = 1 if height >= 5 else 0, 1 if height >= 26 else 0
        regions: dict[Widget, Region] = {
            self.page: Region(0, air, width, max(1, height - keys - air))
        }
        if keys:
            regions[self.key_bar] = Region(0, height - 1, width, 1)
        return regions

    def draw(self) -> None:
        if not self.is_mounted or not self.page.is_mounted:
            return
        app = self.tracer
        snapshot = app.frozen.snapshot(Query(limit=0))
        trouble, journey, now = "", None, snapshot.now
        try:
            journey = self._journey(snapshot)
        except AnalysisError as error:
            trouble = str(error)
        if journey is not None and journey.modelled:
            now = journey.detail.view.closed or 0
        self.page.show(journey, self.number, now, trouble)
        self.key_bar.show(self.keys(journey), app.note, news=app.note_is_news)
        self.frame += 1

    def _journey(self, snapshot: Snapshot) -> Journey:
        """Return what is shown now. Raises AnalysisError."""
        if not self.modelled:
            detail = self._detail()
            if detail is not None:
                return traced(detail, engine_of(snapshot, detail.view), self.tracer.beside)
        model = self.tracer.budget_model
        if self._made is None or self._made[0] != model.version:
            self._made = model.version, modelled(model.budget)
        return self._made[1]

    def _detail(self) -> RequestDetail | None:
        """Return the traced request: chosen here, on the list, or the newest that is over."""
        frozen, listing = self.tracer.frozen, self.tracer.live.listing
        if listing.chosen_id != self._chosen_on_list:
            self._chosen_on_list = self.request_id = listing.chosen_id
        if self.request_id is None:
            snapshot = frozen.snapshot(Query(limit=LOOKED_THROUGH))
            newest = snapshot.requests
            over = [view for view in newest if view.closed is not None and view.output_tokens > 0]
            if not newest:
                return None
            self.request_id = (over or newest)[0].id
        detail = frozen.detail(self.request_id)
        if detail is None:
            self.request_id = None
        return detail

    def keys(self, journey: Journey | None = None) -> Sequence[Key]:
        arrows = ("←", "→") if self.look.glyphs is not ASCII else ("<", ">")
        keys = [
            Key(arrows[1], "next", "turn(1)"),
            Key(arrows[0], "back", "turn(-1)"),
            Key("Esc", "leave", "leave"),
            Key("?", "help", "app.help"),
        ]
        if journey is not None and not journey.modelled:
            keys += [Key("o", "modelled", "other"), Key("n", "next request", "neighbour(1)")]
        elif self.modelled:
            keys.append(Key("o", "measured", "other", True))
        keys += [Key("5", "budget", "app.tab(5)"), Key("q", "quit", "app.quit")]
        return keys

    def action_leave(self) -> None:
        self.tracer.action_tab(1)

    def action_turn(self, pages: int) -> None:
        self.number = max(FIRST, min(LAST, self.number + pages))
        self.draw()

    def on_click(self, event: events.Click) -> None:
        """Turn on in the right half of the page, back in the left."""
        if event.screen_y < self.size.height - 1:
            self.action_turn(1 if event.screen_x >= self.size.width // 2 else -1)

    def action_other(self) -> None:
        if not self.modelled or self._detail() is not None:
            self.modelled = not self.modelled
        self.draw()

    def action_neighbour(self, steps: int) -> None:
        detail = None if self.modelled else self._detail()
        if detail is None:
            return
        found = self.tracer.live.neighbour(detail.view, steps)
        if found is None:
            self.tracer.report("that was the last one" if steps > 0 else "that was the first one")
            return
        self.request_id = found.id
        self.draw()

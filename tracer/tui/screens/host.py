"""What the screens need of the app that shows them."""

from __future__ import annotations

from typing import Protocol

from rich.style import Style
from textual.screen import Screen

from tracer.analysis.beside.beside import Beside
from tracer.monitor.monitor import Monitor
from tracer.state.metrics.slo import Slo
from tracer.state.view import RequestView, Snapshot
from tracer.tui.feed import EngineLog, Evidence, Feed, Tape, Traffic
from tracer.tui.frozen_view import FrozenView
from tracer.tui.listing import Listing
from tracer.tui.screens.banner import Notice
from tracer.tui.screens.budget.model import BudgetModel
from tracer.tui.screens.footer import Footer
from tracer.tui.toolkit.theme import Look
from tracer.tui.watch import Watch


class Choice(Protocol):
    """The Live screen, as the other screens see it: the list of requests and the one chosen in
    it."""

    listing: Listing

    def neighbour(self, view: RequestView, steps: int) -> RequestView | None: ...


class Host(Protocol):
    """The app (`tracer.tui.app.TracerApp`)."""

    feed: Feed
    frozen: FrozenView
    slo: Slo
    evidence: Evidence | None
    engine_log: EngineLog | None
    diagnosis: Watch
    monitor: Monitor | None
    traffic: Traffic | None
    tape: Tape | None
    mode: str
    note: str

    @property
    def live(self) -> Choice: ...

    @property
    def beside(self) -> Beside: ...

    @property
    def budget_model(self) -> BudgetModel: ...

    @property
    def note_is_news(self) -> bool: ...

    @property
    def screen(self) -> Screen[object]: ...

    def notices(self, snapshot: Snapshot) -> tuple[Notice, ...]: ...

    async def seek_to(self, t: int) -> bool: ...

    def new_footer(self, look: Look) -> Footer | None: ...

    def status_of(self, snapshot: Snapshot) -> tuple[str, Style]: ...

    def report(self, text: str, *, grave: bool = False) -> None: ...

    def send(self, prompt: str) -> None: ...

    def open_request(self, view: RequestView) -> None: ...

    def action_tab(self, number: int) -> None: ...

"""The Diagnosis screen: findings with stage, evidence and requests, and what to check first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget

from tracer.state.view import RequestView
from tracer.tui.listing import Query
from tracer.tui.screens.banner import Banner
from tracer.tui.screens.base import column
from tracer.tui.screens.cards import CardScreen
from tracer.tui.screens.diagnosis.exhibit_card import ExhibitCard, wanted
from tracer.tui.screens.diagnosis.finding_card import FindingCard, OpenCard
from tracer.tui.screens.diagnosis.finding_list import FindingList
from tracer.tui.screens.diagnosis.touched_card import TouchedCard
from tracer.tui.screens.diagnosis.verdict_line import VerdictLine
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.scroll_card import ScrollCard, SelectionPanel
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Finding

CARDS_EVERY = 5
"""Frames between updates of the cards while nothing new was found: only a request's figures can
have changed."""


class DiagnosisScreen(CardScreen):
    """See the module."""

    NAME = "Diagnosis"
    CARDS_FROM = Size(104, 30)
    AUTO_FOCUS = "#findings"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("enter", "open", "open the request at the time of the finding", show=False),
        Binding("e", "export", "save the evidence as a small recording", show=False),
        Binding("x", "unfold", "show or hide the thresholds used", show=False),
        Binding("c", "card(1)", "next card", show=False),
        Binding("C", "card(-1)", "previous card", show=False),
        Binding("m", "maximise", "maximise the focused part", show=False),
        Binding("escape,backspace", "leave", "back", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.verdict = VerdictLine(look)
        self.banner = Banner(look)
        self.list = FindingList(look)
        self.finding = FindingCard(look)
        self.evidence = ExhibitCard(look)
        self.touched = TouchedCard(look)
        self.open = OpenCard(look)
        self.hold(
            (self.finding, self.evidence, self.touched, self.open),
            ("finding", "evidence", "requests", "can't tell"),
        )
        self._drawn: object = None
        self._heights: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield from (self.verdict, self.banner, self.list, self.tabs, *self.cards, self.key_bar)

    # --- layout

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        width, height = size
        keys = 1 if height >= 5 else 0
        head = min(self.verdict.wanted(width), 4 if height >= 20 else 2) if height >= 8 else 1
        banner = min(self.banner.rows, max(0, height - 8))
        top = head + banner
        main = max(0, height - top - keys)
        regions = column(0, 0, width, [(self.verdict, head), (self.banner, banner)])
        regions.update(column(0, top + main, width, [(self.key_bar, keys)]))
        maximised = self.maximised_panel
        if maximised is self.list or (maximised is not None and maximised in self.cards):
            self._edge(False)
            regions[maximised] = Region(0, top, width, main)
            return regions
        rows = min(self.list.wanted(), max(3, main // 3))
        regions.update(column(0, top, width, [(self.list, rows)]))
        top, main = top + rows, main - rows
        if self.all_cards(size):
            regions.update(self._two_columns(width, top, main))
            return regions
        tabs = 1 if main >= 3 else 0
        self._edge(False, titled=not tabs)
        shown = [(self.tabs, tabs), (self.cards[self.card], main - tabs)]
        return {**regions, **column(0, top, width, shown)}

    def _two_columns(self, width: int, top: int, height: int) -> dict[Widget, Region]:
        self._edge(True)
        right = max(50, width // 2)
        left = width - right
        unknown = min(len(self.open.rows(max(1, left - 2))) + 1, max(3, height // 3))
        said = min(len(self.finding.rows(max(1, left - 2))) + 2, height - unknown)
        shown = wanted(self.list.current)
        touched = min(len(self.touched.ids) + 2, max(4, height // 3, height - shown))
        shown = min(shown, height - touched)
        regions = column(0, top, left, [(self.finding, said), (self.open, height - said)])
        regions.update(
            column(left, top, right, [(self.evidence, shown), (self.touched, height - shown)])
        )
        return regions

    def _edge(self, edge: bool, titled: bool = True) -> None:
        self.evidence.edge = self.touched.edge = edge
        self.evidence.first = edge
        for panel in self.cards:
            panel.titled = titled

    # --- drawing

    def on_screen_resume(self) -> None:
        self.tracer.diagnosis.want()
        super().on_screen_resume()

    def draw(self) -> None:
        if not self.is_mounted or not self.list.is_mounted:
            return
        app, look = self.tracer, self.look
        watch = app.diagnosis
        snapshot = app.frozen.snapshot(Query(limit=0))
        symptoms = any(entry.symptom for entry in watch.cannot_tell)
        style = look.good if watch.version else look.dim
        if watch.going_on or symptoms:
            style = look.bad
        self.verdict.show(watch.verdict, style, watch.scope, *app.status_of(snapshot))
        self.list.show(watch, "nothing is wrong" if watch.version else watch.verdict)
        seen = (watch.version, self.list.chosen, self.card, self.size)
        if seen != self._drawn or self.frame % CARDS_EVERY == 0:
            self._drawn = seen
            self._cards()
        self.tabs.show(self.card, self.cards[self.card].note())
        self.key_bar.show(self.keys(), app.note, news=app.note_is_news)
        heights = (
            self.verdict.wanted(self.size.width),
            self.list.wanted(),
            wanted(self.list.current),
            len(self.touched.ids),
            self.finding.finding,
            len(self.open.entries),
        )
        if self.banner.show(app.notices(snapshot)) or heights != self._heights:
            self._heights = heights
            self.place()
        self.frame += 1

    def _cards(self) -> None:
        watch, finding = self.tracer.diagnosis, self.list.current
        self.finding.show(finding)
        self.evidence.show(finding, watch.began, watch.present)
        self.touched.show(finding, self._view)
        self.open.show(tuple(watch.cannot_tell))

    def _view(self, request_id: str) -> RequestView | None:
        detail = self.tracer.frozen.detail(request_id)
        return None if detail is None else detail.view

    def redraw(self) -> None:
        self._drawn = None
        self.draw()

    def keys(self) -> Sequence[Key]:
        found = bool(self.list.findings)
        keys = [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key("Enter", "open", "open"),
            Key("e", "export evidence", "export"),
            Key("x", "thresholds", "unfold", self.finding.unfolded),
            Key("c", "card", "card(1)"),
            Key("Tab", "focus", "app.focus_next"),
            Key("m", "maximise", "maximise", self.maximised_panel is not None),
            Key("Space", "pause", "app.pause", self.tracer.frozen.paused),
            Key("q", "quit", "app.quit"),
        ]
        without = {
            "open": not found,
            "export": not found or self.tracer.evidence is None,
            "unfold": not found,
            "card(1)": self.all_cards(self.size),
        }
        return [key for key in keys if not without.get(key.action)]

    # --- what the user does

    def action_move(self, rows: int) -> None:
        """Scroll the focused card, or move the selection."""
        focused = self.focused
        if isinstance(focused, ScrollCard):
            focused.scroll_rows(rows)
        elif focused is self.touched:
            self.touched.select(self.touched.selected + rows)
            self._cards()
        else:
            self.list.select(self.list.selected + rows)
            self.redraw()

    def action_page(self, pages: int) -> None:
        """Move by a screenful."""
        focused = self.focused
        room = max(1, focused.size.height - 2) if focused is not None else 1
        self.action_move(pages * room)

    def action_unfold(self) -> None:
        self.finding.unfolded = not self.finding.unfolded
        self.redraw()

    def leave(self) -> None:
        self.tracer.action_tab(1)

    @on(SelectionPanel.Opened)
    def _opened(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Go to the time at which the finding starts, where that can be, and open the request: the
        selected one of those touched, else the one that caused it, else the first."""
        finding = self.list.current
        if finding is None:
            return
        names = [finding.culprit, *finding.affected]
        if self.focused is self.touched:
            names = [self.touched.current]
        going = self._go(finding, [name for name in names if name])
        self.run_worker(going, name="open", exclusive=True, exit_on_error=False)

    async def _go(self, finding: Finding, names: Sequence[str]) -> None:
        app = self.tracer
        moved = await app.seek_to(finding.start)
        if app.screen is not self:  # the user went elsewhere meanwhile
            return
        view = next((view for name in names if (view := self._view(name)) is not None), None)
        if view is not None:
            app.open_request(view)
        elif moved:
            app.action_tab(1)
        else:
            app.report(
                "its requests are no longer in memory" if names else "the finding names no request"
            )

    def action_export(self) -> None:
        finding, evidence = self.list.current, self.tracer.evidence
        if finding is None:
            return
        if evidence is None:
            self.tracer.report("no events are kept here to save")
            return

        async def write() -> None:
            self.tracer.note = await evidence.write(finding.rule, finding.start, finding.end)

        self.run_worker(write(), name="export", exit_on_error=False)

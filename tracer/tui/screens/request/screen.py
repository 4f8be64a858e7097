"""The Request screen: one journey through the twelve stages, and what the request is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget

from tracer.state.view import EngineView, RequestDetail, RequestView, Snapshot
from tracer.tui.listing import Query
from tracer.tui.screens.banner import Banner
from tracer.tui.screens.base import column, split
from tracer.tui.screens.cards import CardScreen
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.request.facts_card import DecodeCard, HoldingsCard, ShapesCard
from tracer.tui.screens.request.head import RequestHead
from tracer.tui.screens.request.itl_card import ItlCard
from tracer.tui.screens.request.stage_table import StageTable
from tracer.tui.screens.request.text_card import TextCard, facts_of
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.theme import Look

CARDS_EVERY = 3
"""Frames between updates of the cards."""


class RequestScreen(CardScreen):
    """See the module. It follows its request while it runs."""

    NAME = "Request"
    CARDS_FROM = Size(110, 34)
    AUTO_FOCUS = "#stages"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "leave", "back", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "page(-1000)", "to the top", show=False),
        Binding("end", "page(1000)", "to the end", show=False),
        Binding("left,p", "neighbour(-1)", "the request before", show=False),
        Binding("right,n", "neighbour(1)", "the next request", show=False),
        Binding("x", "scale", "elastic, linear or first-token axis", show=False),
        Binding("m", "maximise", "maximise the focused part", show=False),
        Binding("c", "card(1)", "next card", show=False),
        Binding("C", "card(-1)", "card before", show=False),
    ]

    def __init__(self, look: Look, request_id: str) -> None:
        super().__init__(look)
        self.request_id = request_id
        self.detail: RequestDetail | None = None
        self.head = RequestHead(look)
        self.banner = Banner(look)
        self.stages = StageTable(look)
        self.prompt = TextCard(look, "prompt", id="prompt")
        self.output = TextCard(look, "output", id="output", tail=True)
        self.itl = ItlCard(look)
        self.decode = DecodeCard(look)
        self.shapes = ShapesCard(look)
        self.holdings = HoldingsCard(look)
        self.hold(
            (self.prompt, self.output, self.itl, self.decode, self.shapes, self.holdings),
            ("prompt", "output", "ITL", "decode", "shapes", "blocks"),
        )

    def compose(self) -> ComposeResult:
        """All parts."""
        yield self.head
        yield self.banner
        yield self.stages
        yield self.tabs
        yield from self.cards
        yield self.key_bar

    # --- layout

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """Head, stages, and below them all cards in two columns, or the one that was chosen."""
        width, height = size
        head = 2 if height >= 12 else 1
        keys = 1 if height >= 5 else 0
        banner = min(self.banner.rows, max(0, height - 6))
        top = head + banner
        main = max(0, height - top - keys)
        regions = column(0, 0, width, [(self.head, head), (self.banner, banner)])
        regions.update(column(0, top + main, width, [(self.key_bar, keys)]))
        maximised = self.maximised_panel
        if maximised is self.stages or (maximised in self.cards and maximised is not None):
            self._edge(False)
            regions[maximised] = Region(0, top, width, main)
            return regions
        stages = (
            StageTable.ROWS
            + (1 if main >= 20 else 0)
            + (3 if main >= 34 else 1 if main >= 26 else 0)
        )
        stages = min(stages, main)
        rest = main - stages
        regions.update(column(0, top, width, [(self.stages, stages)]))
        if self.all_cards(size):
            regions.update(self._two_columns(width, top + stages, rest))
            return regions
        self._edge(False)
        if rest < 3:
            # Too low for both: the tab line alone is no use, the stages get its row.
            regions[self.stages] = Region(0, top, width, main)
            return regions
        self._edge(False, titled=False)
        regions.update(
            column(0, top + stages, width, [(self.tabs, 1), (self.cards[self.card], rest - 1)])
        )
        return regions

    def _two_columns(self, width: int, top: int, height: int) -> dict[Widget, Region]:
        self._edge(True)
        right = max(54, width * 9 // 20)
        left = width - right
        output = max(3, height // 2)
        shapes, holdings, decode = split(
            height,
            min(16, max(5, height * 3 // 10)),
            min(9, max(4, height // 5)),
            min(7, max(4, height // 6)),
        )
        itl = height - shapes - holdings - decode
        regions = column(0, top, left, [(self.prompt, height - output), (self.output, output)])
        regions.update(
            column(
                left,
                top,
                right,
                [
                    (self.itl, itl),
                    (self.decode, decode),
                    (self.shapes, shapes),
                    (self.holdings, holdings),
                ],
            )
        )
        return regions

    def _edge(self, edge: bool, titled: bool = True) -> None:
        for card in (self.itl, self.decode, self.shapes, self.holdings):
            card.edge = edge
        for panel in self.cards:
            panel.titled = titled

    # --- drawing

    def draw(self) -> None:
        """One frame."""
        if not self.is_mounted or not self.stages.is_mounted:
            return
        app = self.tracer
        snapshot = app.lens.snapshot(Query(limit=0))
        detail = app.lens.detail(self.request_id)
        status, style = app.status_of(snapshot)
        if detail is None:
            kept = self.detail
            self.head.show(kept.view if kept else None, snapshot.now, status, style,
                           f"{self.request_id} is no longer kept")  # fmt: skip
        else:
            self._show(detail, snapshot)
            self.head.show(detail.view, snapshot.now, status, style)
        self.tabs.show(self.card, self.cards[self.card].note())
        self.key_bar.show(self.keys(), app.note, news=app.note_is_news)
        if self.banner.show(app.notices(snapshot)):
            self.place()
        self.frame += 1

    def _show(self, detail: RequestDetail, snapshot: Snapshot) -> None:
        first = self.detail is None or self.detail.view.id != detail.view.id
        changed = self.detail != detail
        self.detail = detail
        view = detail.view
        engine = self._engine(snapshot, view)
        beside = self.tracer.beside
        self.stages.show(view, snapshot.now, beside.stages(engine, detail),
                         "" if engine is None else beside.basis(engine).text)  # fmt: skip
        # The last frame of a request must reach the cards too, whichever number it has.
        due = changed and (self.frame % CARDS_EVERY == 0 or view.closed is not None)
        if not first and not due:
            return
        self.prompt.show(
            detail.prompt_text,
            facts_of(view.prompt_tokens, detail.prompt_chars),
            detail.prompt_ids,
            "the prompt's text was not recorded"
            if view.prompt_tokens is not None
            else "no prompt yet",
        )
        reason = f", {view.finish_reason}" if view.finish_reason else ""
        chars = len(detail.output_text) if detail.output_text else None
        self.output.show(
            detail.output_text, facts_of(view.output_tokens, chars) + reason, (),
            "the output's text was not recorded" if view.output_tokens else "no token yet",
        )  # fmt: skip
        self.itl.show(detail.itl_ms, detail.itl_batch)
        self.decode.show(detail)
        self.shapes.show(detail, engine)
        self.holdings.show(detail, engine)

    @staticmethod
    def _engine(snapshot: Snapshot, view: RequestView) -> EngineView | None:
        engines = engines_of(snapshot)
        return next(
            (engine for engine in engines if engine.source == view.source),
            engines[0] if engines else None,
        )

    def redraw(self) -> None:
        """Draw everything now."""
        self.frame = 0
        self.draw()

    def keys(self) -> Sequence[Key]:
        """Keys of the last line."""
        keys = [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key("n", "next", "neighbour(1)"),
            Key("p", "previous", "neighbour(-1)"),
            Key("x", f"axis {self.stages.scale.value}", "scale"),
            Key("Tab", "focus", "app.focus_next"),
        ]
        if not self.all_cards(self.size):
            keys.append(Key("c", "card", "card(1)"))
        keys += [
            Key("Space", "pause", "app.pause", self.tracer.lens.paused),
            Key("m", "maximise", "maximise", self.maximised_panel is not None),
            Key("q", "quit", "app.quit"),
        ]
        return keys

    # --- what the user does

    def leave(self) -> None:
        """Go back to the list."""
        self.dismiss()

    def action_move(self, rows: int) -> None:
        """Scroll the focused text, or select a stage."""
        focused = self.focused
        if isinstance(focused, TextCard):
            focused.scroll_rows(rows)
        else:
            stages = self.stages
            stages.select(int(stages.selected) + rows if stages.chosen else 1 if rows > 0 else 12)

    def action_page(self, pages: int) -> None:
        """Scroll the focused text by its height; without one, the first or last stage."""
        focused = self.focused
        if isinstance(focused, TextCard):
            focused.scroll_rows(pages * max(1, focused.size.height - 2))
        else:
            self.stages.select(12 if pages > 0 else 1)

    def action_scale(self) -> None:
        """The next scale of the axis."""
        self.stages.scale = self.stages.scale.next
        self.redraw()

    def action_neighbour(self, steps: int) -> None:
        """The request before or after this one in the list."""
        if self.detail is None:
            return
        found = self.tracer.live.neighbour(self.detail.view, steps)
        if found is None:
            self.tracer.say("that was the last one" if steps > 0 else "that was the first one")
            return
        self.request_id = found.id
        for card in (self.prompt, self.output):
            card.top, card.held = 0, False
        self.redraw()

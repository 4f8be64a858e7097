"""The Request screen: one journey through the twelve stages, and what the request is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget

from tracer.format import figures
from tracer.format.text import cell_width
from tracer.state.view import Phase, RequestDetail, RequestView, Snapshot
from tracer.tui.listing import Query
from tracer.tui.naming import phase_text
from tracer.tui.screens.banner import Banner
from tracer.tui.screens.base import column, split
from tracer.tui.screens.cards import CardScreen
from tracer.tui.screens.request import cards
from tracer.tui.screens.request.shapes import engine_of
from tracer.tui.screens.request.stage_table import StageTable
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.theme import Look

CARDS_EVERY = 3
"""Frames between updates of the cards."""


class RequestHead(Canvas):
    """Two rows: identity and fate, then numbers."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="head")
        self.add_class("tile")
        self.view: RequestView | None = None
        self.missing = ""
        self.status = ("", look.good)
        self.now = 0

    def show(
        self, view: RequestView | None, now: int, status: tuple[str, Style], missing: str = ""
    ) -> None:
        """Draw a request, or why it is `missing`, and the status of the stream in its style."""
        self.view, self.now, self.status, self.missing = view, now, status, missing
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        look, view = self.look, self.view
        line = Line(width).add(" ", look.text)
        room = max(0, width - cell_width(label(self.status[0])) - 2)
        parts = [(self.missing, look.warn)] if view is None else self._identity(view)
        for text, style in parts:
            gap = 3 if line.used > 1 else 0
            left = room - line.used - gap
            if left < 4:
                break
            if gap:
                line.add(f" {look.glyphs.dot} ", look.faint)
            cells = min(cell_width(label(text)), left)
            line.add_text(text, style, cells, ellipsis=look.glyphs.ellipsis)
        rows: list[Row] = [self._with_status(line)]
        return rows if view is None or height < 2 else [*rows, self._numbers(view, width)]

    def _identity(self, view: RequestView) -> list[tuple[str, Style]]:
        """Return the request and its fate, the most telling first."""
        look = self.look
        failed = (view.status_code or 0) >= 400
        parts = [
            (view.id, look.accent),
            phase_text(view, look),
            (view.error, look.bad),
            ("incomplete: events were lost" if view.incomplete else "", look.warn),
            (view.route, look.text),
            ({True: "streaming", False: "not streaming", None: ""}[view.streaming], look.dim),
            (f"HTTP {view.status_code}" if view.status_code is not None else "",
             look.bad if failed else look.dim),
            ("client disconnected" if view.disconnected else "", look.warn),
        ]  # fmt: skip
        return [(text, style) for text, style in parts if text]

    def _with_status(self, line: Line) -> Row:
        status = label(self.status[0])
        if status and line.used + cell_width(status) < line.width:
            line.fill_to(line.width - cell_width(status) - 1, self.look.text)
            line.add_text(status, self.status[1])
        return line.end(self.look.text)

    def _numbers(self, view: RequestView, width: int) -> Row:
        look = self.look
        live = view.closed is None and view.phase not in (Phase.DONE, Phase.LOST)
        prompt = figures.count(view.prompt_tokens)
        if view.cached_tokens:
            share = view.cached_tokens / view.prompt_tokens if view.prompt_tokens else None
            prompt += f" ({figures.count(view.cached_tokens)} cached, {figures.percentage(share)})"
        out = figures.count(view.output_tokens)
        if live and view.max_tokens is not None:
            out += f" of {figures.count(view.max_tokens)}"
        end = self.now if view.closed is None else view.closed
        e2e = view.e2e_ms if view.e2e_ms is not None else (end - view.received) / 1e6
        items = [
            ("prompt", prompt),
            ("out", out),
            ("so far" if live else "E2E", f"{figures.milliseconds(e2e)} ms"),
            ("TTFT", figures.milliseconds(view.ttft_ms)),
            ("queue", figures.milliseconds(view.queue_ms)),
            ("TPOT", figures.milliseconds(view.tpot_ms)),
            ("batch", figures.count(view.batch)),
            ("preempted", figures.count(view.preemptions) if view.preemptions else ""),
            ("engine TTFT", figures.milliseconds(view.engine_ttft_ms)),
        ]
        line = Line(width).add(" ", look.text)
        for name, value in items:
            if not value:
                continue
            if line.room < len(name) + len(value) + 4:
                break
            line.add("   " if line.used > 1 else "", look.text)
            line.add(f"{name} ", look.dim).add(value, look.bold)
        return line.end(look.text)


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
        self.prompt = cards.PromptCard(look)
        self.output = cards.OutputCard(look)
        self.itl = cards.ItlCard(look)
        self.decode = cards.DecodeCard(look)
        self.shapes = cards.ShapesCard(look)
        self.holdings = cards.HoldingsCard(look)
        self.hold(
            (self.prompt, self.output, self.itl, self.decode, self.shapes, self.holdings),
            ("prompt", "output", "ITL", "decode", "shapes", "blocks"),
        )

    def compose(self) -> ComposeResult:
        yield self.head
        yield self.banner
        yield self.stages
        yield self.tabs
        yield from self.cards
        yield self.key_bar

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        width, height = size
        keys = 1 if height >= 5 else 0
        top = [
            (self.head, 2 if height >= 12 else 1),
            (self.banner, min(self.banner.rows, max(0, height - 6))),
        ]
        above = sum(rows for _, rows in top)
        main = max(0, height - above - keys)
        return {
            **column(0, 0, width, top),
            **self._main(size, above, main),
            **column(0, above + main, width, [(self.key_bar, keys)]),
        }

    def _main(self, size: Size, top: int, height: int) -> dict[Widget, Region]:
        width, maximised = size.width, self.maximised_panel
        explained = (height >= 20) + (3 if height >= 34 else height >= 26)
        stages = min(StageTable.ROWS + explained, height)
        rest = height - stages
        if maximised in (self.stages, *self.cards):
            self._edge(False)
            return column(0, top, width, [(maximised, height)])
        if self.all_cards(size):
            return {
                **column(0, top, width, [(self.stages, stages)]),
                **self._two_columns(width, top + stages, rest),
            }
        if rest < 3:
            # Too low for both: the tab line alone is no use, the stages get its row.
            return column(0, top, width, [(self.stages, height)])
        self._edge(False, titled=False)
        card = (self.cards[self.card], rest - 1)
        return column(0, top, width, [(self.stages, stages), (self.tabs, 1), card])

    def _two_columns(self, width: int, top: int, height: int) -> dict[Widget, Region]:
        self._edge(True)
        side = max(54, width * 9 // 20)
        output = max(3, height // 2)
        shapes, holdings, decode = split(
            height,
            min(16, max(5, height * 3 // 10)),
            min(9, max(4, height // 5)),
            min(7, max(4, height // 6)),
        )
        left = [(self.prompt, height - output), (self.output, output)]
        right = [
            (self.itl, height - shapes - holdings - decode),
            (self.decode, decode),
            (self.shapes, shapes),
            (self.holdings, holdings),
        ]
        return column(0, top, width - side, left) | column(width - side, top, side, right)

    def _edge(self, edge: bool, titled: bool = True) -> None:
        for card in (self.itl, self.decode, self.shapes, self.holdings):
            card.edge = edge
        for panel in self.cards:
            panel.titled = titled

    def draw(self) -> None:
        if not self.is_mounted or not self.stages.is_mounted:
            return
        app = self.tracer
        snapshot = app.frozen.snapshot(Query(limit=0))
        detail = app.frozen.detail(self.request_id)
        status = app.status_of(snapshot)
        if detail is None:
            view = None if self.detail is None else self.detail.view
            self.head.show(view, snapshot.now, status, f"{self.request_id} is no longer kept")
        else:
            self._show(detail, snapshot)
            self.head.show(detail.view, snapshot.now, status)
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
        engine = engine_of(snapshot, view)
        beside = self.tracer.beside
        basis = "" if engine is None else beside.basis(engine).text
        self.stages.show(view, snapshot.now, beside.stages(engine, detail), basis)
        # The last frame of a request must reach the cards too, whichever number it has.
        due = changed and (self.frame % CARDS_EVERY == 0 or view.closed is not None)
        if not first and not due:
            return
        for card in self.query(cards.RequestCard):
            card.show(detail, engine)

    def redraw(self) -> None:
        self.frame = 0
        self.draw()

    def keys(self) -> Sequence[Key]:
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
            Key("Space", "pause", "app.pause", self.tracer.frozen.paused),
            Key("m", "maximise", "maximise", self.maximised_panel is not None),
            Key("q", "quit", "app.quit"),
        ]
        return keys

    def leave(self) -> None:
        self.dismiss()

    def action_move(self, rows: int) -> None:
        focused = self.focused
        if isinstance(focused, cards.TextCard):
            focused.scroll_rows(rows)
        else:
            stages = self.stages
            stages.select(int(stages.selected) + rows if stages.chosen else 1 if rows > 0 else 12)

    def action_page(self, pages: int) -> None:
        focused = self.focused
        if isinstance(focused, cards.TextCard):
            focused.scroll_rows(pages * max(1, focused.size.height - 2))
        else:
            self.stages.select(12 if pages > 0 else 1)

    def action_scale(self) -> None:
        self.stages.scale = self.stages.scale.next
        self.redraw()

    def action_neighbour(self, steps: int) -> None:
        if self.detail is None:
            return
        found = self.tracer.live.neighbour(self.detail.view, steps)
        if found is None:
            self.tracer.report("that was the last one" if steps > 0 else "that was the first one")
            return
        self.request_id = found.id
        for card in (self.prompt, self.output):
            card.top, card.held = 0, False
        self.redraw()

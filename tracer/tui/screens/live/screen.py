"""The Live screen: what the figures are about, the nine numbers, a bar for each request, and the
three panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget
from textual.widgets import Input

from tracer.state.view import EngineView, RequestView, Snapshot
from tracer.tui.listing import SORTS, Listing, Query
from tracer.tui.screens.banner import Banner
from tracer.tui.screens.base import FrameScreen, column, split
from tracer.tui.screens.context_strip import ContextStrip, engines_of
from tracer.tui.screens.live.batch_panel import BatchPanel
from tracer.tui.screens.live.device_strip import DeviceStrip
from tracer.tui.screens.live.kv_panel import KvPanel
from tracer.tui.screens.live.log_pane import LogPane
from tracer.tui.screens.live.numbers_strip import NumbersStrip
from tracer.tui.screens.live.queue_panel import QueuePanel
from tracer.tui.screens.live.waterfall import Waterfall
from tracer.tui.screens.tabs import DIAGNOSIS_TAB
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.line_input import LineInput, LineLabel
from tracer.tui.toolkit.theme import Look

PANELS_FROM = 116
"""Columns from which the panels stand beside the list unasked."""
NUMBERS_EVERY, PANELS_EVERY, MAP_EVERY = 3, 5, 5
"""Frames between updates: figures that change ten times a second cannot be read, and cost bytes."""
DEVICE_FROM = 30
"""Rows from which there is one for the device."""
TICKS_KEPT = 4_000
"""Requests of which the expected value is remembered."""


class LiveScreen(FrameScreen):
    """See the module. The list has the focus at the start; Tab goes to the panels."""

    NAME = "Live"
    AUTO_FOCUS = "#waterfall"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "page up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "page down", show=False),
        Binding("home,g", "first", "first", show=False),
        Binding("end,G", "last", "newest", show=False),
        Binding("enter", "open", "open the request", show=False),
        Binding("f", "follow", "follow the newest", show=False),
        Binding("s", "sort", "sort by the next column", show=False),
        Binding("S", "flip", "reverse the order", show=False),
        Binding("slash", "filter", "filter", show=False),
        Binding("a", "live_only", "only live requests", show=False),
        Binding("m", "maximise", "maximise the focused panel", show=False),
        Binding("v", "panels", "panels on or off", show=False),
        Binding("l", "log", "engine log", show=False),
        Binding("left_square_bracket", "zoom(-1)", "shorter time axis", show=False),
        Binding("right_square_bracket", "zoom(1)", "longer time axis", show=False),
        Binding("0", "zoom(0)", "fit the time axis", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, look: Look, title: str = "") -> None:
        super().__init__(look)
        self.listing = Listing()
        self.context = ContextStrip(look, title)
        self.numbers = NumbersStrip(look)
        self.device = DeviceStrip(look)
        self.banner = Banner(look)
        self.waterfall = Waterfall(look, self.listing)
        self.kv = KvPanel(look)
        self.batch_panel = BatchPanel(look)
        self.queue = QueuePanel(look)
        self.log_pane = LogPane(look)
        self.line = LineInput(look)
        self.line_label = LineLabel(look)
        self.panels = (self.kv, self.batch_panel, self.queue)
        self.log_shown = False
        self.panels_wanted: bool | None = None
        self.snapshot: Snapshot | None = None
        self._ticks: dict[tuple[tuple[str, int], bool], float | None] = {}
        """ms at which the bars of requests carry their tick, by key and whether they are live."""

    def compose(self) -> ComposeResult:
        yield from (self.context, self.numbers, self.device, self.banner, self.waterfall)
        yield from self.panels
        yield from (self.log_pane, self.line_label, self.line, self.key_bar)

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        width, height = size
        line = 1 if self.line.shown else 0
        log = max(4, min(14, height // 3)) if self.log_shown and height >= 12 else 0
        top = [
            (self.context, 1 if height >= 3 else 0),
            (self.numbers, 2 if height >= 16 else 1 if height >= 7 else 0),
            (self.device, 1 if height >= DEVICE_FROM and self.device.known else 0),
            (self.banner, min(self.banner.rows, max(0, height - 4))),
        ]
        keys = 1 if height >= 5 else 0
        above = sum(rows for _, rows in top)
        main = max(1, height - above - log - line - keys)
        label = min(8, width // 3)
        below = above + main + log
        return {
            **column(0, 0, width, top),
            **self._main(width, above, main),
            **column(0, above + main, width, [(self.log_pane, log)]),
            **column(0, below, label, [(self.line_label, line)]),
            **column(label, below, width - label, [(self.line, line)]),
            **column(0, below + line, width, [(self.key_bar, keys)]),
        }

    def _main(self, width: int, top: int, height: int) -> dict[Widget, Region]:
        maximised = self.maximised_panel
        beside = width >= PANELS_FROM and self.panels_wanted is not False and height >= 10
        for panel in self.panels:
            panel.whole = maximised is panel
            panel.edge = beside and maximised is None
        if maximised in (*self.panels, self.waterfall):
            return column(0, top, width, [(maximised, height)])
        if beside:
            side = max(40, min(64, width * 3 // 10))
            return {
                **column(0, top, width - side, [(self.waterfall, height)]),
                **column(width - side, top, side, self._panels(side, height)),
            }
        if self.panels_wanted and width < PANELS_FROM:
            return column(0, top, width, self._panels(width, height))
        return column(0, top, width, [(self.waterfall, height)])

    def _panels(self, width: int, height: int) -> list[tuple[Widget, int]]:
        """Return the panels with their rows: the map takes what it needs up to a limit, the batch's
        charts take the rest."""
        kv = min(self.kv.wanted(width), max(5, height * 2 // 5))
        kv, queue = split(height, kv, max(3, min(14, height // 4)))
        batch = min(24, height - kv - queue)
        return [(self.kv, kv), (self.batch_panel, batch), (self.queue, height - kv - batch)]

    def draw(self) -> None:
        app = self.tracer
        if not self.is_mounted or not self.waterfall.is_mounted:
            return
        self.listing.height = self.waterfall.visible_rows
        first = self.snapshot is None
        snapshot = self.snapshot = self._moved_on() or self._asked()
        if not first:  # the first paint does not wait for the model
            self._expect(snapshot)
        self.waterfall.show(snapshot, self._waiting_text(snapshot), None if first else self.frame)
        self.context.show(snapshot, *app.status_of(snapshot))
        if first or self.frame % NUMBERS_EVERY == 0:
            self.numbers.show(snapshot)
            hardware = app.monitor.hardware if app.monitor is not None else None
            if hardware is not None and self.device.show(
                hardware.reading(app.feed.state, snapshot.now)
            ):
                self.place()
        if self.batch_panel.is_on_screen and (first or self.frame % PANELS_EVERY == 1):
            members = self._largest("step", self.batch_panel.members_wanted)
            self.batch_panel.show(snapshot, None if first else self._ridge, members)
            self.queue.show(snapshot)
        if self.kv.is_on_screen and (first or self.frame % MAP_EVERY == 2):
            chosen = self.listing.chosen_id
            detail = None if chosen is None else app.frozen.detail(chosen)
            if self.kv.show(snapshot, detail, self._largest("blocks", self.kv.holders_wanted)):
                self.place()
        if self.log_shown and app.engine_log is not None:
            self.log_pane.show(app.engine_log.lines, app.engine_log.path)
        self.key_bar.show(self.keys(), app.note, news=app.note_is_news)
        if self.banner.show(app.notices(snapshot)):
            self.place()
        self.frame += 1

    def _expect(self, snapshot: Snapshot) -> None:
        """Let bars carry a tick: of a request that is over, where the model expects its end; of a
        live one, where it expects the first token, which stands still while the bar grows."""
        engines, beside = engines_of(snapshot), self.tracer.beside
        known = {engine.source: engine for engine in engines if beside.basis(engine).known}
        main = next(iter(known.values()), None)

        def expected(view: RequestView) -> float | None:
            engine = known.get(view.source, main)
            key = (view.key, view.closed is None)
            if key not in self._ticks:
                if not view.prompt_tokens:
                    return None
                if len(self._ticks) > TICKS_KEPT:
                    self._ticks.clear()
                if view.closed is None:
                    self._ticks[key] = beside.first_ms(engine, view)
                else:
                    detail = self.tracer.frozen.detail(view.id)
                    self._ticks[key] = beside.e2e_ms(engine, detail or view)
            return self._ticks[key]

        self.waterfall.ticks, self.waterfall.expect = main is not None, expected

    def _ridge(self, engine: EngineView) -> float | None:
        """Return the batch at which computing takes as long as reading the weights."""
        from tracer.analysis.beside.beside import ridge_of

        return ridge_of(engine, self.tracer.beside.basis(engine))

    def _largest(self, figure: str, limit: int) -> Sequence[RequestView]:
        """Return the live requests with most of a figure, for a panel that has all the room."""
        if limit < 1:
            return ()
        return self.tracer.frozen.snapshot(Query(figure, live_only=True, limit=limit)).requests

    def _asked(self) -> Snapshot:
        """Return a snapshot with the requests that the list wants."""
        listing, frozen = self.listing, self.tracer.frozen
        snapshot = frozen.snapshot(listing.query)
        for _ in range(3):
            arrived = snapshot.finished + snapshot.live
            if not listing.apply(snapshot.requests, snapshot.total, arrived):
                break
            snapshot = frozen.snapshot(listing.query)
        return snapshot

    def _moved_on(self) -> Snapshot | None:
        """Return the last snapshot with the clock moved on, which will do until each row had its
        turn with many live requests in sight: what runs is known by its start alone."""
        last = self.snapshot
        if last is None or self.frame % self.waterfall.turns == 0 or self.tracer.frozen.paused:
            return None
        return replace(last, now=max(last.now, self.tracer.feed.now()))

    def redraw(self) -> None:
        """Draw everything now, slow parts included: the user did something."""
        self.frame = 0
        self.snapshot = None
        self.draw()

    def _waiting_text(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Say what is going on while there is nothing to show."""
        listing = self.listing
        if listing.rows:
            return ()
        if not snapshot.total and snapshot.live + snapshot.finished:
            if listing.live_only:
                return ("no request matches", "press a to show finished requests too")
            if listing.text:
                return ("no request matches", "press / then Esc to clear the filter")
        if not snapshot.engines:
            return (self.tracer.feed.status or "waiting for an engine",)
        loading = [
            f"{engine.name or engine.title or engine.source} loading: {engine.reason or 'weights'}"
            for engine in snapshot.engines
            if engine.status == "loading"
        ]
        return tuple(loading) or ("no request yet: the first one will appear here",)

    def keys(self) -> Sequence[Key]:
        listing, app = self.listing, self.tracer
        replayed, found = app.mode == "replay", app.diagnosis.going_on
        traffic, log, tab = app.traffic is not None, app.engine_log is not None, DIAGNOSIS_TAB
        recording = app.tape is not None and app.tape.active
        keys = [
            (True, Key("?", "help", "app.help")),
            (True, Key("q", "quit", "app.quit")),
            (replayed, Key(":", "go to", "app.go_to")),
            (replayed, Key("!", "finding", "app.next_finding")),
            (True, Key("Enter", "open", "open")),
            (found, Key(str(tab), f"diagnosis ({found})", f"app.tab({tab})", True)),
            (True, Key("/", "filter", "filter", bool(listing.text))),
            (True, Key("Space", "play" if replayed else "pause", "app.pause", app.frozen.paused)),
            (True, Key("f", "follow", "follow", listing.following)),
            (True, Key("s", "sort", "sort", not listing.by_arrival)),
            (traffic, Key("+", "faster", "app.faster")),
            (traffic, Key("-", "slower", "app.slower")),
            (traffic, Key("b", "burst", "app.burst")),
            (traffic, Key("t", "type a prompt", "app.ask")),
            (True, Key("a", "live only", "live_only", listing.live_only)),
            (True, Key("v", "panels", "panels")),
            (log, Key("l", "log", "log", self.log_shown)),
            (app.tape is not None, Key("r", "record", "app.record", recording)),
            (True, Key("m", "maximise", "maximise", self.maximised_panel is not None)),
        ]
        return [key for possible, key in keys if possible]

    def action_move(self, rows: int) -> None:
        self._move(rows, rows)

    def action_page(self, pages: int) -> None:
        self._move(
            pages * max(1, self.waterfall.visible_rows - 1),
            pages * max(1, self.log_pane.size.height - 2),
        )

    def _move(self, requests: int, lines: int) -> None:
        if self.focused is self.log_pane:
            self.log_pane.scroll_rows(lines)
        else:
            self.listing.move(requests)
        self.redraw()

    def action_first(self) -> None:
        self.listing.first()
        self.redraw()

    def action_last(self) -> None:
        self.listing.last()
        self.redraw()

    def action_follow(self) -> None:
        self.listing.follow()
        self.redraw()

    def action_sort(self) -> None:
        self.listing.sort_by(SORTS[(SORTS.index(self.listing.sort) + 1) % len(SORTS)])
        self.redraw()

    def action_flip(self) -> None:
        self.listing.flip()
        self.redraw()

    def action_live_only(self) -> None:
        self.listing.show_live_only(not self.listing.live_only)
        self.redraw()

    def action_zoom(self, steps: int) -> None:
        if steps:
            self.waterfall.axis.zoom_by(steps)
        else:
            self.waterfall.axis.fit_again()
        self.redraw()

    def action_panels(self) -> None:
        beside = self.size.width >= PANELS_FROM
        shown = self.panels_wanted is not False if beside else bool(self.panels_wanted)
        self.panels_wanted = not shown
        self.maximised_panel = None
        if shown and self.focused in self.panels:
            self.set_focus(self.waterfall)
        self.place()

    def action_log(self) -> None:
        if self.tracer.engine_log is None:
            self.tracer.report("this engine's output is not captured here")
            return
        self.log_shown = not self.log_shown
        self.log_pane.back = 0
        if not self.log_shown and self.focused is self.log_pane:
            self.set_focus(self.waterfall)
        self.place()

    def action_open(self) -> None:
        view = self.listing.current
        if view is not None:
            self.listing.choose(view.key)
            self.tracer.open_request(view)

    def action_filter(self) -> None:
        self.line_label.show("filter")
        self.line.open("filter", self.listing.text, "id, route, tenant, state …")
        self.place()

    def action_back(self) -> None:
        """Leave what is open: a maximised panel, the filter, the selection."""
        if self.maximised_panel is not None:
            self.maximised_panel = None
            self.place()
        elif self.listing.text:
            self.listing.filter("")
        elif self.listing.selected is not None:
            self.listing.selected = None
        self.redraw()

    def ask(self) -> None:
        self.line_label.show("prompt")
        self.line.open("ask", "", "Type a prompt, Enter to send, Esc to cancel")
        self.place()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self.line.purpose == "filter" and self.line.shown:
            self.listing.filter(event.value)
            self.redraw()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        purpose = self.line.purpose
        self._close_line()
        if purpose == "ask" and event.value.strip():
            self.tracer.send(event.value)

    @on(LineInput.Cancelled)
    def _cancelled(self) -> None:
        if self.line.purpose == "filter":
            self.listing.filter("")
        self._close_line()

    def _close_line(self) -> None:
        self.line.close()
        self.set_focus(self.waterfall)
        self.place()

    @on(Waterfall.Moved)
    def _moved(self) -> None:
        self.redraw()

    @on(Waterfall.Opened)
    def _opened(self, message: Waterfall.Opened) -> None:
        self.tracer.open_request(message.view)

    def neighbour(self, view: RequestView, steps: int) -> RequestView | None:
        """Select and return the request `steps` rows below (or above) `view`."""
        listing = self.listing
        listing.choose(view.key)
        listing.height = max(1, self.waterfall.visible_rows)
        self._asked()
        if all(row.key != view.key for row in listing.rows):
            return self._far_neighbour(view, steps)
        listing.move(steps)
        self._asked()
        found = listing.current
        return None if found is None or found.key == view.key else found

    def _far_neighbour(self, view: RequestView, steps: int) -> RequestView | None:
        """Do what `neighbour` does for a request that the list has scrolled away from."""
        listing = self.listing
        rows = self.tracer.frozen.snapshot(
            replace(listing.query, limit=1_000_000, offset=0)
        ).requests
        steps = -steps if listing.newest_last else steps
        at = next((index for index, row in enumerate(rows) if row.key == view.key), None)
        if at is None or not 0 <= at + steps < len(rows):
            return None
        listing.choose(rows[at + steps].key)
        return rows[at + steps]

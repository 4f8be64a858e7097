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
        self.log_shown = False
        self.panels_wanted: bool | None = None
        self.snapshot: Snapshot | None = None
        self._ticks: dict[tuple[tuple[str, int], bool], float | None] = {}
        """ms at which the bars of requests carry their tick, by key and whether they are live."""

    def compose(self) -> ComposeResult:
        """All widgets; `tiles` decides which of them are seen."""
        yield self.context
        yield self.numbers
        yield self.device
        yield self.banner
        yield self.waterfall
        yield self.kv
        yield self.batch_panel
        yield self.queue
        yield self.log_pane
        yield self.line_label
        yield self.line
        yield self.key_bar

    # --- layout

    def panels_beside(self, size: Size) -> bool:
        """Whether the panels stand to the right of the list."""
        return size.width >= PANELS_FROM and self.panels_wanted is not False

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """Strips on top, keys below, the list and its panels between them."""
        width, height = size
        numbers = 2 if height >= 16 else 1 if height >= 7 else 0
        context = 1 if height >= 3 else 0
        keys = 1 if height >= 5 else 0
        line = 1 if self.line.shown else 0
        log = max(4, min(14, height // 3)) if self.log_shown and height >= 12 else 0
        banner = min(self.banner.rows, max(0, height - 4))
        device = 1 if height >= DEVICE_FROM and self.device.known else 0
        main = max(1, height - numbers - context - keys - line - log - banner - device)
        strips = [
            (self.context, context),
            (self.numbers, numbers),
            (self.device, device),
            (self.banner, banner),
        ]
        regions = column(0, 0, width, strips)
        top = context + numbers + device + banner
        regions.update(self._main(width, top, main))
        below = top + main + log
        label = min(8, width // 3)
        regions.update(column(0, top + main, width, [(self.log_pane, log)]))
        regions.update(column(0, below, label, [(self.line_label, line)]))
        regions.update(column(label, below, width - label, [(self.line, line)]))
        regions.update(column(0, below + line, width, [(self.key_bar, keys)]))
        return regions

    def _main(self, width: int, top: int, height: int) -> dict[Widget, Region]:
        maximised = self.maximised_panel
        for panel in (self.kv, self.batch_panel, self.queue):
            panel.whole = maximised is panel
        panels: dict[Widget, bool] = {self.kv: True, self.batch_panel: True, self.queue: True}
        if maximised is not None and (maximised in panels or maximised is self.waterfall):
            self._edges(False)
            return {maximised: Region(0, top, width, height)}
        if self.panels_beside(self.size) and height >= 10:
            self._edges(True)
            side = max(40, min(64, width * 3 // 10))
            batch, queue, kv = self._panel_heights(side, height)
            regions = column(0, top, width - side, [(self.waterfall, height)])
            panels_below = [(self.kv, kv), (self.batch_panel, batch), (self.queue, queue)]
            regions.update(column(width - side, top, side, panels_below))
            return regions
        if self.panels_wanted and width < PANELS_FROM:
            self._edges(False)
            batch, queue, kv = self._panel_heights(width, height)
            return column(
                0, top, width, [(self.kv, kv), (self.batch_panel, batch), (self.queue, queue)]
            )
        return column(0, top, width, [(self.waterfall, height)])

    def _edges(self, edge: bool) -> None:
        for panel in (self.kv, self.batch_panel, self.queue):
            panel.edge = edge

    def _panel_heights(self, width: int, height: int) -> list[int]:
        """Rows for batch, queue, KV: the map takes what it needs up to a limit, the batch's charts
        take the rest."""
        kv = min(self.kv.wanted(width), max(5, height * 2 // 5))
        queue = max(3, min(14, height // 4))
        kv, queue = split(height, kv, queue)
        batch = min(24, height - kv - queue)
        return [batch, height - kv - batch, kv]

    # --- drawing

    def draw(self) -> None:
        """One frame."""
        app, listing = self.tracer, self.listing
        if not self.is_mounted or not self.waterfall.is_mounted:
            return
        listing.height = self.waterfall.visible_rows
        first = self.snapshot is None
        snapshot = self._moved_on() or self._asked()
        self.snapshot = snapshot
        if not first:  # the first paint does not wait for the model
            self._expect(snapshot)
        self.waterfall.show(snapshot, self._waiting_text(snapshot), None if first else self.frame)
        status, style = app.status_of(snapshot)
        self.context.show(snapshot, status, style)
        if first or self.frame % NUMBERS_EVERY == 0:
            self.numbers.show(snapshot)
            hardware = app.outlets.hardware if app.outlets is not None else None
            if hardware is not None and self.device.show(
                hardware.reading(app.feed.state, snapshot.now)
            ):
                self.place()
        if self.batch_panel.is_on_screen and (first or self.frame % PANELS_EVERY == 1):
            members = self._largest("step", self.batch_panel.members_wanted)
            self.batch_panel.show(snapshot, None if first else self._ridge, members)
            self.queue.show(snapshot)
        if self.kv.is_on_screen and (first or self.frame % MAP_EVERY == 2):
            chosen = listing.chosen_id
            detail = app.lens.detail(chosen) if chosen is not None else None
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
                    self._ticks[key] = beside.e2e_ms(
                        engine, self.tracer.lens.detail(view.id) or view
                    )
            return self._ticks[key]

        self.waterfall.ticks, self.waterfall.expect = main is not None, expected

    def _ridge(self, engine: EngineView) -> float | None:
        """The batch at which computing takes as long as reading the weights; None where the device
        is not known."""
        from tracer.analysis.beside.ridge import ridge_of

        return ridge_of(engine, self.tracer.beside.basis(engine))

    def _largest(self, figure: str, limit: int) -> Sequence[RequestView]:
        """The live requests with most of a figure, for a panel that has all the room."""
        if limit < 1:
            return ()
        return self.tracer.lens.snapshot(Query(figure, True, "", True, limit, 0)).requests

    def _asked(self) -> Snapshot:
        """A snapshot with the requests that the list wants."""
        listing, lens = self.listing, self.tracer.lens
        snapshot = lens.snapshot(listing.query)
        for _ in range(3):
            if not listing.take(
                snapshot.requests, snapshot.total, snapshot.finished + snapshot.live
            ):
                break
            snapshot = lens.snapshot(listing.query)
        return snapshot

    def _moved_on(self) -> Snapshot | None:
        """The last snapshot with the clock moved on, which will do until each row had its turn with
        many live requests in sight: what runs is told by its begin alone."""
        last = self.snapshot
        if last is None or self.frame % self.waterfall.turns == 0 or self.tracer.lens.paused:
            return None
        return replace(last, now=max(last.now, self.tracer.feed.now()))

    def redraw(self) -> None:
        """Draw everything now, slow parts included: the user did something."""
        self.frame = 0
        self.snapshot = None
        self.draw()

    def _waiting_text(self, snapshot: Snapshot) -> tuple[str, ...]:
        """What to say while there is nothing to show."""
        if self.listing.rows:
            return ()
        if (
            snapshot.total == 0
            and (self.listing.text or self.listing.live_only)
            and snapshot.live + snapshot.finished
        ):
            hint = "a shows finished ones too" if self.listing.live_only else "/ and Esc show all"
            return ("no request matches", hint)
        engines = snapshot.engines
        if not engines:
            return (self.tracer.feed.status or "waiting for an engine",)
        lines = []
        for engine in engines:
            name = engine.name or engine.title or engine.source
            if engine.status == "loading":
                lines.append(f"{name} loading: {engine.reason or 'weights'}")
        return tuple(lines) or ("no request yet: the first one will appear here",)

    def keys(self) -> Sequence[Key]:
        """Keys of the last line."""
        listing, app = self.listing, self.tracer
        keys = [
            Key("?", "help", "app.help"),
            Key("q", "quit", "app.quit"),
            Key("Enter", "open", "open"),
            Key("/", "filter", "filter", bool(listing.text)),
            Key("Space", "play" if app.mode == "replay" else "pause", "app.pause", app.lens.paused),
            Key("f", "follow", "follow", listing.following),
            Key("s", "sort", "sort", not listing.by_arrival),
        ]
        found = app.diagnosis.going_on
        if found:
            keys.insert(
                3, Key(str(DIAGNOSIS_TAB), f"{found} found", f"app.tab({DIAGNOSIS_TAB})", True)
            )
        if app.traffic is not None:
            keys += [
                Key("+", "faster", "app.faster"),
                Key("-", "slower", "app.slower"),
                Key("b", "burst", "app.burst"),
            ]
            keys.append(Key("t", "type a prompt", "app.ask"))
        keys += [
            Key("a", "live only", "live_only", listing.live_only),
            Key("v", "panels", "panels"),
        ]
        if app.engine_log is not None:
            keys.append(Key("l", "log", "log", self.log_shown))
        if app.mode == "replay":
            keys[2:2] = [Key(":", "go to", "app.go_to"), Key("!", "finding", "app.next_finding")]
        if app.tape is not None:
            keys.append(Key("r", "record", "app.record", app.tape.active))
        keys.append(Key("m", "maximise", "maximise", self.maximised_panel is not None))
        return keys

    # --- what the user does

    def action_move(self, rows: int) -> None:
        """Move the selection; in the log, look back."""
        if self.focused is self.log_pane:
            self.log_pane.look_back(-rows)
        else:
            self.listing.move(rows)
        self.redraw()

    def action_page(self, pages: int) -> None:
        """Move by a screenful."""
        if self.focused is self.log_pane:
            self.log_pane.look_back(-pages * max(1, self.log_pane.size.height - 2))
        else:
            self.listing.move(pages * max(1, self.waterfall.visible_rows - 1))
        self.redraw()

    def action_first(self) -> None:
        """To the top."""
        self.listing.first()
        self.redraw()

    def action_last(self) -> None:
        """To the bottom, following the newest."""
        self.listing.last()
        self.redraw()

    def action_follow(self) -> None:
        """Keep the newest in sight."""
        self.listing.follow()
        self.redraw()

    def action_sort(self) -> None:
        """The next order."""
        self.listing.sort_by(SORTS[(SORTS.index(self.listing.sort) + 1) % len(SORTS)])
        self.redraw()

    def action_flip(self) -> None:
        """Turn the order round."""
        self.listing.flip()
        self.redraw()

    def action_live_only(self) -> None:
        """Only requests that are not over, or all."""
        self.listing.show_live_only(not self.listing.live_only)
        self.redraw()

    def action_zoom(self, steps: int) -> None:
        """A longer or shorter page of time; 0 lets it fit again."""
        axis = self.waterfall.axis
        if steps:
            axis.zoom_by(steps)
        else:
            axis.fit_again()
        self.redraw()

    def action_panels(self) -> None:
        """Panels beside the list, or in its place where the screen is narrow."""
        beside = self.size.width >= PANELS_FROM
        shown = self.panels_wanted is not False if beside else bool(self.panels_wanted)
        self.panels_wanted = not shown
        self.maximised_panel = None
        if shown and self.focused in (self.kv, self.batch_panel, self.queue):
            self.set_focus(self.waterfall)
        self.place()

    def action_log(self) -> None:
        """The engine's log, or not."""
        if self.tracer.engine_log is None:
            self.tracer.say("this engine's output is not captured here")
            return
        self.log_shown = not self.log_shown
        self.log_pane.back = 0
        if not self.log_shown and self.focused is self.log_pane:
            self.set_focus(self.waterfall)
        self.place()

    def action_open(self) -> None:
        """The selected request, closely."""
        view = self.listing.current
        if view is not None:
            self.listing.choose(view.key)
            self.tracer.open_request(view)

    def action_filter(self) -> None:
        """Type what requests must match."""
        self.line_label.show("filter")
        self.line.open("filter", self.listing.text, "id, route, tenant, state …")
        self.place()

    def action_back(self) -> None:
        """Out of what is open: a maximised panel, the filter, the selection."""
        if self.maximised_panel is not None:
            self.maximised_panel = None
            self.place()
        elif self.listing.text:
            self.listing.filter("")
        elif self.listing.selected is not None:
            self.listing.selected = None
        self.redraw()

    def ask(self) -> None:
        """Type a prompt to send."""
        self.line_label.show("prompt")
        self.line.open("ask", "", "a prompt, Enter sends it")
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
        """The request `steps` rows below (or above) `view` in the list's order, and select it."""
        listing = self.listing
        listing.choose(view.key)
        listing.height = max(1, self.waterfall.visible_rows)
        snapshot = self.tracer.lens.snapshot(listing.query)
        listing.take(snapshot.requests, snapshot.total)
        if all(row.key != view.key for row in listing.rows):
            snapshot = self.tracer.lens.snapshot(
                Query(
                    listing.sort, not listing.flipped, listing.text, listing.live_only, 1_000_000, 0
                )
            )
            rows = (
                list(reversed(snapshot.requests))
                if listing.newest_last
                else list(snapshot.requests)
            )
            at = next((index for index, row in enumerate(rows) if row.key == view.key), None)
            if at is None or not 0 <= at + steps < len(rows):
                return None
            listing.choose(rows[at + steps].key)
            return rows[at + steps]
        listing.move(steps)
        snapshot = self.tracer.lens.snapshot(listing.query)
        if listing.take(snapshot.requests, snapshot.total):
            snapshot = self.tracer.lens.snapshot(listing.query)
            listing.take(snapshot.requests, snapshot.total)
        found = listing.current
        return None if found is None or found.key == view.key else found

"""The app: feeds events into the state, draws ten frames a second, and owns what all screens share.

One timer draws. Each frame takes one immutable snapshot and hands it to the screen in front, which
redraws the cells that changed. A terminal that cannot keep up (its writes queue up) is skipped,
never waited for; a screen on which nothing can have changed is not drawn at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.style import Style
from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.driver import Driver
from textual.screen import Screen

from engine_hooks.protocol.clock import NS_PER_S
from tracer.format import figures
from tracer.state.metrics.slo import Slo
from tracer.state.view import RequestView, Snapshot
from tracer.tui.feed import EngineLog, Evidence, Feed, Tape, Traffic
from tracer.tui.frozen_view import FrozenView
from tracer.tui.naming import place_of
from tracer.tui.screens.banner import Notice, alerted, notices_of
from tracer.tui.screens.base import FrameScreen
from tracer.tui.screens.context_strip import RECORDING
from tracer.tui.screens.footer import Footer
from tracer.tui.screens.live.screen import LiveScreen
from tracer.tui.screens.tabs import DIAGNOSIS_TAB, TABS, Tab
from tracer.tui.toolkit import compositor
from tracer.tui.toolkit.canvas import label
from tracer.tui.toolkit.line_input import LineInput
from tracer.tui.toolkit.picture import write_picture
from tracer.tui.toolkit.terminal import TerminalDriver, patient
from tracer.tui.toolkit.theme import (
    ASCII,
    PALETTES,
    Look,
    choose_glyphs,
    choose_palette,
    textual_theme,
)
from tracer.tui.toolkit.words import CELLS
from tracer.tui.watch import LiveWatch, Watch

if TYPE_CHECKING:
    from tracer.analysis.beside.beside import Beside
    from tracer.monitor.alerts import News
    from tracer.monitor.monitor import Monitor
    from tracer.tui.screens.budget.model import BudgetModel

FRAMES_PER_SECOND = 10
IDLE_EVERY = 20
"""With no live request and no new event, each so many frames one is drawn: a heartbeat may still
change a gauge."""
TYPED_AHEAD: Final = 64
"""Keys that may come in one piece with one that opens a line."""
NEWS_FOR = 80
"""Frames for which a note is news."""
NAMES = ("Live", "Request", "Numbers", "Diagnosis", "Budget", "Compare", "Journey")
"""Screens by their number, from 1."""
REQUEST_TAB = 2
"""The number of the Request screen, of which there is one for each request."""
WINDOWS = (10.0, 60.0, 600.0, math.inf)
"""Seconds over which the figures can be computed."""
TRAFFIC_ACTIONS = ("faster", "slower", "burst", "stop_traffic", "ask")


class TracerApp(App[int]):
    """The terminal interface over a feed. `log`, `traffic` and `tape` add their keys.

    `mode` names what is shown (``live``, ``replay``, ``demo``); `title` stands in the first line
    until an engine has said what it is. `look` sets colours and glyphs, by default those that the
    terminal can show.
    """

    TITLE = "tracer"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    NOTIFICATION_TIMEOUT = 4
    CSS = """
    Screen { background: $background; }
    Toast { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q", "quit", "quit", show=False),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("question_mark", "help", "help", show=False),
        Binding("space", "pause", "freeze the display (events are still recorded)", show=False),
        Binding("w", "window", "change the time window", show=False),
        *(Binding(str(n), f"tab({n})", name, show=False) for n, name in enumerate(NAMES, 1)),
        Binding("ctrl+s", "screenshot", "screenshot as SVG", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
        Binding("ctrl+l", "repaint", "redraw the screen", show=False),
        Binding("plus,equals_sign", "faster", "more requests a second", show=False),
        Binding("minus", "slower", "fewer requests a second", show=False),
        Binding("b", "burst", "a burst of requests", show=False),
        Binding("z", "stop_traffic", "stop or resume arrivals", show=False),
        Binding("t", "ask", "type a prompt and watch it", show=False),
        Binding("r", "record", "start or stop a recording", show=False),
        Binding("R", "flight", "save the flight recorder's minutes", show=False),
    ]

    def get_driver_class(self) -> type[Driver]:
        """Return Textual's choice, made to outlive its terminal."""
        return patient(super().get_driver_class())

    TABS: ClassVar[tuple[Tab, ...]] = TABS

    def __init__(
        self,
        feed: Feed,
        *,
        title: str = "",
        log: EngineLog | None = None,
        traffic: Traffic | None = None,
        mode: str = "live",
        look: Look | None = None,
        tape: Tape | None = None,
    ) -> None:
        # Textual takes NO_COLOR out of the environment as it starts: read it before.
        self._no_color = bool(os.environ.get("NO_COLOR"))
        super().__init__()
        self.feed = feed
        self.frozen = FrozenView(feed)
        self.engine_log = log
        self.traffic = traffic
        self.tape = tape
        self.monitor: Monitor | None = None
        """Alerts, and the load of this machine."""
        self.diagnosis: Watch = LiveWatch(feed)
        self.evidence: Evidence | None = None
        self.mode = mode
        self.heading = title
        self.slo = Slo()
        """Latency targets, set by the user."""
        self._note = ""
        self._note_age = 0
        self.trouble = ""
        """A failure of the viewer itself, for the banner."""
        self.skipped = 0
        """Frames not drawn because the terminal had not taken the ones before."""
        self.patched = compositor.patch()
        """Why the faster writes are not in use; empty when they are."""
        if look is None:
            palette = choose_palette(no_color=self._no_color, colours=self.console.color_system)
            look = Look(palette, choose_glyphs())
        self.look = look
        if self.look.glyphs is ASCII:
            # Textual's own widgets know no ASCII.
            stream: Any = sys.__stderr__
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.reconfigure(errors=CELLS)
        for known in PALETTES.values():
            self.register_theme(textual_theme(known))
        self.theme = look.palette.name
        self.live = LiveScreen(self.look, title)
        self._tabs: dict[int, FrameScreen] = {}
        self.keep(1, self.live)
        self._seen: object = None
        self._idle = 0
        self._elsewhere: deque[events.Key] = deque(maxlen=TYPED_AHEAD)
        """Keys that went to something else than a line."""

    @cached_property
    def beside(self) -> Beside:
        """Expected values, from facts known without measuring anything."""
        from tracer.analysis.beside.beside import Beside

        return Beside()

    @cached_property
    def budget_model(self) -> BudgetModel:
        """The setting of the Budget and Journey screens."""
        from tracer.tui.screens.budget.model import BudgetModel

        return BudgetModel()

    # --- life

    async def on_event(self, event: events.Event) -> None:
        """Give keys typed behind one that opens a line to that line.

        Over a slow connection keys come in one piece: Textual sends those that are there before the
        line to the screen, where the rest of ``/quiet`` would quit. They come by here before they
        do anything.
        """
        if isinstance(event, events.Key):
            line = self.line
            if not event.is_forwarded:
                if line is None or self.focused is not line:
                    self._elsewhere.append(event)
            elif line is not None and any(event is sent for sent in self._elsewhere):
                self.screen.set_focus(line, scroll_visible=False)
                line._forward_event(events.Key(event.key, event.character))
                return
        await super().on_event(event)

    @property
    def line(self) -> LineInput | None:
        """The line that is open for typing."""
        line = getattr(self.screen, "line", None) if self.screen_stack else None
        return line if isinstance(line, LineInput) and line.shown else None

    def on_mount(self) -> None:
        self.push_screen(self.live)
        self.set_interval(1 / FRAMES_PER_SECOND, self.tick, name="frames")
        self.run_worker(self._run_feed(), name="feed", exit_on_error=False)
        self.run_worker(self.diagnosis.run(), name="diagnosis", exit_on_error=False)
        if self.evidence is not None:
            self.run_worker(self.evidence.run(), name="evidence", exit_on_error=False)
        self._watch_signals()
        self.call_later(self._settle_memory)

    @staticmethod
    def _settle_memory() -> None:
        """Keep the garbage collector off objects that live as long as the program: measured, p95 of
        a frame from 63 to 7 ms."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)

    async def _run_feed(self) -> None:
        try:
            await self.feed.run()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the screen stays, and says why nothing moves
            self.feed.status = "stopped"
            self.trouble = f"reading the trace failed: {error}"

    def _watch_signals(self) -> None:
        """Leave the terminal as it was found when asked to go."""
        if self.is_headless:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
                loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))

    @property
    def note(self) -> str:
        """A short message at the right end of the key line."""
        return self._note

    @note.setter
    def note(self, text: str) -> None:
        if text != self._note:
            self._note, self._note_age = text, 0

    @property
    def note_is_news(self) -> bool:
        """True while the note displaces keys that have no room beside it."""
        return bool(self._note) and self._note_age < NEWS_FOR

    # --- frames

    def tick(self) -> None:
        """Draw a frame if there can be something new and the terminal has taken the last one."""
        self._note_age += 1
        fresh = self.diagnosis.news()
        if fresh is not None:
            stage = "" if fresh.stage is None else "stage "
            self.note = f"new finding: {stage}{place_of(fresh)} (press {DIAGNOSIS_TAB})"
        if not self.screen_stack:  # on the way out
            return
        screen = self.screen
        if not isinstance(screen, FrameScreen) or not self._writable():
            return
        state = self.feed.state
        logged = len(self.engine_log.lines) if self.engine_log else 0
        news = None if self.frozen.paused else (state.now, state.unknown, state.set_aside())
        seen = (
            news,
            self.feed.status,
            self.frozen.paused,
            screen,
            logged,
            self.note,
            self.note_is_news,
            self.diagnosis.version,
        )
        if seen == self._seen and (self.frozen.paused or not state.requests.live):
            self._idle += 1
            if self._idle % IDLE_EVERY:
                return
        else:
            self._idle = 0
        self._seen = seen
        screen.draw()

    def _writable(self) -> bool:
        """Return True if the terminal has taken all writes; exit if there is no terminal any
        more."""
        writer = getattr(self._driver, "_writer_thread", None)
        if writer is None:
            return True
        if not writer.is_alive():
            # The terminal is gone and nobody empties the queue: nothing may wait for room in it on
            # the way out.
            writer._queue.maxsize = 0
            self.exit(return_code=128 + signal.SIGHUP)
            return False
        if writer._queue.qsize() > 0:
            self.skipped += 1
            return False
        return True

    def new_footer(self, look: Look) -> Footer | None:
        """Return what a new screen shows above its keys, if anything."""
        return None

    def status_of(self, snapshot: Snapshot) -> tuple[str, Style]:
        """Return the word at the right end of the first line, and its style."""
        look, status = self.look, self.feed.status
        style = look.good if "LIVE" in status else look.warn
        if self.frozen.paused:
            status, style = f"{look.glyphs.pause} PAUSED", look.warn
        elif any(engine.status == "dead" for engine in snapshot.engines):
            status, style = f"{look.glyphs.bullet} DEAD", look.bad
        if self.tape is not None and self.tape.active:
            status = f"{look.glyphs.bullet}{RECORDING}  {status}"
        return status, style

    def notices(self, snapshot: Snapshot) -> tuple[Notice, ...]:
        """Return the lines of the banner."""
        own = (Notice(self.trouble, True),) if self.trouble else ()
        found = notices_of(snapshot)
        return own + (found if self.monitor is None else alerted(self.monitor, found))

    def report_alert(self, news: News) -> None:
        """Report that an alert fired or was resolved: in the event log, and over the screen."""
        if self.engine_log is not None:
            at = figures.instant(news.t - self.feed.state.began)
            self.engine_log.add(f"tracer: {at} alert: {news.text}")
        self.report(f"alert: {news.text}", grave=news.fired and news.severity == "critical")

    @property
    def at_rest(self) -> bool:
        """True once all that was drawn has reached the terminal."""
        return self._driver.at_rest if isinstance(self._driver, TerminalDriver) else True

    # --- what all screens can do

    def report(self, text: str, *, grave: bool = False) -> None:
        """Show a passing message. Never markup: the text may come from anywhere."""
        self.notify(label(text), severity="error" if grave else "information", markup=False)

    async def seek_to(self, t: int) -> bool:
        """Show the instant `t` (ns); return False where only the present can be shown."""
        return False

    def open_request(self, view: RequestView) -> None:
        from tracer.tui.screens.request.screen import RequestScreen

        self.push_screen(RequestScreen(self.look, view.id))

    def keep(self, number: int, screen: FrameScreen) -> None:
        """Let a number lead to a screen, which stays as it is left.

        Textual unmounts for good a screen that is popped and not installed: pushed again, it would
        never paint.
        """
        self._tabs[number] = screen
        self.install_screen(screen, screen.NAME)

    def action_tab(self, number: int) -> None:
        """Show the screen of a number, with nothing over it. The Live screen lies under all others;
        2 is the request that its list has chosen, or the newest."""
        if number == REQUEST_TAB:
            self.action_tab(1)
            self.live.action_open()
            return
        tab = next((tab for tab in self.TABS if tab.number == number), None)
        if tab is None:
            return
        if number not in self._tabs:
            self.keep(number, tab.kind()(self.look))
        wanted = self._tabs[number]
        while len(self.screen_stack) > 1 and self.screen not in (self.live, wanted):
            self.pop_screen()
        if self.screen is not wanted:
            self.push_screen(wanted)

    def action_help(self) -> None:
        from tracer.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.look, self.screen))

    def action_pause(self) -> None:
        self.frozen.toggle()
        self._redraw()

    def action_window(self) -> None:
        index = WINDOWS.index(self.frozen.window_s) if self.frozen.window_s in WINDOWS else 0
        self.frozen.window_s = WINDOWS[(index + 1) % len(WINDOWS)]
        self._redraw()

    def action_repaint(self) -> None:
        """Send every cell again, for a terminal that something else has written to."""
        self.screen.refresh(layout=True)
        self.refresh(layout=True)

    def _redraw(self) -> None:
        self._seen = None
        if isinstance(self.screen, FrameScreen):
            self.screen.redraw()

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        name = filename or f"tracer-{self.feed.now() // NS_PER_S}.svg"
        target = write_picture(
            self.export_screenshot(title="tracer"), name, Path(path) if path else None
        )
        if target is None:
            self.report("no folder to write a screenshot to", grave=True)
        else:
            self.report(f"screenshot: {target}")

    def use_palette(self, name: str) -> None:
        self.look = Look(PALETTES[name], self.look.glyphs)
        self.theme = name
        for screen in {*self._tabs.values(), *self.screen_stack}:
            if isinstance(screen, FrameScreen):
                screen.restyle(self.look)

    # --- a demonstration's traffic

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for keys of what is not there: a screen, traffic, a recorder."""
        if action == "tab":
            return parameters[0] in (REQUEST_TAB, *(tab.number for tab in self.TABS))
        if action in TRAFFIC_ACTIONS:
            return self.traffic is not None
        if action in ("record", "flight"):
            return self.tape is not None and (action == "record" or self.tape.flying)
        return super().check_action(action, parameters)

    def _change_traffic(self, change: str) -> None:
        """Call a method of the traffic, and show the rate that follows."""
        if self.traffic is not None:
            getattr(self.traffic, change)()
            self.note = (
                "arrivals stopped (z resumes)"
                if self.traffic.paused
                else f"target {self.traffic.rate:.1f} req/s"
            )
            self._redraw()

    def action_faster(self) -> None:
        self._change_traffic("faster")

    def action_slower(self) -> None:
        self._change_traffic("slower")

    def action_stop_traffic(self) -> None:
        self._change_traffic("pause")

    def action_burst(self) -> None:
        if self.traffic is not None:
            self.traffic.burst()

    def action_ask(self) -> None:
        if self.traffic is not None and isinstance(self.screen, LiveScreen):
            self.screen.ask()

    def send(self, prompt: str) -> None:
        """Send a prompt of the user and open its request as soon as it is seen."""
        if self.traffic is not None:
            self.run_worker(self._send(prompt, self.traffic), name="ask", exit_on_error=False)

    async def _send(self, prompt: str, traffic: Traffic) -> None:
        try:
            request_id = await traffic.ask(prompt)
        except Exception as error:
            self.report(f"the prompt was not sent: {error}", grave=True)
            return
        for _ in range(100):
            detail = self.feed.state.detail(request_id, now=self.feed.now())
            if detail is not None:
                self.live.listing.choose(detail.view.key)
                if self.screen is self.live:
                    self.open_request(detail.view)
                return
            await asyncio.sleep(0.05)
        self.report("the prompt was sent, but its request has not been seen yet")

    # --- recording

    def action_record(self) -> None:
        if self.tape is not None:
            self.run_worker(self._record(self.tape), group="record", exit_on_error=False)

    async def _record(self, tape: Tape) -> None:
        self.note = await tape.toggle()
        self._redraw()

    def action_flight(self) -> None:
        if self.tape is not None:
            self.note = self.tape.write_flight()
            self._redraw()

    # --- command palette

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Return what the keys do, and what has no key."""
        for tab in self.TABS:
            yield SystemCommand(
                tab.name, f"The {tab.name} screen", partial(self.action_tab, tab.number)
            )
        for name, palette in PALETTES.items():
            if palette.depth == 24 or palette.name == self.look.palette.name:
                yield SystemCommand(
                    f"Colours: {name.removeprefix('tracer-')}",
                    "Change the palette",
                    partial(self.use_palette, name),
                )
        commands = [
            ("Help", "Keys, stages and glyphs", self.action_help),
            ("Pause", "Freeze the display; events are still recorded", self.action_pause),
            ("Screenshot", "Save the screen as an SVG file", self.action_screenshot),
            ("Window", "Change the time window of the figures", self.action_window),
        ]
        if isinstance(screen, LiveScreen):
            commands += [
                ("Filter", "Show only requests that match", screen.action_filter),
                ("Follow", "Keep the newest request in sight", screen.action_follow),
                ("Live only", "Hide finished requests", screen.action_live_only),
                ("Sort", "Sort by the next column", screen.action_sort),
                ("Panels", "Show or hide the panels", screen.action_panels),
            ]
            if self.engine_log is not None:
                commands.append(("Engine log", "Show or hide the engine's log", screen.action_log))
        if self.tape is not None:
            commands.append(("Record", "Start or stop a recording", self.action_record))
            if self.tape.flying:
                commands.append(
                    ("Flight recording", "Save the last minutes to a file", self.action_flight)
                )
        if self.traffic is not None:
            commands.append(("Burst", "Send a burst of requests", self.action_burst))
            commands.append(("Arrivals", "Stop or resume arrivals", self.action_stop_traffic))
        commands.append(("Quit", "Leave", self.exit))
        for title, text, callback in commands:
            yield SystemCommand(title, text, callback)

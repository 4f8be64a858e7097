"""The same screens over a recorded trace, with the keys of a player."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar

from textual import on
from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from engine_hooks.protocol.blocks import Mark
from engine_hooks.protocol.clock import NS_PER_S
from tracer.replay import bookmarks
from tracer.replay.bookmarks import BookmarkError
from tracer.replay.player import IDLE_S, Player
from tracer.replay.timespec import PlaceError, clock_of, instant
from tracer.state.view import Snapshot
from tracer.tui.app import TracerApp
from tracer.tui.replay.footer import PlaceInput, ReplayFooter
from tracer.tui.replay.timeline import Timeline
from tracer.tui.screens.banner import Notice
from tracer.tui.screens.base import FrameScreen
from tracer.tui.toolkit.line_input import LineInput
from tracer.tui.toolkit.theme import Look

JUMP_S, LEAP_S = 10, 60
"""Seconds of the trace that one key jumps."""

FindFindings = Callable[[], Awaitable[Sequence[Mark]]]
"""Looks for findings in the trace: their begins, and what they say. It may take long, and raise
OSError."""

FEW_EVENTS = 200_000
"""A trace with fewer is diagnosed unasked, so that its findings are on the timeline."""


class ReplayApp(TracerApp):
    """Shows what a player plays. What freezes a live screen pauses the player here.

    `find_findings` is asked for what the timeline shows as findings. The keys are none that a
    screen has for itself.
    """

    BINDINGS: ClassVar[list[Any]] = [
        Binding("space", "pause", "play or pause", show=False),
        Binding("plus,equals_sign", "faster", "play faster (up to 100x)", show=False),
        Binding("minus", "slower", "play slower (down to 0.1x)", show=False),
        Binding("colon,ctrl+g", "go_to", "go to a time, share, request or finding", show=False),
        Binding("right_parenthesis", f"jump({JUMP_S})", f"{JUMP_S} s on", show=False),
        Binding("left_parenthesis", f"jump({-JUMP_S})", f"{JUMP_S} s back", show=False),
        Binding("right_curly_bracket", f"jump({LEAP_S})", f"{LEAP_S} s on", show=False),
        Binding("left_curly_bracket", f"jump({-LEAP_S})", f"{LEAP_S} s back", show=False),
        Binding("circumflex_accent", "place(0)", "to the begin", show=False),
        Binding("dollar_sign", "place(100)", "to the end", show=False),
        Binding("full_stop", "step('event')", "to the next event", show=False),
        Binding("comma", "step_back('event')", "to the event before", show=False),
        Binding("greater_than_sign", "step('step')", "to the next step of the engine", show=False),
        Binding("less_than_sign", "step_back('step')", "to the step before", show=False),
        Binding("T", "step('token')", "to the next token", show=False),
        Binding("N", "step('stage')", "to the next change of a stage", show=False),
        Binding("B", "bookmark", "mark this place, or take the mark away", show=False),
        Binding("apostrophe", "next_bookmark", "to the next mark", show=False),
        Binding("exclamation_mark", "next_finding", "to the next finding", show=False),
        Binding("I", "idle", "show or jump over idle stretches", show=False),
        Binding("L", "loop", "begin again at the end, or not", show=False),
    ]

    def __init__(
        self,
        player: Player,
        *,
        title: str = "",
        look: Look | None = None,
        find_findings: FindFindings | None = None,
    ) -> None:
        super().__init__(player, title=title, mode="replay", look=look)
        self.player = player
        self._find_findings = find_findings
        self._finding = ""
        """What the search for findings came to, once it has ended."""
        self._searching: asyncio.Task[None] | None = None
        self._findings: list[Mark] = []
        self._recorded = list(player.bookmarks)
        self._keeps = True
        try:
            player.bookmarks = sorted(
                [*player.bookmarks, *bookmarks.read(player.trace.path)], key=lambda mark: mark.t
            )
        except BookmarkError as error:
            self._keeps = False
            self.note = str(error)

    # --- the foot of every screen

    def new_footer(self, look: Look) -> ReplayFooter:
        """The timeline."""
        return ReplayFooter(look, self.player)

    def on_mount(self) -> None:
        """Look for findings where that takes no time worth mentioning."""
        if self.player.trace.events <= FEW_EVENTS:
            self._search()

    def tick(self) -> None:
        """The playhead moves while nothing happens, too."""
        super().tick()
        footer = self._footer
        if footer is not None and self.at_rest:
            footer.show()

    @property
    def line(self) -> LineInput | None:
        """The line to type a place in, or the screen's own."""
        footer = self._footer
        return footer.line if footer is not None and footer.line.shown else super().line

    @property
    def _footer(self) -> ReplayFooter | None:
        screen = self.screen if self.screen_stack else None  # none is left on the way out
        footer = screen.footer if isinstance(screen, FrameScreen) else None
        return footer if isinstance(footer, ReplayFooter) else None

    def notices(self, snapshot: Snapshot) -> tuple[Notice, ...]:
        """What is wrong with the file, before what was wrong with the engine."""
        trace = self.player.trace
        damage = tuple(
            Notice(f"{trace.path.name} {problem}", False) for problem in trace.problems[:1]
        )
        return (*damage, *super().notices(snapshot))

    # --- playing

    def action_pause(self) -> None:
        """Play or pause."""
        self.player.toggle()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Faster and slower are the player's here, whether or not there is traffic."""
        return True if action in ("faster", "slower") else super().check_action(action, parameters)

    def action_faster(self) -> None:
        """Play faster."""
        self.player.faster()

    def action_slower(self) -> None:
        """Play slower."""
        self.player.slower()

    def action_idle(self) -> None:
        """Show stretches in which nothing happens, or jump over them."""
        self.player.idle_s = IDLE_S if self.player.idle_s is None else None
        self.note = "idle stretches are " + (
            "shown" if self.player.idle_s is None else "jumped over"
        )

    def action_loop(self) -> None:
        """Begin again at the end, or stop there."""
        self.player.loop = not self.player.loop
        self.note = "begins again at the end" if self.player.loop else "stops at the end"

    # --- going somewhere

    def action_jump(self, seconds: int) -> None:
        """Some seconds on or back."""
        self.player.seek_by(seconds * NS_PER_S)

    def action_step(self, what: str) -> None:
        """To the next event, step, token or change of stage, and stop there."""
        steps = {
            "event": self.player.step_event,
            "step": self.player.step_step,
            "token": self.player.step_token,
            "stage": self.player.step_stage,
        }
        steps[what]()

    def action_step_back(self, what: str) -> None:
        """To the event or step before."""
        (self.player.back_step if what == "step" else self.player.back_event)()

    def action_place(self, percent: int) -> None:
        """To a place, in percent of the trace."""
        self.player.seek_fraction(percent / 100)

    def action_go_to(self) -> None:
        """Type where to go."""
        footer = self._footer
        if footer is not None and not footer.line.shown and isinstance(self.screen, FrameScreen):
            footer.open(self.screen.focused)
            self.screen.place()

    @on(PlaceInput.Entered)
    def _entered(self, message: PlaceInput.Entered) -> None:
        self._leave_line()
        if message.text.strip():
            self.note = self.go_to(message.text.strip())

    @on(PlaceInput.Left)
    def _leave_line(self) -> None:
        footer, screen = self._footer, self.screen
        if footer is not None and isinstance(screen, FrameScreen):
            screen.set_focus(footer.close())
            screen.place()

    @on(Timeline.Chosen)
    def _chosen(self, message: Timeline.Chosen) -> None:
        self.player.seek_fraction(message.fraction)

    def go_to(self, text: str) -> str:
        """Go to the place that `text` means; what came of it, in one sentence."""
        player = self.player
        if text.lower() in ("finding", "!"):
            self.action_next_finding()
            return self.note
        if text.lower() in ("mark", "bookmark", "'"):
            self.action_next_bookmark()
            return self.note
        if player.state.requests.find(text) is None:
            try:
                player.seek(instant(text, player.trace, player.now()))
            except PlaceError:
                pass
            else:
                return f"at {self._where(player)}"
        if player.seek_request(text):
            return f"at {self._where(player)}, where {text} was received"
        return f"no request {text} in this trace, and no time such as 1:30 or 50%"

    def _where(self, player: Player) -> str:
        target = player.target
        return clock_of((player.now() if target is None else target) - player.trace.begin)

    # --- marks

    def action_bookmark(self) -> None:
        """Mark this place, or take the mark away that is there."""
        player = self.player
        there = player.bookmark()
        kept = [mark for mark in player.bookmarks if mark not in self._recorded]
        self.note = f"{'marked' if there else 'no mark at'} {self._where(player)}"
        if not self._keeps:
            return
        try:
            bookmarks.write(player.trace.path, kept)
        except BookmarkError as error:
            self.note = f"{error}: they last as long as this screen"

    def action_next_bookmark(self) -> None:
        """To the next mark."""
        if not self.player.next_bookmark():
            self.note = "no marks yet: B marks a place"
            return
        self._say_arrived(self.player.bookmarks)

    def _say_arrived(self, marks: Iterable[Mark]) -> None:
        """Say what is marked where the player is sent."""
        at = self.player.now() if self.player.target is None else self.player.target
        text = next((mark.text for mark in marks if mark.t == at and mark.text), "")
        self.note = f"{self._where(self.player)} {text}".rstrip()

    # --- findings

    async def seek_to(self, t: int) -> bool:
        """Send the player to the instant `t` (ns) and wait until it has arrived. Return False when
        the user sent it elsewhere meanwhile."""
        self.player.seek(t)
        target = self.player.target
        while target is not None and self.player.target == target:
            await asyncio.sleep(0.05)
        return self.player.target is None

    def action_next_finding(self) -> None:
        """To the next finding; the trace is searched for them first."""
        if self._findings:
            self.player.next_finding()
            self._say_arrived(self._findings)
        elif self._finding:
            self.note = self._finding
        else:
            self._search(go=True)
            self.note = (
                "looking for findings …"
                if self._searching is not None
                else "nobody to ask for findings"
            )

    def _search(self, *, go: bool = False) -> None:
        if self._find_findings is not None and self._searching is None:
            self._searching = asyncio.create_task(self._look_for_findings(self._find_findings, go))

    async def _look_for_findings(self, find: FindFindings, go: bool) -> None:
        try:
            self._findings = list(await find())
        except OSError as error:
            self._finding = f"the findings could not be told: {error}"
        else:
            self._finding = "the diagnosis finds nothing in this trace"
            self.player.findings = sorted({mark.t for mark in self._findings})
        if go:
            self.action_next_finding()

    async def on_unmount(self) -> None:
        """The search ends with the screen."""
        if self._searching is not None:
            self._searching.cancel()
            await asyncio.gather(self._searching, return_exceptions=True)

    # --- command palette

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the keys of the player do."""
        yield SystemCommand(
            "Go to", "A time, a share, a request's id, finding or mark", self.action_go_to
        )
        yield SystemCommand("Mark", "Mark this place, or take the mark away", self.action_bookmark)
        yield SystemCommand("Next mark", "Go to the next mark", self.action_next_bookmark)
        yield SystemCommand(
            "Next finding", "Go to the next finding of the diagnosis", self.action_next_finding
        )
        yield SystemCommand("Idle", "Show idle stretches, or jump over them", self.action_idle)
        yield SystemCommand("Loop", "Begin again at the end, or not", self.action_loop)
        yield from super().get_system_commands(screen)

"""The same screens over a recorded trace, with the keys of a player."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding

from tracer.clock import NS_PER_S
from tracer.player import Player
from tracer.tui.app import TracerApp

JUMP_S = 10
"""Seconds of the trace that one key jumps."""


class ReplayApp(TracerApp):
    """Shows what a player plays. What freezes a live screen pauses the player here."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("space", "pause", "play or pause", show=False),
        Binding("plus,equals_sign", "faster", "play faster", show=False),
        Binding("minus", "slower", "play slower", show=False),
        Binding("right_square_bracket", "jump(1)", f"{JUMP_S} s on", show=False),
        Binding("left_square_bracket", "jump(-1)", f"{JUMP_S} s back", show=False),
        Binding("full_stop", "step('event')", "to the next event", show=False),
        Binding("comma", "event_before", "to the event before", show=False),
        Binding("greater_than_sign", "step('step')", "to the next step of the engine", show=False),
        Binding("k", "step('token')", "to the next token", show=False),
        Binding("g", "step('stage')", "to the next change of a stage", show=False),
        Binding("0", "place(0)", "to the begin", show=False),
        Binding("9", "place(100)", "to the end", show=False),
        Binding("B", "bookmark", "mark this place", show=False),
        Binding("quotation_mark", "next_bookmark", "to the next mark", show=False),
    ]

    def __init__(self, player: Player, *, title: str = "") -> None:
        super().__init__(player, title=title, mode="replay")
        self.player = player

    def action_pause(self) -> None:
        """Play or pause."""
        self.player.toggle()

    def action_faster(self) -> None:
        """Play faster."""
        self.player.faster()

    def action_slower(self) -> None:
        """Play slower."""
        self.player.slower()

    def action_jump(self, sign: int) -> None:
        """Some seconds on or back."""
        self.player.seek_by(sign * JUMP_S * NS_PER_S)

    def action_step(self, what: str) -> None:
        """To the next event, step, token or change of stage, and stop there."""
        steps = {
            "event": self.player.step_event, "step": self.player.step_step, "token": self.player.step_token,
            "stage": self.player.step_stage,
        }  # fmt: skip
        steps[what]()

    def action_event_before(self) -> None:
        """To the event before."""
        self.player.back_event()

    def action_place(self, percent: int) -> None:
        """To a place, in percent of the trace."""
        self.player.seek_fraction(percent / 100)

    def action_bookmark(self) -> None:
        """Mark this place."""
        self.player.bookmark()

    def action_next_bookmark(self) -> None:
        """To the next mark."""
        self.player.next_bookmark()

"""What a replay adds at the foot of every screen: the timeline, and in its place a line to type
where to go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.geometry import Region
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input

from tracer.replay.player import Player
from tracer.tui.replay.timeline import Timeline
from tracer.tui.toolkit.line_input import LineInput, LineLabel
from tracer.tui.toolkit.theme import Look

LABEL = 8


class PlaceInput(LineInput):
    """Takes a place; nobody but the replay hears of it."""

    class Entered(Message):
        """A place was typed."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Left(Message):
        """Nothing was typed after all."""

    def on_input_changed(self, event: Input.Changed) -> None:
        """No screen filters by it."""
        event.stop()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        event.stop()
        self.post_message(self.Entered(event.value))

    def on_line_input_cancelled(self, event: LineInput.Cancelled) -> None:
        """Escape."""
        event.stop()
        self.post_message(self.Left())


class ReplayFooter:
    """One row: the timeline, or the line to type a place while that is asked for."""

    def __init__(self, look: Look, player: Player) -> None:
        self.timeline = Timeline(look, player)
        self.label = LineLabel(look, id="place-label")
        self.line = PlaceInput(look, id="place")
        self._focused: Widget | None = None

    @property
    def widgets(self) -> Sequence[Widget]:
        """All its widgets."""
        return (self.timeline, self.label, self.line)

    def tiles(self, y: int, width: int) -> Mapping[Widget, Region]:
        """Where they lie in the row `y`."""
        if not self.line.shown:
            return {self.timeline: Region(0, y, width, 1)}
        label = min(LABEL, width // 3)
        return {self.label: Region(0, y, label, 1), self.line: Region(label, y, width - label, 1)}

    def show(self) -> None:
        """Draw the timeline again."""
        self.timeline.repaint()

    def open(self, focused: Widget | None) -> None:
        """Ask for a place; `focused` gets the focus back."""
        self._focused = focused
        self.label.show("go to")
        self.line.open("place", "", "1:30, 50%, +10, a request's id, finding, mark")

    def close(self) -> Widget | None:
        """The timeline again; who had the focus."""
        self.line.close()
        return self._focused

"""Help: the keys of the screen in front, the twelve stages, and what the glyphs mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.actions import parse
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.keys import format_key
from textual.screen import Screen
from textual.widget import Widget

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.tui.screens.base import FrameScreen, column
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.scroll_card import ScrollCard
from tracer.tui.toolkit.theme import Look

TERMS = (
    ("QUEUE", "admission: handed to the engine until first scheduled"),
    ("PREFILL", "first scheduled until the first token is known"),
    ("TTFT", "received until the first token is handed out"),
    ("ITL", "gap between consecutive tokens of a request"),
    ("TPOT", "mean gap between the tokens of a request, after the first"),
    ("E2E", "received until the response is closed"),
    ("HITS", "share of prompt tokens served from the prefix cache"),
    ("BUDGET", "share of the token budget of a step that is used"),
    ("KV", "share of cache blocks that are live or cached"),
    ("tok/s", "output tokens a second over the time window"),
    ("Q, B, P", "waiting in the queue, running in the batch, preempted"),
)
WORDS = ("enter", "backspace")
"""Keys written as words: Textual has signs for them that not every terminal shows."""


class HelpPanel(ScrollCard):
    """Keys, stages, glyphs and figures."""

    pad = 0

    def __init__(self, look: Look, keys: list[tuple[str, str]]) -> None:
        super().__init__(look, id="help")
        self.keys = keys

    def title(self) -> str:
        return "help"

    def rows(self, width: int) -> list[Row]:
        look, glyphs = self.look, self.look.glyphs
        rows: list[Row] = [blank(width, look.text), *self._keys(width), blank(width, look.text)]
        rows.append(self._heading(width, "The twelve stages of a request"))
        for info in STAGES:
            line = Line(width).add("  ", look.text)
            line.add(look.fill(info.stage) * 2, look.stage(info.stage))
            line.add(f" {int(info.stage):2d} ", look.dim).add(info.label.ljust(12), look.bold)
            line.add(f"{info.begins} {glyphs.arrow} {info.ends}", look.text)
            bound = f"   bounded by {info.bounded_by}"
            if line.room > len(bound):
                line.add(bound, look.dim)
            rows.append(line.end(look.text))
        for mark, style, meaning in (
            (glyphs.wait * 2, look.stage(Stage.ADMISSION), "waiting: not being worked on"),
            (glyphs.preempted, look.bad, "preempted: lost its blocks, waits and computes again"),
            (glyphs.dot * 2, look.dim, "no stage covers this time"),
            (glyphs.expected, look.bold, "expected end of a stage or request, or first token"),
        ):
            line = Line(width).add("  ", look.text).add(mark.ljust(2), style)
            rows.append(line.add(f"    {meaning}", look.text).end(look.text))
        if not look.fine:
            line = Line(width).add("  by group: ", look.dim)
            for group in Group:
                line.add(glyphs.fill[group], look.text).add(f" {group.value}  ", look.dim)
            rows.append(line.end(look.text))
        rows.append(blank(width, look.text))
        rows.append(self._heading(width, "The figures: p50, p95, p99 over the time window"))
        for name, meaning in TERMS:
            line = Line(width).add(f"  {name}".ljust(13), look.accent)
            rows.append(line.add(meaning, look.text).end(look.text))
        return rows

    def _keys(self, width: int) -> list[Row]:
        """Return the keys in as many columns as fit."""
        look = self.look
        columns = max(1, min(3, width // 44))
        height = -(-len(self.keys) // columns)
        rows: list[Row] = []
        for row in range(height):
            line = Line(width)
            for place, (key, meaning) in enumerate(self.keys[row::height]):
                line.fill_to(place * (width // columns), look.text)
                line.add(f"  {key} ".ljust(13), look.accent).add(meaning, look.text)
            rows.append(line.end(look.text))
        return rows

    def _heading(self, width: int, text: str) -> Row:
        return Line(width).add(f"  {text}", self.look.bold).end(self.look.text)


class HelpScreen(FrameScreen):
    """Shown over any screen; Esc, ? or q go back."""

    NAME = "Help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "leave", "back", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move(-20)", "page up", show=False),
        Binding("pagedown,space", "move(20)", "page down", show=False),
    ]

    def __init__(self, look: Look, over: Screen[object]) -> None:
        super().__init__(look)
        self.panel = HelpPanel(look, keys_of(over))

    def compose(self) -> ComposeResult:
        yield from (self.panel, self.key_bar)

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        keys = 1 if size.height >= 3 else 0
        return column(0, 0, size.width, [(self.panel, size.height - keys), (self.key_bar, keys)])

    def draw(self) -> None:
        self.panel.repaint()
        self.key_bar.show([Key("Esc", "back", "leave"), Key("Down", "more", "move(5)")])

    def action_leave(self) -> None:
        self.dismiss()

    def action_move(self, rows: int) -> None:
        self.panel.scroll_rows(rows)


def keys_of(screen: Screen[object]) -> list[tuple[str, str]]:
    """Return (keys, meaning) of all that a screen and the app react to now."""
    app = screen.app
    found: list[tuple[str, str]] = []
    for binding in (*screen.BINDINGS, *app.BINDINGS):
        assert isinstance(binding, Binding)
        if binding in app.BINDINGS:
            _, action, parameters = parse(binding.action)
            if app.check_action(action, parameters) is False:
                continue
        keys = " ".join(
            key if key in WORDS else format_key(key).replace("ctrl+", "^")
            for key in binding.key.split(",")
        )
        found.append((keys, binding.description))
    return [*found, ("tab", "focus the next part"), ("^p", "command palette")]

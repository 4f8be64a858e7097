"""Help: the keys of the screen in front, the twelve stages, and what the glyphs mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.actions import parse
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.keys import key_to_character
from textual.screen import Screen
from textual.widget import Widget

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.tui.screens.base import FrameScreen
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

TERMS = (
    ("QUEUE", "admission: handed to the engine until first scheduled"),
    ("PREFILL", "first scheduled until the first token is known"),
    ("TTFT", "received until the first token is handed out"),
    ("ITL", "gap between consecutive tokens of a request"),
    ("KV", "share of cache blocks that are live or cached"),
    ("tok/s", "output tokens a second over the window"),
)
PRETTY = {
    "question_mark": "?",
    "slash": "/",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "escape": "Esc",
    "enter": "Enter",
    "space": "Space",
    "up": "Up",
    "down": "Down",
    "left": "Left",
    "right": "Right",
    "home": "Home",
    "end": "End",
    "backspace": "Backspace",
}


class HelpPanel(Panel):
    """The text, scrolled by rows."""

    def __init__(self, look: Look, keys: list[tuple[str, str]]) -> None:
        super().__init__(look, id="help")
        self.keys = keys
        self.top = 0

    def title(self) -> str:
        return "help"

    def scroll_rows(self, rows: int) -> None:
        """Scroll by rows (+ is down)."""
        most = max(0, len(self._text_rows(self.size.width)) - max(1, self.size.height - 1))
        self.top = max(0, min(most, self.top + rows))
        self.repaint()

    def body(self, width: int, height: int) -> list[Row]:
        return self._text_rows(width)[self.top : self.top + height]

    def _text_rows(self, width: int) -> list[Row]:
        look = self.look
        rows: list[Row] = [blank(width, look.text)]
        per_row = max(1, min(3, width // 44))
        cells = width // per_row
        lines = -(-len(self.keys) // per_row)
        for row in range(lines):
            line = Line(width)
            for at in range(per_row):
                index = at * lines + row
                if index < len(self.keys):
                    key, what = self.keys[index]
                    line.fill_to(at * cells, look.text).put(f"  {key} ".ljust(13), look.accent).put(
                        what, look.text
                    )
            rows.append(line.end(look.text))
        rows += [blank(width, look.text), self._heading(width, "The twelve stages of a request")]
        for info in STAGES:
            line = (
                Line(width)
                .put("  ", look.text)
                .put(look.fill(info.stage) * 2, look.stage(info.stage))
            )
            line.put(f" {int(info.stage):2d} ", look.dim).put(info.label.ljust(12), look.bold)
            line.put(f"{info.begins} {look.glyphs.arrow} {info.ends}", look.text)
            bound = f"   bounded by {info.bounded_by}"
            if line.room > len(bound):
                line.put(bound, look.dim)
            rows.append(line.end(look.text))
        line = (
            Line(width).put("  ", look.text).put(look.glyphs.wait * 2, look.stage(Stage.ADMISSION))
        )
        rows.append(line.put("    waiting: nobody works on it", look.text).end(look.text))
        line = Line(width).put("  ", look.text).put(look.glyphs.preempted + " ", look.bad)
        rows.append(
            line.put("    preempted: lost its place, waits and computes again", look.text).end(
                look.text
            )
        )
        line = Line(width).put("  ", look.text).put(look.glyphs.dot * 2, look.dim)
        rows.append(line.put("    no stage covers this time", look.text).end(look.text))
        line = Line(width).put("  ", look.text).put(look.glyphs.expected + " ", look.bold)
        said = (
            "    expected by the model: the end of a stage or request; of one that runs, its first "
            "token"
        )
        rows.append(line.put(said, look.text).end(look.text))
        if not look.fine:
            line = Line(width).put("  by group: ", look.dim)
            for group in Group:
                line.put(look.glyphs.fill[group], look.text).put(f" {group.value}  ", look.dim)
            rows.append(line.end(look.text))
        rows += [
            blank(width, look.text),
            self._heading(width, "The figures: p50, p95, p99 over the window"),
        ]
        for name, meaning in TERMS:
            rows.append(
                Line(width)
                .put(f"  {name}".ljust(13), look.accent)
                .put(meaning, look.text)
                .end(look.text)
            )
        return rows

    def _heading(self, width: int, text: str) -> Row:
        return Line(width).put(f"  {text}", self.look.bold).end(self.look.text)


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
        """The text and the key line."""
        yield self.panel
        yield self.key_bar

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """All of it."""
        keys = 1 if size.height >= 3 else 0
        regions: dict[Widget, Region] = {self.panel: Region(0, 0, size.width, size.height - keys)}
        if keys:
            regions[self.key_bar] = Region(0, size.height - 1, size.width, 1)
        return regions

    def draw(self) -> None:
        """Nothing in it changes by itself."""
        self.panel.repaint()
        self.key_bar.show([Key("Esc", "back", "leave"), Key("Down", "more", "move(5)")])

    def action_leave(self) -> None:
        """Back."""
        self.dismiss()

    def action_move(self, rows: int) -> None:
        """Scroll."""
        self.panel.scroll_rows(rows)


def _possible(app: App[object], binding: Binding) -> bool:
    """Whether what a key of the app does can be done now."""
    _, name, parameters = parse(binding.action)
    return app.check_action(name, parameters) is not False


def _shown(key: str) -> str:
    """A key as it is written on a keyboard."""
    return PRETTY.get(key) or key_to_character(key) or key.replace("ctrl+", "^")


def keys_of(screen: Screen[object]) -> list[tuple[str, str]]:
    """(keys, meaning) of everything that a screen and the app react to, without what is not
    possible now."""
    found: list[tuple[str, str]] = []
    app = screen.app
    for node in (screen, app):
        for binding in node.BINDINGS:
            if not isinstance(binding, Binding):
                continue
            if node is app and not _possible(app, binding):
                continue
            keys = " ".join(map(_shown, binding.key.split(",")))
            found.append((keys, binding.description))
    found.append(("Tab", "focus the next part"))
    found.append(("^p", "command palette"))
    return found

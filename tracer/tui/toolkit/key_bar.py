"""The last line: the keys of the screen in front, which can be clicked.

Textual's `Footer` has no place for a message, and no rule for keys that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import events

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look


@dataclass(frozen=True, slots=True)
class Key:
    """A key as shown, its name, and the action that a click runs. `on`: a switch that is on."""

    key: str
    name: str
    action: str
    on: bool = False


class KeyBar(Canvas):
    """Keys from the left, a message at the right. A new message displaces keys, an older one gives
    way to them. Keys that do not fit are left out, last ones first."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="keys")
        self.keys: Sequence[Key] = ()
        self.note = ""
        self.news = False

    def show(self, keys: Sequence[Key], note: str = "", *, news: bool = False) -> None:
        if (keys, note, news) != (self.keys, self.note, self.news):
            self.keys, self.note, self.news = keys, note, news
            self.repaint()

    def _note_cells(self, width: int) -> int:
        cells = cell_width(label(self.note))
        if not self.news:
            keys = sum(len(key.key) + len(key.name) + 3 for key in self.keys)
            return cells if keys + cells + 3 <= width else 0
        return min(cells, max(0, width * 2 // 3))

    def _places(self, width: int) -> list[tuple[int, int, Key]]:
        places: list[tuple[int, int, Key]] = []
        note = self._note_cells(width)
        end = width - (note + 3 if note else 0)
        at = 1
        for key in self.keys:
            cells = len(key.key) + len(key.name) + 1
            if at + cells > end:
                break
            places.append((at, cells, key))
            at += cells + 2
        return places

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        line = Line(width)
        for at, _, key in self._places(width):
            line.fill_to(at, look.key_text)
            line.add(key.key, look.key).add(" ", look.key_text)
            line.add(key.name, look.key_on if key.on else look.key_text)
        note = self._note_cells(width)
        if note:
            line.fill_to(width - note - 1, look.key_text)
            line.add_text(self.note, look.panel, note)
        return [line.end(look.key_text)]

    async def on_click(self, event: events.Click) -> None:
        for at, cells, key in self._places(self.size.width):
            if at <= event.x < at + cells:
                await self.app.run_action(key.action, self.screen)
                return

"""The last line: the keys of the screen in front, which can be clicked too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import events

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look


@dataclass(frozen=True, slots=True)
class Key:
    """A key as shown, what it does in a word, and the action that a click runs. `on` marks a switch
    that is on."""

    key: str
    name: str
    action: str
    on: bool = False


class KeyBar(Canvas):
    """Keys from the left, a word about the state at the right. A word that is news goes before the
    keys, an older one after them. Keys that do not fit are left out, last ones first."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="keys")
        self.add_class("tile")
        self.keys: Sequence[Key] = ()
        self.note = ""
        self.news = False

    def show(self, keys: Sequence[Key], note: str = "", *, news: bool = False) -> None:
        """Draw these keys and a word about the state."""
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
        """The row."""
        look = self.look
        line = Line(width)
        for at, _, key in self._places(width):
            line.fill_to(at, look.key_text)
            line.put(key.key, look.key).put(" ", look.key_text)
            line.put(key.name, look.key_on if key.on else look.key_text)
        note = self._note_cells(width)
        if note:
            line.fill_to(width - note - 1, look.key_text)
            line.put_text(self.note, look.panel, note, ellipsis=look.glyphs.ellipsis)
        return [line.end(look.key_text)]

    async def on_click(self, event: events.Click) -> None:
        """Do what the key does."""
        for at, cells, key in self._places(self.size.width):
            if at <= event.x < at + cells:
                await self.app.run_action(key.action, self.screen)
                return

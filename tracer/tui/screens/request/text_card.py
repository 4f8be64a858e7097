"""Prompt and output of one request as the model gets and gives them: wrapped, scrollable, special
tokens visible."""

from __future__ import annotations

from rich.segment import Segment
from textual import events

from tracer.format.text import cell_width, clean, fit
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.wrapped import wrap

IDS_SHOWN = 6
"""Token ids shown at either end."""


class TextCard(Panel):
    """A text with a heading. `tail` keeps its end in sight while it grows."""

    pad = 1

    def __init__(
        self, look: Look, heading: str, *, id: str, edge: bool = False, tail: bool = False
    ) -> None:
        super().__init__(look, id=id, edge=edge)
        self.heading = heading
        self.tail = tail
        self.text: str | None = None
        self.absent = ""
        self.facts = ""
        self.ids: tuple[int, ...] = ()
        self.top = 0
        self.held = False
        """Whether the user has scrolled, so that the end is no longer followed."""
        self._wrapped: tuple[str | None, int, Look, list[list[Segment]]] | None = None

    def show(
        self, text: str | None, facts: str = "", ids: tuple[int, ...] = (), absent: str = ""
    ) -> None:
        """Draw a text with what is known about it; `absent` says why there is none."""
        self.text, self.facts, self.ids, self.absent = text, facts, ids, absent
        self.repaint()

    def title(self) -> str:
        return self.heading

    def note(self) -> list[Segment]:
        return [Segment(self.facts, self.look.dim)] if self.facts else []

    def _text_rows(self, width: int) -> list[list[Segment]]:
        key = (self.text, width, self.look)
        if self._wrapped is None or self._wrapped[:3] != key:
            look = self.look
            mark = look.glyphs.newline
            rows = wrap(self.text or "", width, look.text, look.special, mark)
            self._wrapped = (*key, rows)
        return self._wrapped[3]

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        if self.ids and height > 2:
            rows.append(self._ids_row(width))
        if not self.text:
            rows.append(
                Line(width)
                .put_text(self.absent, look.dim, ellipsis=look.glyphs.ellipsis)
                .end(look.text)
            )
            return rows
        wrapped = self._text_rows(width)
        room = max(0, height - len(rows))
        most = max(0, len(wrapped) - room)
        top = most if self.tail and not self.held else max(0, min(self.top, most))
        for segments in wrapped[top : top + room]:
            line = Line(width)
            for text, style, _ in segments:
                cells = min(cell_width(text), line.room)
                if cells and style is not None:
                    line.put_segments([Segment(fit(text, cells), style)], cells)
            rows.append(line.end(look.text))
        return rows

    def _ids_row(self, width: int) -> Row:
        look, ids = self.look, self.ids
        if len(ids) <= 2 * IDS_SHOWN:
            text = " ".join(str(value) for value in ids)
        else:
            dots = look.glyphs.ellipsis
            text = (
                f"{' '.join(map(str, ids[:IDS_SHOWN]))} {dots} "
                f"{' '.join(map(str, ids[-IDS_SHOWN:]))}"
            )
        return Line(width).put("ids ", look.dim).put(text, look.special).end(look.text)

    def scroll_rows(self, rows: int) -> None:
        """Scroll by rows (+ is down); at the end a growing text is followed again."""
        width = max(1, self.size.width - (3 if self.edge else 2 * self.pad))
        wrapped = self._text_rows(width)
        room = max(
            1,
            self.size.height
            - (1 if self.titled else 0)
            - (1 if self.ids and self.size.height > 3 else 0),
        )
        most = max(0, len(wrapped) - room)
        now = most if self.tail and not self.held else min(self.top, most)
        self.top = max(0, min(most, now + rows))
        self.held = self.top < most if self.tail else True
        self.repaint()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Back."""
        event.stop()
        self.scroll_rows(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """On."""
        event.stop()
        self.scroll_rows(3)


def facts_of(tokens: int | None, chars: int | None) -> str:
    """``2,000 tokens, 9,012 characters``."""
    parts = []
    if tokens is not None:
        parts.append(f"{figures.count(tokens)} tokens")
    if chars is not None:
        parts.append(f"{figures.count(chars)} characters")
    return clean(", ".join(parts))

"""A canvas with a title row, as the parts of a screen have them: ``├─ KV cache ─ 63 % ───``."""

from __future__ import annotations

from rich.segment import Segment

from tracer.tui.canvas import Canvas, Line, Row, blank
from tracer.tui.theme import Look


class Panel(Canvas):
    """A titled block. `edge` draws the line to the neighbour on the left as the first column.

    Subclasses give `title`, a `note` for the right end of the title row, and `body`.
    """

    can_focus = True

    def __init__(self, look: Look, *, id: str | None = None, edge: bool = False, first: bool = False) -> None:
        super().__init__(look, id=id)
        self.add_class("tile")
        self.edge = edge
        self.first = first

    def title(self) -> str:
        """Heading, ours or cleaned."""
        return ""

    def note(self) -> list[Segment]:
        """What stands at the right end of the title row."""
        return []

    def body(self, width: int, height: int) -> list[Row]:
        """Rows below the title."""
        raise NotImplementedError

    def head(self, width: int) -> Row:
        """The title row."""
        look, glyphs = self.look, self.look.glyphs
        line = Line(width)
        rule = look.faint
        if self.edge:
            line.put(glyphs.tee_down if self.first else glyphs.tee_right, rule)
        line.put(glyphs.horizontal, rule)
        title = self.title()
        note = self.note()
        note_cells = sum(len(segment.text) for segment in note)
        style = look.accent if self.has_focus else look.bold
        if self.has_focus and not look.palette.accent:
            style = look.style("", None, "bold reverse")
        room = max(0, width - line.used - (note_cells + 3 if note else 0) - 1)
        if title and room > 2:
            line.put(" ", rule).put_text(title, style, min(room, _cells(title)), ellipsis=glyphs.ellipsis).put(" ", rule)
        if note and line.room >= note_cells + 3:
            line.fill_to(width - note_cells - 3, rule, glyphs.horizontal)
            line.put(" ", rule).put_segments(note, note_cells).put(" ", rule)
        return line.end(rule, glyphs.horizontal)

    def paint(self, width: int, height: int) -> list[Row]:
        """Title and body, with the edge in front of each row."""
        if height < 1 or width < 1:
            return []
        inner = width - 2 if self.edge else width
        rows = [self.head(width)]
        body = self.body(max(0, inner), height - 1) if inner > 0 and height > 1 else []
        if not self.edge:
            return rows + body
        edge = [Segment(self.look.glyphs.vertical, self.look.faint), Segment(" ", self.look.text)]
        for row in body[: height - 1]:
            rows.append([*edge, *row])
        while len(rows) < height:
            rows.append([*edge, *blank(inner, self.look.text)] if inner > 0 else edge[:width])
        return rows


def _cells(text: str) -> int:
    from tracer.text import cell_width, clean

    return cell_width(clean(text))

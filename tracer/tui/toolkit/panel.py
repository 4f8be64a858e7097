"""A canvas with a title row: ``├─ KV cache ─ 63 % ───``."""

from __future__ import annotations

from rich.segment import Segment

from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, blank, label
from tracer.tui.toolkit.theme import Look


class Panel(Canvas):
    """A titled block. `edge` draws the line to the neighbour on the left as the first column.

    Subclasses give `title`, a `note` for the right end of the title row, and `body`.
    """

    can_focus = True
    pad = 0
    """Cells left free on either side where there is no edge."""

    def __init__(
        self, look: Look, *, id: str | None = None, edge: bool = False, first: bool = False
    ) -> None:
        super().__init__(look, id=id)
        self.edge = edge
        self.first = first
        self.titled = True
        """False where a line of tabs stands in for the title row."""

    def title(self) -> str:
        return ""

    def note(self) -> list[Segment]:
        """Return the right end of the title row."""
        return []

    def body(self, width: int, height: int) -> list[Row]:
        """Return the rows below the title."""
        raise NotImplementedError

    def head(self, width: int) -> Row:
        look, glyphs = self.look, self.look.glyphs
        line = Line(width)
        rule = look.faint
        if self.edge:
            line.add(glyphs.tee_down if self.first else glyphs.tee_right, rule)
        line.add(glyphs.horizontal, rule)
        title = self.title()
        note, note_cells = clean_note(self.note())
        style = look.accent if self.has_focus else look.bold
        if self.has_focus and not look.palette.accent:
            style = look.style("", None, "bold reverse")
        room = max(0, width - line.used - (note_cells + 3 if note else 0) - 1)
        if title and room > 2:
            line.add(" ", rule).add_text(title, style, min(room, cell_width(label(title))))
            line.add(" ", rule)
        if note and line.room >= note_cells + 3:
            line.fill_to(width - note_cells - 3, rule, glyphs.horizontal)
            line.add(" ", rule).add_segments(note, note_cells).add(" ", rule)
        return line.end(rule, glyphs.horizontal)

    def paint(self, width: int, height: int) -> list[Row]:
        if height < 1 or width < 1:
            return []
        look = self.look
        rows: list[Row] = [self.head(width)] if self.titled else []
        room = height - len(rows)
        margin = Segment(" ", look.text)
        if self.edge:
            left, right = [Segment(look.glyphs.vertical, look.faint), margin], [margin]
        else:
            left, right = [margin] * self.pad, [margin] * self.pad
        inner = width - len(left) - len(right)
        if inner < 1:
            filler = ([*left, *right] + [margin] * width)[:width]
            return rows + [filler] * room
        body = self.body(inner, room)[:room] if room > 0 else []
        rows.extend([[*left, *row, *right] for row in body] if left or right else body)
        return rows + [[*left, *blank(inner, look.text), *right]] * (height - len(rows))


def clean_note(note: list[Segment]) -> tuple[list[Segment], int]:
    """Return a note with its text cleaned, and its cells."""
    cleaned = [Segment(label(text), style) for text, style, _ in note]
    return cleaned, sum(cell_width(segment.text) for segment in cleaned)

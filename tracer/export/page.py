"""Lines of text for a terminal or a pipe: cropped, cleaned, in ASCII where nothing else can be
printed."""

from __future__ import annotations

import textwrap

from rich.cells import chop_cells

from tracer.format.text import cell_width, clean, fit, to_ascii


class Run(str):
    """Glyphs of a bar, with the SGR code of their colour (0: none)."""

    __slots__ = ("code",)
    code: int

    @classmethod
    def of(cls, glyphs: str, code: int) -> Run:
        run = cls(glyphs)
        run.code = code
        return run


class Page:
    """Lines of at most `width` cells; everything that is put on it is cleaned."""

    def __init__(self, width: int, unicode: bool, colour: bool = False) -> None:
        self.width = max(1, width)
        self.unicode = unicode
        self._colour = colour
        self._lines: list[str] = []

    def plain(self, text: str) -> str:
        """Return `text` as it may be printed: cleaned, and ASCII where nothing else can be."""
        return clean(text) if self.unicode else to_ascii(clean(text))

    def line(self, text: str = "") -> None:
        """Append one line, cropped."""
        self._lines.append(self._crop(self.plain(text), self.width).rstrip())

    def flow(self, *parts: str) -> None:
        """Append parts side by side, on as many lines as they take."""
        line = ""
        for part in filter(None, parts):
            longer = f"{line} · {part}" if line else part
            if line and cell_width(self.plain(longer)) > self.width:
                self.line(line)
                longer = part
            line = longer
        self.line(line)

    def wrapped(self, text: str, lead: str = "") -> None:
        """Append a sentence on as many lines as it takes, the later ones indented like the first
        one after its `lead`."""
        lead = self.plain(lead)
        indent = cell_width(lead)
        room = max(8, self.width - indent)
        for row in textwrap.wrap(self.plain(text), room, break_on_hyphens=False) or [""]:
            self.line(lead + row)
            lead = " " * indent

    def row(self, *cells: tuple[str, int]) -> None:
        """Append a row of a table: each cell with its width, left-aligned where that is
        negative."""
        self.line("".join(_cell(self.plain(text), width) for text, width in cells))

    def pieces(self, *pieces: str) -> None:
        """Append one line out of pieces, of which bars keep their colour."""
        left, line = self.width, ""
        for piece in pieces:
            text = self._crop(piece if isinstance(piece, Run) else self.plain(piece), left)
            left -= cell_width(text)
            code = piece.code if isinstance(piece, Run) and self._colour else 0
            line += f"\x1b[{code}m{text}\x1b[0m" if code and text else text
        self._lines.append(line.rstrip())

    def block(self, text: str, lines: int) -> None:
        """Append untrusted text of several lines, wrapped and indented; what is beyond `lines` is
        said to be left out."""
        rows: list[str] = []
        for row in clean(text, keep_newlines=True).split("\n"):
            rows.extend(chop_cells(self.plain(row), max(2, self.width - 2)) or [""])
            if len(rows) > lines:
                break
        for row in rows[:lines]:
            self.line(f"  {row}")
        if len(rows) > lines:
            self.line("  …")

    def text(self) -> str:
        return "\n".join(self._lines)

    def _crop(self, text: str, cells: int) -> str:
        if cell_width(text) <= cells:
            return text
        return fit(text, cells, ellipsis="…" if self.unicode else "~")


def _cell(text: str, width: int) -> str:
    return right(text, width) if width >= 0 else fit(text, -width)


def right(text: str, width: int) -> str:
    """Return `text` right-aligned in `width` cells, cropped so that a space is left before it."""
    used = cell_width(text)
    return " " * (width - used) + text if used < width else " " + fit(text, width - 1)

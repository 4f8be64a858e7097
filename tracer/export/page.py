"""Lines of text for a terminal or a pipe: cropped, cleaned, in ASCII where nothing else can be
printed."""

from __future__ import annotations

from typing import Final

from rich.cells import chop_cells

from tracer.format.text import cell_width, clean, fit

_ASCII: Final = str.maketrans({
    "·": "|", "→": ">", "×": "x", "–": "-", "—": "-", "…": "~", "²": "2", "µ": "u", "±": "+/-",
})  # fmt: skip


class Run(str):
    """Glyphs of a bar, with the SGR code of their colour (0: none)."""

    __slots__ = ("code",)
    code: int

    @classmethod
    def of(cls, glyphs: str, code: int) -> Run:
        """A run of `glyphs` in the colour of `code`."""
        run = cls(glyphs)
        run.code = code
        return run


class Page:
    """Lines of at most `width` cells; everything that is put on it is cleaned."""

    def __init__(self, width: int, unicode: bool, colour: bool) -> None:
        self.width = max(1, width)
        self.unicode = unicode
        self._colour = colour
        self._lines: list[str] = []

    def plain(self, text: str) -> str:
        """`text` as it may be printed: cleaned, and ASCII where nothing else can be."""
        text = clean(text)
        return (
            text
            if self.unicode
            else text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
        )

    def line(self, text: str) -> None:
        """One line, cropped."""
        self._lines.append(self._crop(self.plain(text), self.width).rstrip())

    def flow(self, *parts: str) -> None:
        """Parts side by side, on as many lines as they take."""
        line = ""
        for part in filter(None, map(self.plain, parts)):
            longer = line + self.plain(" · ") + part if line else part
            if line and cell_width(longer) > self.width:
                self.line(line)
                longer = part
            line = longer
        self.line(line)

    def pieces(self, *pieces: str) -> None:
        """One line out of pieces, of which bars keep their colour."""
        left, line = self.width, ""
        for piece in pieces:
            text = self._crop(piece if isinstance(piece, Run) else self.plain(piece), left)
            left -= cell_width(text)
            code = piece.code if isinstance(piece, Run) and self._colour else 0
            line += f"\x1b[{code}m{text}\x1b[0m" if code and text else text
        self._lines.append(line.rstrip())

    def block(self, text: str, lines: int) -> None:
        """Untrusted text of several lines, wrapped and indented; what is beyond `lines` is said to
        be left out."""
        rows: list[str] = []
        for row in clean(text, keep_newlines=True).split("\n"):
            rows.extend(chop_cells(self.plain(row), max(2, self.width - 2)) or [""])
            if len(rows) > lines:
                break
        left_out = len(rows) > lines
        for row in rows[:lines]:
            self.line(f"  {row}")
        if left_out:
            self.line("  …")

    def gap(self) -> None:
        """An empty line."""
        self._lines.append("")

    def text(self) -> str:
        """The whole page."""
        return "\n".join(self._lines)

    def _crop(self, text: str, cells: int) -> str:
        return (
            text
            if cell_width(text) <= cells
            else fit(text, cells, ellipsis="…" if self.unicode else "~")
        )

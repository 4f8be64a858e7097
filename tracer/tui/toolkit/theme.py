"""Colours and glyphs: one look for every widget.

Twelve stage colours chosen so that any two stages, and neighbours by a wide margin, stay apart for
normal, deuteranopic, protanopic and tritanopic eyes (checked in the tests with Machado's matrices
and CIEDE2000). Hue never stands alone: waits have a texture, phases are named in words, selection
has a marker, and with 16 colours or none the stages are also told apart by glyph.

Four palettes: dark and light with 24-bit colours (rich maps them to 256 where the terminal has no
more), `ansi16` for terminals of 8 or 16 colours and `mono` for NO_COLOR. The last two leave the
background to the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.theme import BUILTIN_THEMES
from textual.theme import Theme as TextualTheme

from engine_hooks.protocol.stages import Group, Stage, info
from tracer.export.stage_colours import STAGE_COLOURS_DARK, STAGE_COLOURS_LIGHT

STAGE_COLOURS_16: Final = (
    *("bright_cyan", "cyan", "bright_green", "magenta", "bright_magenta", "bright_yellow"),
    *("yellow", "bright_white", "red", "white", "blue", "bright_black"),
)


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters to draw with, one cell each.

    `eighths[n]` fills n eighths of a cell from the left, `rises[n]` from below. `fill` draws a
    group of stages where hue cannot be relied on.
    """

    fill: Mapping[Group, str]
    eighths: str = " ▏▎▍▌▋▊▉█"
    rises: str = " ▁▂▃▄▅▆▇█"
    wait: str = "░"
    head: str = "▶"
    preempted: str = "×"
    cut: str = "◂"
    grid: str = "┊"
    select: str = "▌"
    horizontal: str = "─"
    vertical: str = "│"
    tee_down: str = "┬"
    tee_right: str = "├"
    dot: str = "·"
    ring: str = "○"
    arrow: str = "→"
    ellipsis: str = "…"
    up: str = "▲"
    down: str = "▼"
    live_block: str = "■"
    cached_block: str = "□"
    free_block: str = "·"
    times: str = "×"
    warning: str = "▲"
    pause: str = "‖"
    bullet: str = "●"
    tick: str = "╵"
    line: str = "━"
    half: str = "╸"
    track: str = "─"
    newline: str = "↵"
    expected: str = "┃"
    beyond: str = "›"
    hit_block: str = "▣"
    older_block: str = "▫"
    oldest_block: str = "◦"
    ridge: str = "│"


UNICODE: Final = Glyphs(fill=dict(zip(Group, "▌▓▐█▪", strict=True)))
ASCII: Final = Glyphs(
    fill=dict(zip(Group, "|#!=+", strict=True)),
    eighths="    #####",
    rises=" __..--##",
    wait=".",
    head=">",
    preempted="x",
    cut="<",
    grid=":",
    select=">",
    horizontal="-",
    vertical="|",
    tee_down="+",
    tee_right="+",
    dot="-",
    ring="o",
    arrow=">",
    ellipsis="~",
    up="^",
    down="v",
    live_block="#",
    cached_block="+",
    free_block=".",
    times="x",
    warning="!",
    pause="=",
    bullet="*",
    tick="'",
    line="=",
    half="=",
    track="-",
    newline="",
    expected="I",
    beyond=">",
    hit_block="@",
    older_block="-",
    oldest_block=",",
    ridge="|",
)


@dataclass(frozen=True, slots=True)
class Palette:
    """Colour of each role, by name or ``#rrggbb``; an empty name leaves the terminal's own."""

    name: str
    depth: int
    """Colours that the palette counts on: 0 none, 16, or 24 for 24-bit."""
    dark: bool
    stages: tuple[str, ...] = ("",) * 12
    back: str = ""
    panel: str = ""
    selected: str = ""
    text: str = ""
    dim: str = ""
    faint: str = ""
    grid: str = ""
    accent: str = ""
    good: str = ""
    warn: str = ""
    bad: str = ""
    bad_back: str = ""
    warn_back: str = ""
    on_banner: str = ""
    special: str = ""


DARK: Final = Palette(
    "tracer-dark",
    24,
    True,
    STAGE_COLOURS_DARK,
    back="#0d1117",
    panel="#141b24",
    selected="#1e2d42",
    text="#d5dce6",
    dim="#8b97a7",
    faint="#3b4655",
    grid="#1d2530",
    accent="#76dbf6",
    good="#62d196",
    warn="#f2b84b",
    bad="#ff7b6b",
    bad_back="#8f1d1d",
    warn_back="#5a4208",
    on_banner="#ffffff",
    special="#c9a0ff",
)
LIGHT: Final = Palette(
    "tracer-light",
    24,
    False,
    STAGE_COLOURS_LIGHT,
    back="#fafaf7",
    panel="#efefea",
    selected="#dbe6f5",
    text="#1d2530",
    dim="#59636f",
    faint="#b9bfc7",
    grid="#e4e5e1",
    accent="#0b6f99",
    good="#1c7c45",
    warn="#8a5a00",
    bad="#b3241a",
    bad_back="#b3241a",
    warn_back="#f0d48a",
    on_banner="#ffffff",
    special="#6a2fb5",
)
ANSI16: Final = Palette(
    "tracer-ansi",
    16,
    True,
    STAGE_COLOURS_16,
    faint="bright_black",
    grid="bright_black",
    accent="cyan",
    good="green",
    warn="yellow",
    bad="red",
    bad_back="red",
    on_banner="bright_white",
    special="magenta",
)
MONO: Final = Palette("tracer-mono", 0, True)
PALETTES: Final = {palette.name: palette for palette in (DARK, LIGHT, ANSI16, MONO)}


BAR_OPACITY: Final = (1.0, 0.88, 0.68, 0.58)
"""How much of its colour a bar keeps: live in two shades, finished in two shades."""


def blend(colour: str, over: str, share: float) -> str:
    """Return `colour` laid over another with opacity `share`, both ``#rrggbb``."""
    mixed = (
        round(int(colour[i : i + 2], 16) * share + int(over[i : i + 2], 16) * (1 - share))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{value:02x}" for value in mixed)


class Look:
    """A palette and a set of glyphs, with every style built once.

    Styles are shared objects: comparing two cells then is comparing two pointers.
    """

    def __init__(self, palette: Palette = DARK, glyphs: Glyphs = UNICODE) -> None:
        self.palette = palette
        self.glyphs = glyphs
        self.fine = palette.depth == 24 and glyphs is UNICODE
        """True where bars may use eighths of cells and two colours in one cell."""
        self.mixed: dict[tuple[bytes, str, int], Segment] = {}
        """Cells that several stages share, as `tracer.tui.toolkit.bar` has drawn them so far."""
        self._styles: dict[tuple[str, str, str], Style] = {}
        p = palette
        mono = p.depth == 0
        self.text = self.style(p.text)
        self.bold = self.style(p.text, flags="bold")
        self.dim = self.style(p.dim, flags="" if p.dim else "dim")
        self.faint = self.style(p.faint, flags="" if p.faint else "dim")
        self.grid = self.style(p.grid, flags="" if p.grid else "dim")
        self.accent = self.style(p.accent, flags="bold")
        self.good = self.style(p.good, flags="bold")
        self.warn = self.style(p.warn, flags="bold")
        self.bad = self.style(p.bad, flags="bold")
        self.special = self.style(p.special, flags="bold" if mono else "")
        self.panel = self.style(p.text, p.panel)
        self.key = self.style(p.accent, p.panel, "bold")
        self.key_text = self.style(p.dim, p.panel)
        self.key_on = self.style(p.text, p.panel, "bold reverse" if mono else "bold underline")
        self.tab_on = self.style(
            p.accent, p.selected or p.back, "bold reverse" if not p.selected else "bold"
        )
        self.error_banner = self.style(p.on_banner, p.bad_back, "bold reverse" if mono else "bold")
        self.warn_banner = (
            self.style(p.text, p.warn_back, "bold")
            if p.warn_back
            else self.style(p.warn, flags="bold reverse")
        )

    def style(self, colour: str = "", back: str | None = None, flags: str = "") -> Style:
        """Return the shared style for a foreground, a background (None: the screen's own) and
        flags: ``bold``, ``dim``, ``reverse``, ``underline``."""
        key = (colour, self.palette.back if back is None else back, flags)
        style = self._styles.get(key)
        if style is None:
            style = self._styles[key] = Style(
                color=Color.parse(colour) if colour else None,
                bgcolor=Color.parse(key[1]) if key[1] else None,
                bold="bold" in flags or None,
                dim="dim" in flags or None,
                reverse="reverse" in flags or None,
                underline="underline" in flags or None,
            )
        return style

    def overlay(self, colour: str, back: str) -> Style:
        """Return the style of a glyph laid over a bar: bold, without colours also reverse."""
        return self.style(colour, back, "bold" if self.palette.depth else "bold reverse")

    def on(self, style: Style, back: str, *, reverse: bool = False) -> Style:
        """Return `style` on another background, or reversed on palettes without backgrounds."""
        colour = style.color.name if style.color is not None else ""
        flags = ("bold " if style.bold else "") + ("dim " if style.dim else "")
        if not back and reverse:
            return self.style("", "", ("bold " if style.bold else "") + "reverse")
        return self.style(colour, back, flags)

    @cached_property
    def stage_colours(self) -> tuple[str, ...]:
        """Colour names indexed by stage number; index 0 is unattributed time."""
        return (self.palette.faint, *self.palette.stages)

    @cached_property
    def bar_colours(self) -> tuple[tuple[str, ...], ...]:
        """`stage_colours` for bars in a list: of live requests (0, 1) and, quieter, of finished
        ones (2, 3). Two shades each, so that bars above each other do not run together."""
        if self.palette.depth < 24:
            return (self.stage_colours,) * 4
        return tuple(
            tuple(blend(colour, self.palette.back, share) for colour in self.stage_colours)
            for share in BAR_OPACITY
        )

    @cached_property
    def wait_colours(self) -> tuple[str, ...]:
        """`stage_colours` for the ground of waiting, on which a light shade is drawn."""
        if self.palette.depth < 24:
            return self.stage_colours
        return tuple(blend(colour, self.palette.back, 0.26) for colour in self.stage_colours)

    def stage(self, stage: Stage, *, bold: bool = False) -> Style:
        return self.style(self.stage_colours[stage], flags="bold" if bold else "")

    def fill(self, stage: Stage) -> str:
        """Return the glyph of a full cell: solid where colour can be relied on, else by group."""
        return "█" if self.fine else self.glyphs.fill[info(stage).group]


def textual_theme(palette: Palette) -> TextualTheme:
    """Return these colours for the stock widgets: command palette, input line, toasts."""
    p = palette
    if p.depth < 24:
        return replace(BUILTIN_THEMES["ansi-dark"], name=p.name)
    return TextualTheme(
        name=p.name,
        primary=p.stages[Stage.DECODE - 1],
        secondary=p.accent,
        accent=p.accent,
        foreground=p.text,
        background=p.back,
        surface=p.panel,
        panel=p.panel,
        success=p.good,
        warning=p.warn,
        error=p.bad,
        dark=p.dark,
    )


def choose_glyphs(encoding: str | None = None) -> Glyphs:
    """Return Unicode where the terminal's stream can encode it, ASCII otherwise. The TUI writes to
    standard error."""
    try:
        "█▏▁░▶×─│┊→…●■□▣▫◦↵".encode(
            encoding or getattr(sys.__stderr__, "encoding", None) or "ascii"
        )
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


def choose_palette(*, no_color: bool, colours: str | None) -> Palette:
    """Return the palette for a terminal: `colours` is rich's colour system (``standard``, ``256``,
    ``truecolor`` or None)."""
    if no_color:
        return MONO
    return ANSI16 if colours == "standard" else DARK

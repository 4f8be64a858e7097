"""The line of a replay: where the playhead is, how fast it goes, and what lies along the way."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from textual import events
from textual.message import Message

from engine_hooks.protocol.clock import NS_PER_S
from tracer.format.text import cell_width
from tracer.replay.player import Player
from tracer.replay.timespec import clock_of
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look

TRACK_FROM = 12
"""Cells below which there is no track."""


class Timeline(Canvas):
    """One row: ``▶ 2x  0:12.3 / 1:03.0 ━━━━●──▼──····───  20 %``. A click on the track goes there.

    On the track ``▼`` is a mark and ``▲`` a finding; stretches in which nothing happens, which are
    jumped over, are dotted.
    """

    class Chosen(Message):
        """A place on the track was clicked: `fraction` of the trace."""

        def __init__(self, fraction: float) -> None:
            super().__init__()
            self.fraction = fraction

    def __init__(self, look: Look, player: Player) -> None:
        super().__init__(look, id="timeline")
        self.add_class("tile")
        self.player = player
        self.idle = idle_stretches(player)

    def _words(self, width: int) -> tuple[str, str]:
        """What stands before and behind the track; shorter where the screen is narrow."""
        player, glyphs = self.player, self.look.glyphs
        trace = player.trace
        head = glyphs.pause if player.paused or player.ended else glyphs.head
        here, length = clock_of(player.now() - trace.begin), clock_of(trace.end - trace.begin)
        before = f" {head} {player.speed:g}x  {here} / {length} "
        behind = f" {player.fraction * 100:3.0f} % "
        if width >= 100:
            skipped = player.skipped // NS_PER_S
            loop = "loop  " if player.loop else ""
            idle = (
                f"{skipped} s idle jumped over  " if skipped and player.idle_s is not None else ""
            )
            indexed = (player.folded - trace.begin) / max(trace.end - trace.begin, 1)
            index = f"indexing {indexed * 100:.0f} %  " if player.preparing else ""
            behind = f" {player.fraction * 100:3.0f} %  {loop}{idle}{index}".rstrip() + " "
        if width < 50:
            before = f" {head} {here} "
        return before, behind

    def _track(self, width: int) -> tuple[int, int]:
        """First column and length of the track."""
        before, behind = self._words(width)
        begin = cell_width(before)
        return begin, width - begin - cell_width(behind)

    def paint(self, width: int, height: int) -> list[Row]:
        """The row."""
        look, player = self.look, self.player
        before, behind = self._words(width)
        line = Line(width).add(before, look.text)
        _, cells = self._track(width)
        if cells >= TRACK_FROM:
            for glyph, style in self._cells(cells):
                line.add(glyph, style)
        line.add(behind, look.dim if player.paused else look.text)
        return [line.end(look.text)]

    def _cells(self, cells: int) -> list[tuple[str, Style]]:
        """The track: each cell is a glyph and its style."""
        look, glyphs, player = self.look, self.look.glyphs, self.player
        track = [(glyphs.track, look.faint)] * cells
        if player.idle_s is not None:
            for begin, end in self.idle:
                for at in range(self._cell(begin, cells), self._cell(end, cells) + 1):
                    track[at] = (glyphs.free_block, look.faint)
        here = self._cell(player.now(), cells)
        for at in range(here):
            if track[at][0] == glyphs.track:
                track[at] = (glyphs.line, look.accent)
        for t in player.findings:
            track[self._cell(t, cells)] = (glyphs.warning, look.warn)
        for mark in player.bookmarks:
            track[self._cell(mark.t, cells)] = (glyphs.down, look.bold)
        track[here] = (glyphs.bullet, look.bold)
        return track

    def _cell(self, t: int, cells: int) -> int:
        trace = self.player.trace
        length = max(1, trace.end - trace.begin)
        return min(cells - 1, max(0, (t - trace.begin) * (cells - 1) // length))

    def on_click(self, event: events.Click) -> None:
        """Go to where the track was clicked."""
        begin, cells = self._track(self.size.width)
        if cells >= TRACK_FROM and begin <= event.x < begin + cells:
            self.post_message(self.Chosen((event.x - begin) / (cells - 1)))


def idle_stretches(player: Player) -> Sequence[tuple[int, int]]:
    """Stretches (ns) in which nothing but signs of life was recorded and that are long enough to be
    jumped over."""
    least = int((player.idle_s or 0) * NS_PER_S)
    found: list[tuple[int, int]] = []
    active = player.trace.begin
    for block in player.trace.blocks:
        if block.calm:
            continue
        if block.first - active > least:
            found.append((active, block.first))
        active = max(active, block.last)
    if player.trace.end - active > least:
        found.append((active, player.trace.end))
    return found

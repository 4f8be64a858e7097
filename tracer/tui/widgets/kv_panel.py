"""The KV cache: how much is live, cached and free, and a map of its blocks in which the selected request stands out."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style

from tracer.stages import Stage
from tracer.state.view import EngineView, Snapshot
from tracer.tui import figures
from tracer.tui.canvas import Line, Row, blank
from tracer.tui.panel import Panel
from tracer.tui.theme import Look, blend
from tracer.tui.widgets.context_strip import engines_of

FREE, CACHED, LIVE, CHOSEN = 0, 1, 2, 250
"""States of a block in the map; live blocks carry the tint of their request added to LIVE."""
TINTS = 3


class KvPanel(Panel):
    """Shares in words and a map: one glyph a block, or one for several when there are more blocks than cells."""

    pad = 1

    def __init__(self, look: Look, *, first: bool = True) -> None:
        super().__init__(look, id="kv", edge=True, first=first)
        self.engine: EngineView | None = None
        self.blocks = b""
        self.chosen: frozenset[int] = frozenset()
        self.chosen_count = 0

    def show(self, snapshot: Snapshot, chosen: tuple[int, ...] = (), chosen_count: int | None = None) -> bool:
        """Draw the cache of the first engine that has one; `chosen` are block ids of the selected request and
        `chosen_count` how many it holds when the ids are not traced. True when the size of the pool is news."""
        engines = engines_of(snapshot)
        before = self.engine.num_blocks if self.engine is not None else None
        self.engine = next((engine for engine in engines if engine.num_blocks), engines[0] if engines else None)
        self.blocks = snapshot.kv_blocks
        self.chosen = frozenset(chosen)
        self.chosen_count = len(chosen) or (chosen_count or 0)
        self.repaint()
        return before != (self.engine.num_blocks if self.engine is not None else None)

    def wanted(self, width: int) -> int:
        """Rows that show every block of the pool as well as this width allows, title and figures included."""
        total = self.engine.num_blocks if self.engine is not None and self.engine.num_blocks else 256
        inner = max(1, width - 3)
        return 3 + -(-total // max(1, inner // 2))

    def title(self) -> str:
        return "KV cache"

    def note(self) -> list[Segment]:
        engine = self.engine
        if engine is None or not engine.num_blocks or engine.used is None or engine.cached is None:
            return []
        share = Segment(f"{figures.percent((engine.used + engine.cached) / engine.num_blocks)} %", self.look.bold)
        if not self.chosen_count:
            return [share]
        chosen = f"{self.look.glyphs.live_block} selected {self.chosen_count}"
        return [Segment(chosen, self._style(CHOSEN)), Segment("  ", self.look.text), share]

    def body(self, width: int, height: int) -> list[Row]:
        look, engine = self.look, self.engine
        if engine is None or not engine.num_blocks or engine.used is None:
            text = "not told by this engine" if engine is not None and engine.steps else ""
            return [Line(width).put(text, look.dim).end(look.text)]
        total, used, cached = engine.num_blocks, engine.used, engine.cached or 0
        free = engine.free if engine.free is not None else max(0, total - used - cached)
        rows: list[Row] = [self._shares(width, used, cached, free, total)]
        if height >= 6:
            rows.append(self._facts(width, engine))
        if height > len(rows):
            rows.extend(self._map(width, height - len(rows), total, used, cached))
        return rows

    def _shares(self, width: int, used: int, cached: int, free: int, total: int) -> Row:
        look, glyphs = self.look, self.look.glyphs
        line = Line(width)
        for index, (glyph, name, value, style) in enumerate((
            (glyphs.live_block, "live", used, self._tint(0)),
            (glyphs.cached_block, "cached", cached, look.style(look.stage_colours[Stage.TOKENISE])),
            (glyphs.free_block, "free", free, look.dim),
        )):  # fmt: skip
            line.fill_to((0, 12, 26)[index] if width < 48 else index * (width // 3), look.text)
            line.put(glyph + " ", style).put(f"{name} ", look.dim).put(f"{value / total:.0%}", look.text)
        return line.end(look.text)

    def _facts(self, width: int, engine: EngineView) -> Row:
        look = self.look
        line = Line(width)
        text = f"{figures.count(engine.num_blocks)} blocks"
        if engine.block_size:
            text += f" {look.glyphs.times} {engine.block_size} tokens"
        if engine.block_bytes and engine.num_blocks:
            text += f" = {figures.size(engine.block_bytes * engine.num_blocks)}"
        if engine.evicted:
            text += f", {figures.short_count(engine.evicted)} evicted"
        return line.put(text, look.dim).end(look.text)

    def _map(self, width: int, height: int, total: int, used: int, cached: int) -> list[Row]:
        """One glyph a block with a gap after it where there is room, without one where there is less, or one glyph
        for several blocks."""
        states = self._states(total, used, cached)
        gap = 1 if -(-len(states) // max(1, width // 2)) <= height else 0
        per_row = width // 2 if gap else width
        cells = per_row * height
        if cells < 1:
            return []
        share = -(-len(states) // cells)
        if share > 1:
            states = bytes(_dominant(states[i : i + share]) for i in range(0, len(states), share))
        rows: list[Row] = []
        for begin in range(0, min(len(states), cells), per_row):
            line = Line(width)
            part = states[begin : begin + per_row]
            at = 0
            while at < len(part):
                state = part[at]
                end = len(part) - len(part[at:].lstrip(bytes((state,))))
                line.put((self._glyph(state) + " " * gap) * (end - at), self._style(state))
                at = end
            rows.append(line.end(self.look.text))
        while len(rows) < height:
            rows.append(blank(width, self.look.text))
        return rows

    def _states(self, total: int, used: int, cached: int) -> bytes:
        """One byte a block. Without block ids the shares are laid end to end."""
        if not self.blocks:
            return (bytes((LIVE,)) * used + bytes((CACHED,)) * cached).ljust(total, bytes((FREE,)))[:total]
        states = bytearray(self.blocks.translate(_TINTED))
        for block in self.chosen:
            if 0 <= block < len(states):
                states[block] = CHOSEN
        return bytes(states)

    def _glyph(self, state: int) -> str:
        glyphs = self.look.glyphs
        if state == FREE:
            return glyphs.free_block
        return glyphs.cached_block if state == CACHED else glyphs.live_block

    def _style(self, state: int) -> Style:
        look = self.look
        if state == FREE:
            return look.faint
        if state == CACHED:
            return look.style(look.stage_colours[Stage.TOKENISE])
        if state == CHOSEN:
            return look.style(look.stage_colours[Stage.LM_HEAD], None, "bold" if look.palette.depth else "bold reverse")
        return self._tint(state - LIVE)

    def _tint(self, index: int) -> Style:
        look = self.look
        colour = look.stage_colours[Stage.DECODE]
        if look.palette.depth < 24:
            return look.style(colour)
        return look.style(blend(colour, look.palette.back, (1.0, 0.78, 0.58)[index % TINTS]))


_TINTED = bytes(value if value < LIVE else LIVE + (value - LIVE) % TINTS for value in range(256))


def _dominant(states: bytes) -> int:
    """The state that stands for several blocks: the selected request before all, then the most frequent."""
    if CHOSEN in states:
        return CHOSEN
    return max(set(states), key=lambda state: (states.count(state), state))

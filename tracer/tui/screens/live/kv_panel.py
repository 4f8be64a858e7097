"""The KV cache: how much is live, cached and free, what a request takes of it and how many more
fit, and a map of its blocks in which the selected request stands out. With all the room, who holds
how much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.segment import Segment

from tracer.state.engine.pool import Pool, Prefix, cached_ages, pool_of, prefix_of
from tracer.state.view import EngineView, RequestDetail, RequestView, Snapshot, Wait
from tracer.tui.naming import phase_text, short_id
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.live.block_map import (
    CACHED,
    CHOSEN,
    FREE,
    HIT,
    LIVE,
    OLDER,
    OLDEST,
    States,
    block_glyph,
    block_style,
    blocks_a_cell,
    map_rows,
    shares_of,
    states_of,
)
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

NAMES = 9
"""Cells of what a row is about."""
LEAST_MAP = 3
"""Rows that the map keeps before figures get more."""
BESIDE_FROM = 100
"""Cells from which, with all the room, the holders stand beside the map."""
_NO_STATES = np.zeros(0, np.uint8)


class KvPanel(Panel):
    """See the module."""

    pad = 1

    def __init__(self, look: Look, *, first: bool = True) -> None:
        super().__init__(look, id="kv", edge=True, first=first)
        self.engine: EngineView | None = None
        self.pool: Pool | None = None
        self.states: States = _NO_STATES
        self.ages: tuple[int, ...] | None = None
        self.chosen: frozenset[int] = frozenset()
        self.view: RequestView | None = None
        self.prefix: Prefix | None = None
        self.next: Wait | None = None
        self.whole = False
        """Whether it has all the room."""
        self.holders: tuple[RequestView, ...] = ()

    @property
    def holders_wanted(self) -> int:
        """How many of those that hold blocks it has room for."""
        return self.size.height if self.whole else 0

    def show(
        self,
        snapshot: Snapshot,
        detail: RequestDetail | None = None,
        holders: Sequence[RequestView] = (),
    ) -> bool:
        """Draw the cache of the first engine that has one; `detail` is the selected request,
        `holders` are those that hold most. True when the size of the pool is news."""
        engines = engines_of(snapshot)
        before = self.engine.num_blocks if self.engine is not None else None
        engine = next(
            (engine for engine in engines if engine.num_blocks), engines[0] if engines else None
        )
        self.engine = engine
        self.pool = None if engine is None else pool_of(engine)
        self.ages = cached_ages(snapshot)
        self.view = detail.view if detail is not None else None
        ids = detail.block_ids if detail is not None else ()
        self.chosen = frozenset(ids)
        self.prefix = (
            prefix_of(self.view, engine.block_size)
            if self.view is not None and engine is not None
            else None
        )
        hits = self.prefix.hit if self.prefix is not None else 0
        if snapshot.kv_blocks:
            self.states = states_of(snapshot.kv_blocks, snapshot.kv_since, snapshot.now, ids, hits)
        elif engine is not None and engine.num_blocks and engine.used is not None:
            self.states = shares_of(engine.num_blocks, engine.used, engine.cached or 0)
        else:
            self.states = _NO_STATES
        source = engine.source if engine is not None else ""
        self.next = next((wait for wait in snapshot.waits if wait.engine == source), None)
        self.holders = tuple(view for view in holders if view.blocks)
        self.repaint()
        return before != (engine.num_blocks if engine is not None else None)

    def wanted(self, width: int) -> int:
        """Rows that show every block of the pool as well as this width allows, title and figures
        included."""
        total = (
            self.engine.num_blocks if self.engine is not None and self.engine.num_blocks else 256
        )
        inner = max(1, width - 3)
        return 7 + -(-total // max(1, inner // 2))

    def title(self) -> str:
        return "KV cache"

    def note(self) -> list[Segment]:
        engine = self.engine
        if engine is None or not engine.num_blocks or engine.used is None or engine.cached is None:
            return []
        share = Segment(
            f"{figures.percent((engine.used + engine.cached) / engine.num_blocks)} %",
            self.look.bold,
        )
        held = self.view.blocks if self.view is not None else None
        count = len(self.chosen) or held
        if not count:
            return [share]
        chosen = Segment(
            f"{self.look.glyphs.live_block} selected {count}", block_style(self.look, CHOSEN)
        )
        return [chosen, Segment("  ", self.look.text), share]

    def body(self, width: int, height: int) -> list[Row]:
        look, engine = self.look, self.engine
        if engine is None or not engine.num_blocks or engine.used is None:
            text = "not told by this engine" if engine is not None and engine.steps else ""
            return [Line(width).put(text, look.dim).end(look.text)]
        if self.whole and height >= 8:
            return self._with_holders(width, height, engine)
        facts = self._facts(width, engine)
        shown = [self._shares(width, engine), *facts[: max(0, height - 1 - LEAST_MAP)]]
        map_height = height - len(shown)
        if map_height > 0:
            shown += map_rows(look, self.states, width, map_height)
        return shown

    # --- figures

    def _shares(self, width: int, engine: EngineView) -> Row:
        look = self.look
        total, used, cached = engine.num_blocks or 1, engine.used or 0, engine.cached or 0
        free = engine.free if engine.free is not None else max(0, total - used - cached)
        line = Line(width)
        for index, (state, name, value) in enumerate(
            ((LIVE, "live", used), (CACHED, "cached", cached), (FREE, "free", free))
        ):
            line.fill_to((0, 12, 26)[index] if width < 48 else index * (width // 3), look.text)
            line.put(block_glyph(look, state) + " ", block_style(look, state))
            line.put(f"{name} ", look.dim).put(f"{value / total:.0%}", look.text)
        return line.end(look.text)

    def _facts(self, width: int, engine: EngineView) -> list[Row]:
        """The figures, a row each, the most telling first."""
        pool, look = self.pool, self.look
        assert pool is not None  # of an engine
        rows = [self._fits(width, pool)]
        if self.view is not None and self.prefix is not None:
            rows.append(self._chosen(width, self.view, self.prefix))
        elif self.next is not None and self.next.tokens is not None and pool.block_size:
            need = -(-self.next.tokens // pool.block_size)
            left = figures.count(pool.available)
            text = f"needs {figures.count(need)} blocks, {left} are left"
            rows.append(self._fact(width, "next", text))
        rows.append(self._growth(width, engine, pool))
        text = (
            f"{figures.count(pool.blocks)} {look.glyphs.times} {figures.count(pool.block_size)} "
            "tokens"
        )
        if pool.block_bytes and pool.blocks:
            text += f" = {figures.size(pool.block_bytes * pool.blocks)}"
        rows.append(self._fact(width, "pool", text))
        rows.append(self._ages(width, engine))
        return rows

    def _fact(self, width: int, name: str, text: str) -> Row:
        return (
            Line(width)
            .put(name.ljust(NAMES), self.look.dim)
            .put(text, self.look.text)
            .end(self.look.text)
        )

    def _fits(self, width: int, pool: Pool) -> Row:
        """How many more requests fit: of the mean length, and of the longest that is allowed."""
        seen, worst = figures.count(pool.fit_mean), figures.count(pool.fit_worst)
        mean, longest = figures.short_count(pool.mean_tokens), figures.short_count(pool.longest)
        text = figures.fitting(
            width - NAMES, f"{seen} more of {mean} tokens (mean), {worst} of {longest} (longest)",
            f"{seen} of {mean} (mean), {worst} of {longest} (longest)",
            f"{seen} of {mean} tokens, {worst} of {longest}",
        )  # fmt: skip
        return self._fact(width, "more fit", text)

    def _growth(self, width: int, engine: EngineView, pool: Pool) -> Row:
        token = "-" if pool.token_bytes is None else figures.size(pool.token_bytes)
        mean = "-" if pool.mean_held is None else f"{pool.mean_held:.1f}"
        most = figures.count(engine.most_held)
        text = figures.fitting(
            width - NAMES,
            f"{token} a token; {mean} blocks a request, at most {most}",
            f"{token} a token; {mean} blocks each, at most {most}",
            f"{token} a token; {mean} blocks each",
            f"{token}; {mean} blocks each",
        )
        return self._fact(width, "takes", text)

    def _ages(self, width: int, engine: EngineView) -> Row:
        """Evictions, and cached blocks by how long nobody has held them: the legend of their glyphs
        too."""
        look = self.look
        line = (
            Line(width)
            .put("evicted".ljust(NAMES), look.dim)
            .put(figures.short_count(engine.evicted), look.text)
        )
        if self.ages is not None:
            names = ("10 s", "1 min", "older")
            line.put("  cached", look.dim)
            for state, name, count in zip((CACHED, OLDER, OLDEST), names, self.ages, strict=True):
                text = f" {figures.short_count(count)}"
                if line.room < len(name) + len(text) + 4:
                    break
                line.put("  " + block_glyph(look, state), block_style(look, state)).put(
                    f" {name}", look.dim
                )
                line.put(text, look.text)
        return line.end(look.text)

    def _chosen(self, width: int, view: RequestView, prefix: Prefix) -> Row:
        """The selected request: which blocks of its prompt were hits, and how many it may come to
        hold."""
        look = self.look
        names = min(width, NAMES - 1)
        line = Line(width).put_segments(
            [Segment(short_id(view.id, names, look.glyphs.ellipsis), look.dim)], names
        )
        line.put(" ", look.text)
        hit, prompt, most = (
            figures.count(value) for value in (prefix.hit, prefix.prompt, prefix.longest)
        )
        text = figures.fitting(
            line.room - min(12, prefix.prompt + prefix.grown),
            f"{hit} of {prompt} prompt blocks hit, at most {most}",
            f"{hit}/{prompt} hit, at most {most}",
            f"{hit}/{prompt} hit",
        )
        room = min(line.room - len(text) - 1, prefix.prompt + prefix.grown)
        if room >= 4:
            line.put_segments(prefix_strip(look, prefix, room), room).put(" ", look.text)
        return line.put(text, look.text).end(look.text)

    # --- with all the room

    def _with_holders(self, width: int, height: int, engine: EngineView) -> list[Row]:
        look = self.look
        beside = width >= BESIDE_FROM
        left = width * 11 // 20 if beside else width
        rows = [self._shares(left, engine), *self._facts(left, engine)]
        cell = blocks_a_cell(len(self.states), left, max(1, height - len(rows) - 1))
        if cell > 1:
            rows.append(self._fact(left, "map", f"a glyph stands for {figures.count(cell)} blocks"))
        rows.append(blank(left, look.text))
        if not beside:
            spare = height - len(rows)
            table = min(spare - 2, len(self.holders) + 1) if spare >= 6 else 0
            map_height = max(0, spare - table - 1) if table >= 2 else spare
            rows += map_rows(look, self.states, left, map_height)
            if table >= 2:
                rows.append(blank(width, look.text))
                rows += self._table(width, table)
            return rows
        rows += map_rows(look, self.states, left, height - len(rows))
        gap = [Segment(f" {look.glyphs.vertical} ", look.faint)]
        table_rows = self._table(width - left - 3, height)
        return [[*row, *gap, *other] for row, other in zip(rows, table_rows, strict=True)]

    def _table(self, width: int, height: int) -> list[Row]:
        """Who holds blocks, the most first, in exactly `height` rows."""
        look, engine = self.look, self.engine
        names = min(width, 14, max(6, width // 4))
        line = Line(width).put("holder".ljust(names), look.dim).put("blocks".rjust(7), look.dim)
        line.put("memory".rjust(10), look.dim).put("tokens".rjust(8), look.dim).put(
            "hits".rjust(6), look.dim
        )
        rows: list[Row] = [line.put("  ", look.text).put("phase", look.dim).end(look.text)]
        size = engine.block_size if engine is not None else None
        block_bytes = engine.block_bytes if engine is not None else None
        for view in self.holders[: max(0, height - 1)]:
            chosen = self.view is not None and view.key == self.view.key
            prefix = prefix_of(view, size)
            line = Line(width).put_segments(
                [
                    Segment(
                        short_id(view.id, names, look.glyphs.ellipsis),
                        look.accent if chosen else look.text,
                    )
                ],
                names,
            )
            line.put(figures.count(view.blocks).rjust(7), look.bold)
            held = view.blocks * block_bytes if view.blocks and block_bytes else None
            line.put(figures.size(held).rjust(10), look.text)
            line.put(figures.short_count(view.computed_tokens).rjust(8), look.text)
            line.put(
                figures.short_count(prefix.hit if prefix is not None else None).rjust(6), look.text
            )
            text, style = phase_text(view, look)
            rows.append(line.put("  ", look.text).put_text(text, style).end(look.text))
        if (
            engine is not None
            and engine.holders > len(rows) - 1
            and len(rows) == height
            and height > 1
        ):
            left = engine.holders - (len(rows) - 2)
            rows[-1] = Line(width).put(f"and {figures.count(left)} more", look.dim).end(look.text)
        while len(rows) < height:
            rows.append(blank(width, look.text))
        return rows[:height]


def prefix_strip(look: Look, prefix: Prefix, cells: int) -> list[Segment]:
    """The blocks of a request from its first token on, exactly `cells` glyphs: hits of the prefix
    cache, what it computed, and what it generated since. Several blocks a glyph where there are
    more."""
    total = prefix.prompt + prefix.grown
    segments: list[Segment] = []
    done = 0
    for state, blocks in ((HIT, prefix.hit), (CHOSEN, prefix.hit + prefix.computed), (LIVE, total)):
        end = (cells if blocks == total else round(blocks * cells / total)) if total else 0
        if end > done:
            segments.append(
                Segment(block_glyph(look, state) * (end - done), block_style(look, state))
            )
            done = end
    if done < cells:
        segments.append(Segment(" " * (cells - done), look.text))
    return segments

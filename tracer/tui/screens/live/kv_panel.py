"""The KV cache: how much is live, cached and free, what a request takes of it and how many more
fit, and a map of its blocks. With all the room, who holds how much.

The map has one glyph a block, or one for several where there are more blocks than cells. Live
blocks are tinted by the request that holds them, cached ones get smaller and darker with the time
for which nobody has held them, and the blocks of the selected request stand out: filled where it
computed them, framed where the prefix cache gave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style

from engine_hooks.protocol.stages import Stage
from tracer.format import figures
from tracer.state.engine.kv import BLOCKS_SHOWN
from tracer.state.engine.kv import CACHED as CACHED_BYTE
from tracer.state.engine.pool import Pool, Prefix, age_classes, cached_ages, pool_of, prefix_of
from tracer.state.view import EngineView, RequestDetail, RequestView, Snapshot, Wait
from tracer.tui.naming import short_id
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.live.rows import Entry, request_table, with_table, words
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look, blend

NAMES = 9
"""Cells of what a row is about."""
LEAST_MAP = 3
"""Rows that the map keeps before figures get more."""
FREE, CACHED, OLDER, OLDEST, LIVE, CHOSEN, HIT = 0, 1, 2, 3, 4, 250, 251
"""States of a block in the map; live blocks carry the tint of their request added to LIVE."""
TINTS = 3
AGED = (CACHED, OLDER, OLDEST)
"""By class of age."""

States = NDArray[np.uint8]

_SHOWN = np.array([FREE, CACHED, *(LIVE + slot % TINTS for slot in range(254))], np.uint8)
"""State by byte of the snapshot's map."""
_NO_STATES: States = np.zeros(0, np.uint8)


class KvPanel(Panel):
    """See the module."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="kv", edge=True, first=True)
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
        return self.size.height if self.whole else 0

    def show(
        self, snapshot: Snapshot, detail: RequestDetail | None, holders: Sequence[RequestView]
    ) -> bool:
        """Draw the cache of the first engine that has one; `detail` is the selected request,
        `holders` are those that hold most. True when the size of the pool is news."""
        engines = engines_of(snapshot)
        before = self.engine.num_blocks if self.engine is not None else None
        engine = next((each for each in engines if each.num_blocks), next(iter(engines), None))
        self.engine = engine
        self.pool = None if engine is None else pool_of(engine)
        self.ages = cached_ages(snapshot)
        self.view = None if detail is None else detail.view
        ids = () if detail is None else detail.block_ids
        self.chosen = frozenset(ids)
        size = None if engine is None else engine.block_size
        self.prefix = None if self.view is None else prefix_of(self.view, size)
        hits = 0 if self.prefix is None else self.prefix.hit
        if snapshot.kv_blocks:
            self.states = states_of(snapshot.kv_blocks, snapshot.kv_since, snapshot.now, ids, hits)
        elif engine is not None and engine.num_blocks and engine.used is not None:
            self.states = shares_of(engine.num_blocks, engine.used, engine.cached or 0)
        else:
            self.states = _NO_STATES
        source = "" if engine is None else engine.source
        self.next = next((wait for wait in snapshot.waits if wait.engine == source), None)
        self.holders = tuple(view for view in holders if view.blocks)
        self.repaint()
        return before != (None if engine is None else engine.num_blocks)

    def wanted(self, width: int) -> int:
        """Return the rows that show every block of the pool, title and figures included."""
        total = (self.engine.num_blocks if self.engine is not None else None) or 256
        return 7 + -(-total // max(1, (width - 3) // 2))

    def title(self) -> str:
        return "KV cache"

    def note(self) -> list[Segment]:
        engine = self.engine
        if engine is None or not engine.num_blocks or engine.used is None or engine.cached is None:
            return []
        look = self.look
        held = (engine.used + engine.cached) / engine.num_blocks
        share = Segment(figures.percentage(held), look.bold)
        count = len(self.chosen) or (self.view.blocks if self.view is not None else None)
        if not count:
            return [share]
        text = f"{look.glyphs.live_block} selected {count}"
        return [Segment(text, block_style(look, CHOSEN)), Segment("  ", look.text), share]

    def body(self, width: int, height: int) -> list[Row]:
        engine, pool = self.engine, self.pool
        if engine is None or pool is None or not engine.num_blocks or engine.used is None:
            text = "not reported by this engine" if engine is not None and engine.steps else ""
            return [words(self.look, width, text)]

        cache, table = partial(self._cache, engine, pool), partial(self._table, engine)
        if self.whole and height >= 8:
            return with_table(self.look, width, height, cache, table, len(self.holders))
        return cache(width, height)

    def _cache(self, engine: EngineView, pool: Pool, width: int, height: int) -> list[Row]:
        """Draw as many figures as leave room for a map, and the map."""
        look = self.look
        facts = self._facts(width, engine, pool)
        rows = [self._shares(width, engine), *facts[: max(0, height - 1 - LEAST_MAP)]]
        if self.whole:
            blocks = blocks_a_cell(len(self.states), width, max(1, height - len(rows) - 1))
            if blocks > 1:
                rows.append(self._fact(width, "map", f"{figures.count(blocks)} blocks a glyph"))
            rows.append(blank(width, look.text))
        return rows + map_rows(look, self.states, width, height - len(rows))

    def _shares(self, width: int, engine: EngineView) -> Row:
        look = self.look
        total, used, cached = engine.num_blocks or 1, engine.used or 0, engine.cached or 0
        free = engine.free if engine.free is not None else max(0, total - used - cached)
        line = Line(width)
        for index, (state, name, value) in enumerate(
            ((LIVE, "live", used), (CACHED, "cached", cached), (FREE, "free", free))
        ):
            line.fill_to(max(index * (width // 3), line.used + min(index, 1)), look.text)
            line.add(block_glyph(look, state) + " ", block_style(look, state))
            line.add(f"{name} ", look.dim).add(figures.percentage(value / total), look.text)
        return line.end(look.text)

    def _facts(self, width: int, engine: EngineView, pool: Pool) -> list[Row]:
        """Draw the figures, a row each, the most telling first."""
        look = self.look
        dot, times = look.glyphs.dot, look.glyphs.times
        seen, worst = figures.count(pool.fit_mean), figures.count(pool.fit_worst)
        mean, longest = figures.short_count(pool.mean_tokens), figures.short_count(pool.longest)
        room = width - NAMES
        text = figures.fitting(
            room,
            f"{seen} average requests ({mean} tokens), {worst} of {longest} (longest)",
            f"{seen} average requests ({mean} tokens), {worst} of {longest}",
            f"{seen} average ({mean} tokens), {worst} of {longest}",
            f"{seen} of {mean} tokens, {worst} of {longest}",
        )
        rows = [self._fact(width, "room for", text)]
        if self.view is not None and self.prefix is not None:
            rows.append(self._chosen(width, self.view, self.prefix))
        elif self.next is not None and self.next.tokens is not None and pool.block_size:
            need = figures.count(-(-self.next.tokens // pool.block_size))
            text = f"needs {need} blocks, {figures.count(pool.available)} free"
            rows.append(self._fact(width, "next", text))
        token, blocks = figures.size(pool.token_bytes), figures.count(pool.mean_held)
        text = f"{token} a token {dot} {blocks} blocks a request"
        text = figures.fitting(
            room,
            f"{text}, at most {figures.count(engine.most_held)}",
            text,
            f"{token}/token {dot} {blocks} blocks",
        )
        rows.append(self._fact(width, "memory", text))
        text = f"{figures.count(pool.blocks)} {times} {figures.count(pool.block_size)} tokens"
        if pool.block_bytes and pool.blocks:
            text += f" = {figures.size(pool.block_bytes * pool.blocks)}"
        return [*rows, self._fact(width, "pool", text), self._ages(width, engine)]

    def _fact(self, width: int, name: str, text: str) -> Row:
        line = Line(width).add(name.ljust(NAMES), self.look.dim)
        return line.add(text, self.look.text).end(self.look.text)

    def _ages(self, width: int, engine: EngineView) -> Row:
        """Draw evictions, and cached blocks by age: the legend of their glyphs too."""
        look = self.look
        line = Line(width).add("evicted".ljust(NAMES), look.dim)
        line.add(figures.short_count(engine.evicted), look.text)
        if self.ages is not None:
            line.add(f" {look.glyphs.dot} cached for", look.dim)
            for state, name, count in zip(
                AGED, ("10 s", "1 min", "longer"), self.ages, strict=True
            ):
                text = f" {name}: {figures.short_count(count)}"
                if line.room < len(text) + 2:
                    break
                line.add(" " + block_glyph(look, state), block_style(look, state))
                line.add(text, look.text)
        return line.end(look.text)

    def _chosen(self, width: int, view: RequestView, prefix: Prefix) -> Row:
        """Draw which blocks of the selected request were hits, and how many it may come to hold."""
        look = self.look
        names = NAMES - 1
        line = Line(width).add_text(short_id(view.id, names, look.glyphs.ellipsis), look.dim, names)
        line.add(" ", look.text)
        hit, prompt = figures.count(prefix.hit), figures.count(prefix.prompt)
        most = figures.count(prefix.longest)
        blocks = prefix.prompt + prefix.grown
        text = figures.fitting(
            line.room - min(12, blocks),
            f"{hit} of {prompt} prompt blocks hit, at most {most}",
            f"{hit}/{prompt} hit, at most {most}",
            f"{hit}/{prompt} hit",
        )
        room = min(line.room - len(text) - 1, blocks)
        if room >= 4:
            line.add_segments(prefix_strip(look, prefix, room), room).add(" ", look.text)
        return line.add(text, look.text).end(look.text)

    def _table(self, engine: EngineView, width: int, height: int) -> list[Row]:
        look = self.look
        heads = {"holder": 0, "blocks": 7, "memory": 10, "tokens": 8, "hits": 6}

        def entries() -> Iterator[Entry]:
            for view in self.holders:
                chosen = self.view is not None and view.key == self.view.key
                prefix = prefix_of(view, engine.block_size)
                size = (view.blocks or 0) * engine.block_bytes if engine.block_bytes else None
                yield (
                    view,
                    look.accent if chosen else look.text,
                    (
                        (figures.count(view.blocks), look.bold),
                        (figures.size(size), look.text),
                        (figures.short_count(view.computed_tokens), look.text),
                        (figures.short_count(prefix.hit if prefix else None), look.text),
                    ),
                )

        return request_table(look, width, height, heads, entries(), engine.holders)


def prefix_strip(look: Look, prefix: Prefix, cells: int) -> list[Segment]:
    """Draw the blocks of a request from its first token on, exactly `cells` glyphs: hits of the
    prefix cache, what it computed, and what it generated since. Several blocks a glyph where there
    are more."""
    total = prefix.prompt + prefix.grown
    segments: list[Segment] = []
    done = 0
    for state, blocks in ((HIT, prefix.hit), (CHOSEN, prefix.prompt), (LIVE, total)):
        end = (cells if blocks == total else round(blocks * cells / total)) if total else 0
        if end > done:
            glyphs = block_glyph(look, state) * (end - done)
            segments.append(Segment(glyphs, block_style(look, state)))
            done = end
    return segments if done == cells else [*segments, Segment(" " * (cells - done), look.text)]


def states_of(
    blocks: bytes, since: bytes, now: int, chosen: Sequence[int] = (), hits: int = 0
) -> States:
    """Return one state a block, of a snapshot's map (`kv_blocks`, `kv_since`). `chosen`: block ids
    of the selected request, of which the first `hits` came from the prefix cache."""
    states: States = _SHOWN[np.frombuffer(blocks, np.uint8)]
    if since and CACHED_BYTE in blocks:
        ages = age_classes(blocks, since, now)
        for age, state in enumerate(AGED[1:], 1):
            states[ages == age] = state
    for place, block in enumerate(chosen):
        if 0 <= block < len(states):
            states[block] = HIT if place < hits else CHOSEN
    return states


def shares_of(total: int, used: int, cached: int) -> States:
    """Return states where block ids are not traced: shares laid end to end, scaled down beyond
    `BLOCKS_SHOWN`."""
    shown = min(total, BLOCKS_SHOWN)
    used, cached = used * shown // total, cached * shown // total
    states = np.full(shown, FREE, np.uint8)
    states[:used] = LIVE
    states[used : used + cached] = CACHED
    return states


def fold(states: States, share: int) -> States:
    """Return one state for every `share` blocks: the selected request's before all, then the most
    frequent."""
    if share <= 1:
        return states
    cells = -(-len(states) // share)
    padded = np.full(cells * share, 255, np.uint8)
    padded[: len(states)] = states
    grid = padded.reshape(cells, share)
    best, most = np.zeros(cells, np.uint8), np.zeros(cells, np.int64)
    for state in np.unique(states).tolist():
        counts = (grid == state).sum(axis=1)
        if state in (CHOSEN, HIT):
            counts = np.where(counts > 0, counts + share, 0)
        ahead = counts >= np.maximum(most, 1)
        best[ahead], most[ahead] = state, counts[ahead]
    return best


def blocks_a_cell(blocks: int, width: int, height: int) -> int:
    cells = (width // 2 if _spaced(blocks, width, height) else width) * height
    return max(1, -(-blocks // cells)) if cells > 0 else 1


def _spaced(blocks: int, width: int, height: int) -> bool:
    return -(-blocks // max(1, width // 2)) <= height


def map_rows(look: Look, states: States, width: int, height: int) -> list[Row]:
    """Draw the map in exactly `height` rows: with a gap after each block where there is room,
    without one where there is less, or several blocks a glyph."""
    gap = _spaced(len(states), width, height)
    per_row = width // 2 if gap else width
    if per_row < 1 or height < 1:
        return [blank(width, look.text)] * max(0, height)
    cells = fold(states, blocks_a_cell(len(states), width, height)).tobytes()
    rows: list[Row] = []
    for begin in range(0, per_row * height, per_row):
        line = Line(width)
        for state, run in groupby(cells[begin : begin + per_row]):
            glyph = block_glyph(look, state) + " " * gap
            line.add(glyph * len(list(run)), block_style(look, state))
        rows.append(line.end(look.text))
    return rows


def block_glyph(look: Look, state: int) -> str:
    glyphs = look.glyphs
    others: dict[int, str] = {
        FREE: glyphs.free_block,
        CACHED: glyphs.cached_block,
        OLDER: glyphs.older_block,
        OLDEST: glyphs.oldest_block,
        HIT: glyphs.hit_block,
    }
    return others.get(state, glyphs.live_block)


def block_style(look: Look, state: int) -> Style:
    if state == FREE:
        return look.faint
    if state in AGED:
        return _tinted(look, Stage.TOKENISE, (1.0, 0.72, 0.5)[AGED.index(state)])
    if state in (CHOSEN, HIT):
        flags = "bold" if look.palette.depth else "bold reverse"
        return look.style(look.stage_colours[Stage.LM_HEAD], None, flags)
    return _tinted(look, Stage.DECODE, (1.0, 0.78, 0.58)[(state - LIVE) % TINTS])


def _tinted(look: Look, stage: Stage, share: float) -> Style:
    colour = look.stage_colours[stage]
    if look.palette.depth < 24:
        return look.style(colour)
    return look.style(blend(colour, look.palette.back, share))

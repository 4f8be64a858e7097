"""A map of the blocks of a KV cache: one glyph a block, or one for several where there are more
blocks than cells.

Live blocks are tinted by the request that holds them, cached ones get smaller and darker with the
time for which nobody has held them, and the blocks of the selected request stand out: filled where
it computed them, framed where the prefix cache gave them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

from engine_hooks.protocol.stages import Stage
from tracer.state.engine.kv import BLOCKS_SHOWN
from tracer.state.engine.kv import CACHED as CACHED_BYTE
from tracer.state.engine.pool import age_classes
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.theme import Look, blend

FREE, CACHED, OLDER, OLDEST, LIVE, CHOSEN, HIT = 0, 1, 2, 3, 4, 250, 251
"""States of a block in the map; live blocks carry the tint of their request added to LIVE."""
TINTS = 3
AGED = (CACHED, OLDER, OLDEST)
"""By class of age."""

States = NDArray[np.uint8]

_SHOWN = np.array(
    [FREE, CACHED, *(LIVE + slot % TINTS for slot in range(254))], np.uint8
)  # fmt: skip
"""State by byte of the snapshot's map."""


def states_of(
    blocks: bytes, since: bytes, now: int, chosen: Sequence[int] = (), hits: int = 0
) -> States:
    """One state a block, of a snapshot's map (`kv_blocks`, `kv_since`). `chosen`: block ids of the
    selected request, of which the first `hits` came from the prefix cache."""
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
    """The same where block ids are not traced: shares laid end to end. Beyond `BLOCKS_SHOWN` they
    are scaled down."""
    if total > BLOCKS_SHOWN:
        used, cached, total = (
            used * BLOCKS_SHOWN // total,
            cached * BLOCKS_SHOWN // total,
            BLOCKS_SHOWN,
        )
    states = np.zeros(total, np.uint8)
    states[: min(used, total)] = LIVE
    states[min(used, total) : min(used + cached, total)] = CACHED
    return states


def fold(states: States, share: int) -> States:
    """One state for every `share` blocks: the selected request's before all, then the most
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
    """How many blocks stand behind one glyph in so much room."""
    gap = 1 if -(-blocks // max(1, width // 2)) <= height else 0
    cells = (width // 2 if gap else width) * height
    return max(1, -(-blocks // cells)) if cells > 0 else 1


def map_rows(look: Look, states: States, width: int, height: int) -> list[Row]:
    """The map in exactly `height` rows: with a gap after each block where there is room, without
    one where there is less, or several blocks a glyph."""
    gap = 1 if -(-len(states) // max(1, width // 2)) <= height else 0
    per_row = width // 2 if gap else width
    if per_row < 1 or height < 1:
        return [blank(width, look.text)] * max(0, height)
    cells = fold(states, blocks_a_cell(len(states), width, height)).tobytes()
    rows: list[Row] = []
    for begin in range(0, min(len(cells), per_row * height), per_row):
        line = Line(width)
        part = cells[begin : begin + per_row]
        at = 0
        while at < len(part):
            state = part[at]
            end = len(part) - len(part[at:].lstrip(part[at : at + 1]))
            line.put((block_glyph(look, state) + " " * gap) * (end - at), block_style(look, state))
            at = end
        rows.append(line.end(look.text))
    while len(rows) < height:
        rows.append(blank(width, look.text))
    return rows


def block_glyph(look: Look, state: int) -> str:
    """How a block in a state is drawn."""
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
    """The colour of a block in a state."""
    if state == FREE:
        return look.faint
    if state in AGED:
        return _tinted(look, Stage.TOKENISE, (1.0, 0.72, 0.5)[AGED.index(state)])
    if state in (CHOSEN, HIT):
        return look.style(
            look.stage_colours[Stage.LM_HEAD],
            None,
            "bold" if look.palette.depth else "bold reverse",
        )
    return _tinted(look, Stage.DECODE, (1.0, 0.78, 0.58)[(state - LIVE) % TINTS])


def _tinted(look: Look, stage: Stage, share: float) -> Style:
    colour = look.stage_colours[stage]
    if look.palette.depth < 24 or share == 1.0:
        return look.style(colour)
    return look.style(blend(colour, look.palette.back, share))

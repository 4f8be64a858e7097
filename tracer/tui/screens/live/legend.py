"""The stages and their colours in one row."""

from __future__ import annotations

from functools import lru_cache

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.theme import Look

SHORT_NAMES = (
    "recv",
    "tmpl",
    "tok",
    "adm",
    "kv",
    "emb",
    "prefill",
    "head",
    "smp",
    "strm",
    "decode",
    "end",
)


@lru_cache(8)
def legend(look: Look, width: int, *, expected: bool = False) -> Row:
    """The stages with their colours, in as many words as fit; by group where glyphs tell them
    apart. `expected`: whether bars carry the tick at which they should have ended."""
    line = Line(width).put(" ", look.text)
    glyphs = look.glyphs
    if not look.fine:
        for group in Group:
            first = next(stage.stage for stage in STAGES if stage.group is group)
            style = look.stage(Stage.PREFILL if group is Group.PREFILL else first)
            line.put(glyphs.fill[group], style).put(f" {group.value}  ", look.dim)
        line.put(glyphs.wait, look.text).put(" waiting  ", look.dim).put(glyphs.preempted, look.bad)
        line.put(" preempted", look.dim)
        if expected:
            line.put(f"  {glyphs.expected}", look.bold).put(" expected", look.dim)
        return line.end(look.text)
    names = [stage.label for stage in STAGES]
    tail = f"{glyphs.wait} waiting  {glyphs.preempted} preempted" + "  . expected" * expected
    if sum(len(name) + 4 for name in names) + len(tail) > width:
        names = list(SHORT_NAMES)
    wide = sum(len(name) + 3 for name in names) + len(tail) < width
    for stage, name in zip(STAGES, names, strict=True):
        line.put("█" if wide else "▌", look.stage(stage.stage)).put(
            f"{name}  " if wide else f"{name} ", look.dim
        )
    if wide:
        line.put(glyphs.wait, look.stage(Stage.ADMISSION)).put(" waiting  ", look.dim)
        line.put(glyphs.preempted, look.bad).put(" preempted  ", look.dim)
    if expected and line.room >= 6:
        line.put(glyphs.expected, look.bold).put(
            " expected" if line.room >= 10 else " exp.", look.dim
        )
    return line.end(look.text)

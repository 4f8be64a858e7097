"""The queue: who waits, for how long, and for what."""

from __future__ import annotations

from collections import Counter

from rich.segment import Segment

from engine_hooks.protocol.stages import Stage
from tracer.format import figures
from tracer.state.view import EngineView, Limit, Snapshot, Wait
from tracer.tui.naming import short_id
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.live.rows import id_cells, listed, words
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

TABLE_FROM = 78
"""Cells from which a panel with all the room shows a table."""

LIMITS = {
    Limit.STEP: "next step",
    Limit.SLOTS: "batch slots",
    Limit.TOKENS: "token budget",
    Limit.KV: "KV blocks",
    Limit.NEVER: "more blocks than exist",
    Limit.HOP: "on its way to the engine",
    Limit.UNKNOWN: "reason unknown",
}
UNITS = {Limit.SLOTS: "slot", Limit.TOKENS: "tokens"}


class QueuePanel(Panel):
    """One row for each request that waits, in the order in which they will be taken."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="queue", edge=True)
        self.waits: tuple[Wait, ...] = ()
        self.engine: EngineView | None = None
        self.names: dict[str, str] = {}
        """Titles of the engines by their source."""
        self.now = 0
        self.count = 0
        self.whole = False
        """Whether it has all the room."""

    def show(self, snapshot: Snapshot) -> None:
        engines = engines_of(snapshot)
        self.engine = max(engines, key=lambda engine: engine.waiting, default=None)
        self.names = {engine.source: engine.title or engine.source for engine in engines}
        self.now, self.waits = snapshot.now, snapshot.waits
        self.count = max(len(snapshot.waits), sum(engine.waiting for engine in engines))
        self.repaint()

    def title(self) -> str:
        return f"queue {figures.count(self.count)}"

    def note(self) -> list[Segment]:
        if self.engine is None:
            return []
        return [Segment(f"{figures.count(self.engine.running)} running", self.look.dim)]

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.waits:
            text = "queue empty" if self.engine is not None else ""
            return [words(look, width, "requests not reported" if self.count else text)]
        table = self.whole and width >= TABLE_FROM and height >= 4
        head = self._head(width) if table else []
        entries = (self._row(width, wait, table) for wait in self.waits)
        return listed(look, width, height, head, entries, self.count)

    def _head(self, width: int) -> list[Row]:
        look = self.look
        names = "place " + "id".ljust(18) + "waits ms".rjust(10) + "tokens".rjust(12)
        names += "needs".rjust(16) + "left".rjust(9) + "  waits for"
        counts = Counter(wait.limit for wait in self.waits).most_common()
        summary = ", ".join(f"{LIMITS[limit]}: {figures.count(count)}" for limit, count in counts)
        return [words(look, width, summary, look.text), words(look, width, names)]

    def _row(self, width: int, wait: Wait, table: bool) -> Row:
        look = self.look
        names = 18 if table else id_cells(width)
        style = look.text if table else look.dim
        line = Line(width).add(f"{wait.place:>5} " if table else "", look.dim)
        name = short_id(wait.id, names, look.glyphs.ellipsis)
        line.add_text(name, look.text, names)
        waited = figures.clock(max(0, self.now - wait.since) / 1e6, 10 if table else 8)
        line.add(f"{waited} ", look.stage(Stage.ADMISSION, bold=True))
        line.add(f"{look.glyphs.preempted if wait.preempted else ' '} ", look.bad)
        if table:
            needs = left = ""
            if wait.needs is not None and not wait.behind:
                needs = f"{figures.count(wait.needs)} {UNITS.get(wait.limit, 'blocks')}"
                left = figures.count(wait.has)
            line.add(f"{figures.count(wait.tokens):>9}{needs:>16}{left:>9}  ", style)
        elif width >= 52:
            line.add(f"{figures.short_count(wait.tokens):>5}  ", style)
        if wait.limit is Limit.NEVER and not wait.behind:
            style = look.bad
        text = wait_text(wait, line.room)
        if table and len(self.names) > 1:
            text += f" at {self.names.get(wait.engine, wait.engine)}"
        return line.add_text(text, style, ellipsis=look.glyphs.ellipsis).end(look.text)


def wait_text(wait: Wait, room: int) -> str:
    """Say what a request waits for. Holds the id of the one in front as its client gave it."""
    if wait.behind:
        after = f"after {wait.behind}"
        return figures.fitting(room, f"{LIMITS[wait.limit]} ({after})", after)
    needs, has = figures.count(wait.needs), figures.count(wait.has)
    figured = {
        Limit.STEP: "enters at the next step",
        Limit.SLOTS: "a batch slot",
        Limit.KV: f"{needs} blocks, {has} free",
        Limit.NEVER: f"{needs} blocks, {has} exist",
    }
    return figured.get(wait.limit, LIMITS[wait.limit])

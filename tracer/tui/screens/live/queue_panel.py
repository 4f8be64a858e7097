"""The queue: who waits, for how long, and for what."""

from __future__ import annotations

from rich.segment import Segment

from engine_hooks.protocol.stages import Stage
from tracer.state.view import EngineView, Limit, Snapshot, Wait
from tracer.tui.naming import short_id
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.live.waits import line_text, needs_text, wait_text
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

TABLE_FROM = 78
"""Cells from which a panel with all the room shows a table."""


class QueuePanel(Panel):
    """One row for each request that waits, in the order in which they will be taken."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="queue", edge=True)
        self.waits: tuple[Wait, ...] = ()
        self.engine: EngineView | None = None
        self.several = False
        """Whether more than one engine is there, so that a row must say which."""
        self.names: dict[str, str] = {}
        self.now = 0
        self.count = 0
        self.whole = False
        """Whether it has all the room."""

    def show(self, snapshot: Snapshot) -> None:
        """Draw those that wait."""
        engines = engines_of(snapshot)
        self.engine = max(engines, key=lambda engine: engine.waiting, default=None)
        self.several = len(engines) > 1
        self.names = {engine.source: engine.title or engine.source for engine in engines}
        self.now = snapshot.now
        self.waits = snapshot.waits
        self.count = max(len(snapshot.waits), sum(engine.waiting for engine in engines))
        self.repaint()

    def title(self) -> str:
        return f"queue {figures.count(self.count)}"

    def note(self) -> list[Segment]:
        engine = self.engine
        if engine is None:
            return []
        return [Segment(f"{figures.count(engine.running)} running", self.look.dim)]

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        if not self.waits:
            text = "nobody waits" if self.engine is not None else ""
            if self.count:
                text = "who waits is not told"
            return [Line(width).put(text, look.dim).end(look.text)]
        table = self.whole and width >= TABLE_FROM and height >= 4
        rows = self._head(width) if table else []
        room = height - len(rows)
        for wait in self.waits[:room]:
            rows.append(self._entry(width, wait) if table else self._row(width, wait))
        if len(self.waits) > room:
            left = self.count - (room - 1)
            rows[-1] = Line(width).put(f"and {figures.count(left)} more", look.dim).end(look.text)
        return rows

    def _clock(self, wait: Wait, cells: int) -> str:
        return figures.clock(max(0, self.now - wait.since) / 1e6, cells)

    def _mark(self, wait: Wait) -> str:
        return self.look.glyphs.preempted if wait.preempted else " "

    def _row(self, width: int, wait: Wait) -> Row:
        look = self.look
        names = min(width, 14, max(6, width // 4))
        line = Line(width)
        line.put_segments(
            [Segment(short_id(wait.id, names, look.glyphs.ellipsis), look.text)], names
        )
        line.put(self._clock(wait, 8) + " ", look.stage(Stage.ADMISSION, bold=True))
        line.put(self._mark(wait) + " ", look.bad)
        if width >= 52:
            line.put(figures.short_count(wait.tokens).rjust(5) + "  ", look.dim)
        style = look.bad if wait.limit is Limit.NEVER and not wait.behind else look.dim
        return line.put_text(wait_text(wait), style, ellipsis=look.glyphs.ellipsis).end(look.text)

    def _head(self, width: int) -> list[Row]:
        look = self.look
        line = (
            Line(width)
            .put("place ", look.dim)
            .put("id".ljust(19), look.dim)
            .put("waits ms".rjust(10), look.dim)
        )
        line.put("tokens".rjust(9) + "  ", look.dim).put(
            "needs".rjust(14) + "left".rjust(9), look.dim
        )
        line.put("  waits for", look.dim)
        summary = Line(width).put(line_text(self.waits), look.text)
        return [summary.end(look.text), line.end(look.text)]

    def _entry(self, width: int, wait: Wait) -> Row:
        look = self.look
        line = Line(width).put(f"{wait.place:>5} ", look.dim)
        names = min(18, line.room)
        line.put_segments(
            [Segment(short_id(wait.id, names, look.glyphs.ellipsis), look.text)], names
        )
        line.put(self._mark(wait), look.bad)
        line.put(self._clock(wait, 10), look.stage(Stage.ADMISSION, bold=True))
        needs, left = needs_text(wait)
        line.put(figures.count(wait.tokens).rjust(9) + "  ", look.text)
        line.put(needs.rjust(14) + left.rjust(9) + "  ", look.text)
        style = look.bad if wait.limit is Limit.NEVER and not wait.behind else look.text
        text = wait_text(wait)
        if self.several:
            text += f" at {self.names.get(wait.engine, wait.engine)}"
        return line.put_text(text, style, ellipsis=look.glyphs.ellipsis).end(look.text)

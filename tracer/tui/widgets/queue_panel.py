"""The queue: who waits, for how long, and for what."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment

from tracer.stages import Stage
from tracer.state.view import EngineView, Phase, RequestView, Snapshot
from tracer.tui import figures
from tracer.tui.canvas import Line, Row
from tracer.tui.naming import short_id
from tracer.tui.panel import Panel
from tracer.tui.theme import Look
from tracer.tui.widgets.context_strip import engines_of


def waits_for(view: RequestView, engine: EngineView | None) -> str:
    """What keeps a request out of the batch, as far as the gauges tell: blocks, a slot, or the token budget."""
    if view.phase is Phase.FRONT_END:
        return "the front end"
    if engine is None:
        return ""
    if engine.max_batch and engine.batch >= engine.max_batch:
        return "a batch slot"
    if engine.block_size and engine.free is not None and view.prompt_tokens:
        needed = -(-(view.prompt_tokens + view.output_tokens) // engine.block_size)
        if engine.num_blocks and needed > engine.num_blocks:
            return f"{figures.count(needed)} blocks: more than there are"
        available = engine.free + (engine.cached or 0)
        if needed > available:
            return f"{figures.count(needed)} blocks, {figures.count(available)} free"
    if engine.max_batch_tokens and engine.step_tokens >= engine.max_batch_tokens:
        return "the token budget"
    return "the next step"


class QueuePanel(Panel):
    """One row for each request that waits, the longest wait first."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="queue", edge=True)
        self.waiting: tuple[RequestView, ...] = ()
        self.engine: EngineView | None = None
        self.now = 0
        self.count = 0

    def show(self, snapshot: Snapshot, waiting: Sequence[RequestView], count: int) -> None:
        """Draw those that wait; `count` is how many there are in all."""
        engines = engines_of(snapshot)
        self.engine = max(engines, key=lambda engine: engine.waiting, default=None)
        self.now = snapshot.now
        self.waiting = tuple(waiting)
        self.count = count
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
        if not self.waiting:
            text = "nobody waits" if self.engine is not None else ""
            return [Line(width).put(text, look.dim).end(look.text)]
        rows: list[Row] = []
        names = min(14, max(6, width // 4))
        for view in self.waiting[:height]:
            line = Line(width)
            line.put_segments([Segment(short_id(view.id, names, look.glyphs.ellipsis), look.text)], names)
            ms = (self.now - wait_began(view)) / 1e6
            preempted = view.phase is Phase.PREEMPTED
            line.put(figures.clock(ms, 8) + " ", look.stage(Stage.ADMISSION, bold=True))
            line.put((look.glyphs.preempted if preempted else " ") + " ", look.bad)
            if width >= 52:
                line.put(figures.short_count(view.prompt_tokens).rjust(5) + "  ", look.dim)
            line.put(waits_for(view, self.engine), look.dim)
            rows.append(line.end(look.text))
        if self.count > len(rows) and len(self.waiting) > height:
            rows[-1] = Line(width).put(f"and {self.count - len(rows) + 1} more", look.dim).end(look.text)
        return rows


def wait_began(view: RequestView) -> int:
    """Instant since which the request waits now."""
    for segment in reversed(view.segments):
        if segment.end is None:
            return segment.begin
    return view.segments[-1].end or view.received if view.segments else view.received

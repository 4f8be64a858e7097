"""The batch: how full it is, how long its steps take and which part of a step takes the time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment

from tracer.clock import NS_PER_S
from tracer.stages import Stage
from tracer.state.view import EngineView, Snapshot, StepView
from tracer.tui import figures
from tracer.tui.canvas import Line, Row, blank
from tracer.tui.history import History, nice_top, plot
from tracer.tui.panel import Panel
from tracer.tui.theme import Look
from tracer.tui.widgets.context_strip import engines_of

PARTS = (
    ("schedule", Stage.ADMISSION), ("prepare", Stage.TEMPLATE), ("embed", Stage.EMBED), ("layers", Stage.DECODE),
    ("head", Stage.LM_HEAD), ("sample", Stage.SAMPLE), ("update", Stage.TEARDOWN), ("wait", Stage.RECEIVE),
    ("stream", Stage.STREAM),
)  # fmt: skip
"""Parts of a step in their order, each with the stage whose colour it takes."""
RECENT = 40
"""Steps over which the parts are averaged."""
SEARCHED = 2_000
"""Steps looked at in one frame at most: what is older has no place on the charts of a slow screen either."""


class BatchPanel(Panel):
    """Members and tokens as gauges, step time and batch size as sparklines, the parts of a step as one bar."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="batch", edge=True)
        self.engine: EngineView | None = None
        self.steps: tuple[StepView, ...] = ()
        self.now = 0
        self.step_ms = History(NS_PER_S // 2)
        self.members = History(NS_PER_S // 2)
        self._last: tuple[str, int] = ("", -1)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the batch of the busiest engine."""
        engines = engines_of(snapshot)
        self.engine = max(engines, key=lambda engine: engine.batch, default=None)
        self.now = snapshot.now
        if self.engine is not None:
            self._take(snapshot.steps, self.engine.source)
        self.repaint()

    def _take(self, steps: Sequence[StepView], source: str) -> None:
        """Take in the steps since the last time. Views are made as they are looked at: from the end, and no further."""
        known, last = self._last
        recent: list[StepView] = []
        new: list[StepView] = []
        for index in range(len(steps) - 1, max(-1, len(steps) - 1 - SEARCHED), -1):
            step = steps[index]
            if step.source != source:
                continue
            fresh = known != source or step.n > last
            if not fresh and len(recent) >= RECENT:
                break
            if len(recent) < RECENT:
                recent.append(step)
            if fresh:
                new.append(step)
        if recent and known == source and recent[0].n < last:  # gone back in time
            self.step_ms.clear()
            self.members.clear()
            new = recent
        for step in reversed(new):
            self.step_ms.add(step.begin, (step.end - step.begin) / 1e6)
            self.members.add(step.begin, step.batch)
        if recent:
            self._last = (source, recent[0].n)
        self.steps = tuple(reversed(recent))

    def title(self) -> str:
        engine = self.engine
        if engine is None:
            return "batch"
        return f"batch {engine.batch}" + (f"/{engine.max_batch}" if engine.max_batch else "")

    def note(self) -> list[Segment]:
        engine = self.engine
        if engine is None:
            return []
        return [Segment(f"{figures.count(engine.steps)} steps", self.look.dim)]

    def body(self, width: int, height: int) -> list[Row]:
        engine = self.engine
        if engine is None:
            return []
        rows: list[Row] = [
            self._gauge(width, "members", engine.batch, engine.max_batch, Stage.DECODE),
            self._gauge(width, "tokens", engine.step_tokens, engine.max_batch_tokens, Stage.PREFILL),
        ]
        look = self.look
        if not self.steps:
            return rows[:height]
        parts = mean_parts(self.steps)
        table = self._parts(width, parts) if parts else []
        spare = max(0, height - len(rows) - 2 - (1 + len(table) if parts else 0))
        if spare >= 4:
            rows.append(blank(width, look.text))
        steps, members = 1 + min(7, max(0, spare - 2) * 2 // 3), 1 + min(3, max(0, spare - 2) // 3)
        last = (self.steps[-1].end - self.steps[-1].begin) / 1e6
        peak = nice_top(max((value for value in self.step_ms.peaks(width, self.now) if value is not None), default=0.0))
        text = figures.milliseconds(last)
        rows.extend(self._chart(width, "step ms", text, self.step_ms, steps, peak, Stage.PREFILL))
        most = float(engine.max_batch or nice_top(engine.batch))
        rows.extend(
            self._chart(width, "batch", figures.count(engine.batch), self.members, members, most, Stage.DECODE)
        )
        if parts:
            if spare >= 4:
                rows.append(blank(width, look.text))
            rows.append(self._stacked(width, parts))
            rows.extend(table)
        return rows[:height]

    def _gauge(self, width: int, name: str, value: int, most: int | None, stage: Stage) -> Row:
        look = self.look
        line = Line(width).put(name.ljust(8), look.dim)
        text = f"{figures.count(value)}/{figures.count(most)}" if most else figures.count(value)
        cells = max(0, width - 8 - 12)
        if cells and most:
            line.put_segments(meter(look, min(1.0, value / most), cells, stage), cells)
        else:
            line.fill_to(8 + cells, look.text)
        return line.put(text.rjust(12), look.text).end(look.text)

    def _chart(
        self, width: int, name: str, value: str, history: History, height: int, top: float, stage: Stage
    ) -> list[Row]:
        """Means as columns; above them, quieter, up to the largest value of each column."""
        look = self.look
        cells = max(0, width - 8 - 12)
        rises = look.glyphs.rises
        means = plot(history.page(cells, self.now), rises, height, top)
        peaks = plot(history.peaks(cells, self.now), rises, height, top) if look.fine else means
        rows: list[Row] = []
        for index, (mean, peak) in enumerate(zip(means, peaks, strict=True)):
            line = Line(width).put((name if index == 0 else "").ljust(8), look.dim)
            line.put_segments(self._two_tone(mean, peak, stage), len(mean))
            line.fill_to(8 + cells, look.text)
            if index == 0:
                line.put(value.rjust(12), look.text)
            elif index == height - 1:
                line.put(f"of {top:,.0f}".rjust(12), look.dim)
            rows.append(line.end(look.text))
        return rows

    def _two_tone(self, mean: str, peak: str, stage: Stage) -> list[Segment]:
        look = self.look
        if mean == peak:
            return [Segment(mean, look.stage(stage))]
        colour, quiet = look.stage_colours[stage], look.wait_colours[stage]
        segments: list[Segment] = []
        for low, high in zip(mean, peak, strict=True):
            if low == " ":
                glyph, style = high, look.style(quiet)
            elif high == "█" and low != "█":
                glyph, style = low, look.style(colour, quiet)
            else:
                glyph, style = low, look.style(colour)
            if segments and segments[-1].style is style:
                segments[-1] = Segment(segments[-1].text + glyph, style)
            else:
                segments.append(Segment(glyph, style))
        return segments

    def _stacked(self, width: int, parts: dict[str, float]) -> Row:
        look = self.look
        line = Line(width).put("a step".ljust(8), look.dim)
        total = sum(parts.values())
        cells = max(0, width - 8 - 12)
        line.put_segments(stacked(look, parts, cells), cells)
        return line.put(f"{figures.milliseconds(total)} ms".rjust(12), look.text).end(look.text)

    def _parts(self, width: int, parts: dict[str, float]) -> list[Row]:
        look = self.look
        per_row = 2 if width >= 36 else 1
        cells = width // per_row
        rows: list[Row] = []
        items = list(parts.items())
        for begin in range(0, len(items), per_row):
            line = Line(width)
            for index, (name, ms) in enumerate(items[begin : begin + per_row]):
                line.fill_to(index * cells, look.text)
                line.put(look.fill(part_stage(name)), look.stage(part_stage(name)))
                line.put(f" {name}".ljust(10), look.dim)
                line.put(figures.aligned_milliseconds(ms, min(8, cells - 12)), look.text)
            rows.append(line.end(look.text))
        return rows


def part_stage(name: str) -> Stage:
    """The stage whose colour a part of a step takes."""
    return next((stage for part, stage in PARTS if part == name), Stage.TEARDOWN)


def mean_parts(steps: tuple[StepView, ...]) -> dict[str, float]:
    """Mean ms of each part over steps, in the order of a step; parts that no step tells are left out."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, ms in step.parts:
            sums[name] = sums.get(name, 0.0) + ms
    order = {name: index for index, (name, _) in enumerate(PARTS)}
    return {name: sums[name] / len(steps) for name in sorted(sums, key=lambda name: order.get(name, len(order)))}


def meter(look: Look, share: float, cells: int, stage: Stage) -> list[Segment]:
    """A gauge `cells` wide filled to `share`, right to half a cell."""
    glyphs = look.glyphs
    halves = max(1 if share > 0 else 0, round(share * cells * 2))
    full, rest = divmod(halves, 2)
    text = glyphs.line * full + glyphs.half * rest
    return [Segment(text, look.stage(stage)), Segment(glyphs.track * (cells - len(text)), look.faint)]


def stacked(look: Look, parts: dict[str, float], cells: int) -> list[Segment]:
    """Parts side by side in proportion, exactly `cells` wide; a part of any length has at least one cell."""
    total = sum(parts.values())
    if total <= 0 or cells < 1:
        return [Segment(" " * max(0, cells), look.text)]
    names = [name for name, ms in parts.items() if ms > 0][:cells]
    widths = {name: max(1, int(parts[name] / total * cells)) for name in names}
    while sum(widths.values()) > cells:
        widths[max(widths, key=lambda name: widths[name])] -= 1
    widths[max(names, key=lambda name: parts[name])] += cells - sum(widths.values())
    return [
        Segment(look.fill(part_stage(name)) * width, look.stage(part_stage(name)))
        for name, width in widths.items()
    ]

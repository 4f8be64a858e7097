"""The batch: how full it is, what it cannot grow beyond, how long its steps take and which part of
a step takes the time. With all the room, who is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rich.segment import Segment

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.format import figures
from tracer.state.view import EngineView, Limit, RequestView, Snapshot, StepView, Wait
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.live.queue_panel import LIMITS
from tracer.tui.screens.live.rows import Entry, request_table, with_table
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.columns import column_cells, rows_of
from tracer.tui.toolkit.history import History, nice_top
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.plot import tone
from tracer.tui.toolkit.theme import Look

PARTS = {
    "schedule": Stage.ADMISSION, "prepare": Stage.TEMPLATE, "embed": Stage.EMBED,
    "layers": Stage.DECODE, "head": Stage.LM_HEAD, "sample": Stage.SAMPLE,
    "update": Stage.TEARDOWN, "wait": Stage.RECEIVE, "stream": Stage.STREAM,
}  # fmt: skip
"""Parts of a step in their order, each with the stage whose colour it takes."""
RECENT = 40
"""Steps over which the parts are averaged."""
SEARCHED = 2_000
"""Steps looked at in one frame at most: what is older has no place on the charts of a slow screen
either."""
NAMES, VALUES = 10, 12
"""Cells of what a row is about at its left, and of its figure at its right."""


class _Series(NamedTuple):
    """What a chart shows: its name, its value now, the stage whose colour it takes, and the value
    of a full column (None: the largest in sight)."""

    name: str
    value: str
    stage: Stage
    history: History
    top: float | None


class BatchPanel(Panel):
    """Members and tokens as gauges, the limit, step time and batch size as columns, the parts of a
    step as one bar."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="batch", edge=True)
        self.engine: EngineView | None = None
        self.steps: tuple[StepView, ...] = ()
        self.now = 0
        self.step_ms = History(NS_PER_S // 2)
        self.members = History(NS_PER_S // 2)
        self._last: tuple[str, int] = ("", -1)
        self.ridge: float | None = None
        """Sequences at which computing takes as long as reading the weights."""
        self.next: Wait | None = None
        self.whole = False
        """Whether it has all the room."""
        self.batch_members: tuple[RequestView, ...] = ()

    @property
    def members_wanted(self) -> int:
        return self.size.height if self.whole else 0

    def show(
        self,
        snapshot: Snapshot,
        ridge: Callable[[EngineView], float | None] | None,
        members: Sequence[RequestView],
    ) -> None:
        """Draw the batch of the busiest engine. `ridge` gives the ridge of an engine (None: as
        before), `members` are those with most tokens in the last step."""
        engine = max(engines_of(snapshot), key=lambda engine: engine.batch, default=None)
        self.engine, self.now = engine, snapshot.now
        if engine is None:
            self.ridge, self.next, self.batch_members = None, None, ()
        else:
            source = engine.source
            self.ridge = self.ridge if ridge is None else ridge(engine)
            self.next = next((wait for wait in snapshot.waits if wait.engine == source), None)
            self.batch_members = tuple(
                view for view in members if view.step_tokens and view.engine in ("", source)
            )
            self._add(snapshot.steps, source)
        self.repaint()

    def _add(self, steps: Sequence[StepView], source: str) -> None:
        """Add the steps since the last time. Views are made as they are read: from the end, and no
        further."""
        known, last = self._last
        recent: list[StepView] = []
        new: list[StepView] = []
        for index in range(len(steps) - 1, max(-1, len(steps) - 1 - SEARCHED), -1):
            step = steps[index]
            if step.source != source:
                continue
            fresh = known != source or step.n > last
            if len(recent) < RECENT:
                recent.append(step)
            elif not fresh:
                break
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

        charts, table = partial(self._charts, engine), partial(self._table, engine)
        if self.whole and height >= 8 and self.batch_members:
            return with_table(self.look, width, height, charts, table, len(self.batch_members))
        return charts(width, height)

    def _charts(self, engine: EngineView, width: int, height: int) -> list[Row]:
        rows = self._gauges(width, height, engine)
        if not self.steps:
            return rows[:height]
        parts = mean_parts(self.steps)
        table = part_rows(self.look, width, parts)
        spare = max(0, height - len(rows) - 2 - len(table))
        gap = [blank(width, self.look.text)] if spare >= 4 else []
        most_steps, most_members = (14, 8) if self.whole else (7, 3)
        last = self.steps[-1]
        last_ms = figures.milliseconds((last.end - last.begin) / 1e6)
        series = _Series("step ms", last_ms, Stage.PREFILL, self.step_ms, None)
        rows += gap + self._chart(width, series, 1 + min(most_steps, max(0, spare - 2) * 2 // 3))
        top = float(engine.max_batch or nice_top(engine.batch))
        series = _Series("batch", figures.count(engine.batch), Stage.DECODE, self.members, top)
        rows += self._chart(width, series, 1 + min(most_members, max(0, spare - 2) // 3))
        return (rows + gap + table if table else rows)[:height]

    def _gauges(self, width: int, height: int, engine: EngineView) -> list[Row]:
        look = self.look
        prefill = engine.prefill_tokens
        decode = max(0, engine.step_tokens - prefill)
        tokens = ((decode, Stage.DECODE), (prefill, Stage.PREFILL))
        rows = [
            self._gauge(width, "members", ((engine.batch, Stage.DECODE),), engine.max_batch),
            self._gauge(width, "tokens", tokens, engine.max_batch_tokens),
        ]
        if height >= 6:
            rows.append(self._limit(width, engine))
        if height >= 11:
            line = self._named(width, "step")
            line.add(look.fill(Stage.DECODE), look.stage(Stage.DECODE))
            line.add(f" {figures.count(decode)} decode + ", look.text)
            line.add(look.fill(Stage.PREFILL), look.stage(Stage.PREFILL))
            text = f" {figures.count(prefill)} prefill tokens"
            text = figures.fitting(line.room, text, text.removesuffix(" tokens"))
            rows.append(line.add(text, look.text).end(look.text))
        if self.ridge is not None and height >= 9:
            line = self._named(width, "ridge").add(f"{look.glyphs.ridge} ", look.warn)
            line.add(ridge_text(self.ridge, engine, line.room), look.text)
            rows.append(line.end(look.text))
        return rows

    def _named(self, width: int, name: str) -> Line:
        return Line(width).add(name.ljust(NAMES), self.look.dim)

    def _limit(self, width: int, engine: EngineView) -> Row:
        """Say what the batch cannot grow beyond, and what the next in line waits for."""
        look, limit = self.look, engine.bound_by
        line = self._named(width, "limit")
        if limit is None:
            return line.add("none reached" if engine.batch else "batch empty", look.dim).end(
                look.text
            )
        line.add(LIMITS[limit], look.warn)
        if self.next is not None and self.next.limit is limit:
            needs, has = figures.count(self.next.needs), figures.count(self.next.has)
            kv = limit is Limit.KV
            line.add(
                f": next needs {needs}, {has} free" if kv else ": next request waits", look.text
            )
        return line.end(look.text)

    def _gauge(
        self, width: int, name: str, parts: Sequence[tuple[int, Stage]], most: int | None
    ) -> Row:
        """Draw parts of a whole; in the gauge of members with a line at the ridge."""
        look = self.look
        value = figures.count(sum(part for part, _ in parts))
        line = self._named(width, name)
        cells = max(0, width - NAMES - VALUES)
        if cells and most:
            segments = meter(look, [(part / most, stage) for part, stage in parts], cells)
            if name == "members" and self.ridge is not None and self.ridge <= most:
                column = min(cells - 1, int(self.ridge / most * cells))
                segments = marked(segments, column, Segment(look.glyphs.ridge, look.warn))
            line.add_segments(segments, cells)
        line.fill_to(NAMES + cells, look.text)
        text = f"{value}/{figures.count(most)}" if most else value
        return line.add(text.rjust(VALUES), look.text).end(look.text)

    def _chart(self, width: int, series: _Series, height: int) -> list[Row]:
        """Draw means as columns; above them, quieter, up to the largest value of each column."""
        look = self.look
        cells = max(0, width - NAMES - VALUES)
        means = [mean or 0.0 for mean in series.history.page(cells, self.now)]
        peaks = [peak or 0.0 for peak in series.history.peaks(cells, self.now)]
        top = nice_top(max(peaks, default=0.0)) if series.top is None else series.top
        solid, quiet = tone(look, series.stage), tone(look, series.stage, quiet=True)
        columns = [
            column_cells(look, ((mean, solid), ((peak - mean) * look.fine, quiet)), height, top)
            for mean, peak in zip(means, peaks, strict=True)
        ]
        rows: list[Row] = []
        for index, segments in enumerate(rows_of(columns, height)):
            line = self._named(width, series.name if index == 0 else "")
            if cells:
                line.add_segments(segments, cells)
            if index == 0:
                line.add(series.value.rjust(VALUES), look.text)
            elif index == height - 1:
                line.add(f"of {figures.count(top)}".rjust(VALUES), look.dim)
            rows.append(line.end(look.text))
        return rows

    def _table(self, engine: EngineView, width: int, height: int) -> list[Row]:
        look = self.look
        heads = {"member": 0, "step": 7, "position": 10, "prompt": 8, "out": 7}

        def entries() -> Iterator[Entry]:
            for view in self.batch_members:
                tokens = view.step_tokens or 0
                prefill = view.output_tokens == 0 or tokens > 1
                stage = Stage.PREFILL if prefill else Stage.DECODE
                yield (
                    view,
                    look.text,
                    (
                        (figures.count(tokens), look.stage(stage, bold=True)),
                        (figures.count(view.computed_tokens), look.text),
                        (figures.short_count(view.prompt_tokens), look.dim),
                        (figures.short_count(view.output_tokens), look.dim),
                    ),
                )

        return request_table(look, width, height, heads, entries(), engine.batch)


def part_stage(name: str) -> Stage:
    return PARTS.get(name, Stage.TEARDOWN)


def mean_parts(steps: Sequence[StepView]) -> dict[str, float]:
    """Return the mean ms of each part over steps, in the order of a step."""
    sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for step in steps:
        for name, ms in step.parts:
            sums[name] = sums.get(name, 0.0) + ms
    told = {name for step in steps for name, _ in step.parts}
    return {name: ms / len(steps) for name, ms in sums.items() if name in told}


def part_rows(look: Look, width: int, parts: dict[str, float]) -> list[Row]:
    """Draw the parts of a mean step as one bar, and below it in figures."""
    if not parts:
        return []
    cells = max(0, width - NAMES - VALUES)
    line = Line(width).add("mean step".ljust(NAMES), look.dim)
    line.add_segments(stacked(look, parts, cells), cells)
    total = f"{figures.milliseconds(sum(parts.values()))} ms"
    return [
        line.add(total.rjust(VALUES), look.text).end(look.text),
        *part_table(look, width, parts),
    ]


def part_table(look: Look, width: int, parts: dict[str, float]) -> list[Row]:
    """Draw the parts of a step in figures: ms, and their share where there is room."""
    total = sum(parts.values())
    per_row = 2 if width >= 36 else 1
    cells = width // per_row
    items = list(parts.items())
    rows: list[Row] = []
    for begin in range(0, len(items), per_row):
        line = Line(width)
        for index, (name, ms) in enumerate(items[begin : begin + per_row]):
            line.fill_to(index * cells, look.text)
            line.add(look.fill(part_stage(name)), look.stage(part_stage(name)))
            line.add(" ", look.dim).add_text(name, look.dim, 8)
            line.add(figures.aligned_milliseconds(ms, min(8, cells - 12)), look.text)
            if cells >= 25 and total:
                line.add(figures.percentage(ms / total).rjust(6), look.dim)
        rows.append(line.end(look.text))
    return rows


def stacked(look: Look, parts: dict[str, float], cells: int) -> list[Segment]:
    """Draw parts side by side in proportion; a part of any length has at least one cell."""
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


def meter(look: Look, parts: Sequence[tuple[float, Stage]], cells: int) -> list[Segment]:
    """Draw a gauge `cells` wide filled to each of `parts` (a share and the stage whose colour it
    takes) in turn, right to half a cell at the end. A part of any size has at least one cell where
    there is room."""
    glyphs = look.glyphs
    present = [(share, stage) for share, stage in parts if share > 0][:cells]
    segments: list[Segment] = []
    used, total = 0, 0.0
    for index, (share, stage) in enumerate(present):
        total += share
        left = cells - (len(present) - 1 - index)
        halves = max(2 * used + 1, min(2 * left, round(min(1.0, total) * cells * 2)))
        full, rest = divmod(halves, 2)
        if index < len(present) - 1:
            full, rest = min(left, max(used + 1, full)), 0
        text = glyphs.line * (full - used) + glyphs.half * rest
        segments.append(Segment(text, look.stage(stage)))
        used = full + rest
    return [*segments, Segment(glyphs.track * (cells - used), look.faint)]


def marked(segments: list[Segment], column: int, mark: Segment) -> list[Segment]:
    """Put a one-cell mark over what was in a column; every character takes one cell."""
    before, _, after = Segment.divide(segments, (column, column + 1, 10_000))
    return [*before, mark, *after]


def ridge_text(ridge: float, engine: EngineView, room: int) -> str:
    """Say where the ridge is and on which side of it the batch is, in `room` cells."""
    batch = f"from batch {figures.count(max(1, round(ridge)))}"
    if engine.batch > ridge:
        side, more = "reached", "one more slows each step"
    else:
        above = engine.max_batch and ridge > engine.max_batch
        side, more = "above all slots" if above else "not reached", "one more costs little"
    at = f"compute-bound {batch}, {side}"
    return figures.fitting(room, f"{at}: {more}", at, f"compute-bound {batch}", batch)

"""The batch: how full it is, what it cannot grow beyond, how long its steps take and which part of
a step takes the time. With all the room, who is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.segment import Segment

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.state.view import EngineView, Limit, RequestView, Snapshot, StepView, Wait
from tracer.tui.naming import phase_text, short_id
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.screens.live.waits import wait_text
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.history import History, nice_top, plot
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

PARTS = (
    ("schedule", Stage.ADMISSION),
    ("prepare", Stage.TEMPLATE),
    ("embed", Stage.EMBED),
    ("layers", Stage.DECODE),
    ("head", Stage.LM_HEAD),
    ("sample", Stage.SAMPLE),
    ("update", Stage.TEARDOWN),
    ("wait", Stage.RECEIVE),
    ("stream", Stage.STREAM),
)
"""Parts of a step in their order, each with the stage whose colour it takes."""
RECENT = 40
"""Steps over which the parts are averaged."""
SEARCHED = 2_000
"""Steps looked at in one frame at most: what is older has no place on the charts of a slow screen
either."""


BESIDE_FROM = 100
"""Cells from which, with all the room, the members stand beside the charts."""
FULL = {Limit.SLOTS: "batch slots", Limit.TOKENS: "token budget", Limit.KV: "KV blocks"}


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
        """How many members it has room for."""
        return self.size.height if self.whole else 0

    def show(
        self, snapshot: Snapshot, ridge: Callable[[EngineView], float | None] | None = None,
        members: Sequence[RequestView] = (),
    ) -> None:  # fmt: skip
        """Draw the batch of the busiest engine. `ridge` says where an engine's ridge is (None:
        where it was), `members` are those with most tokens in the last step."""
        engines = engines_of(snapshot)
        self.engine = engine = max(engines, key=lambda engine: engine.batch, default=None)
        self.now = snapshot.now
        if ridge is not None or engine is None:
            self.ridge = ridge(engine) if ridge is not None and engine is not None else None
        self.next = next(
            (
                wait
                for wait in snapshot.waits
                if engine is not None and wait.engine == engine.source
            ),
            None,
        )
        self.batch_members = tuple(
            view for view in members
            if view.step_tokens and engine is not None and view.engine in ("", engine.source)
        )  # fmt: skip
        if self.engine is not None:
            self._take(snapshot.steps, self.engine.source)
        self.repaint()

    def _take(self, steps: Sequence[StepView], source: str) -> None:
        """Take in the steps since the last time. Views are made as they are looked at: from the
        end, and no further."""
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
        if self.whole and height >= 8 and self.batch_members:
            return self._with_members(width, height, engine)
        return self._charts(width, height, engine)

    def _charts(self, width: int, height: int, engine: EngineView) -> list[Row]:
        rows = self._gauges(width, height, engine)
        look = self.look
        if not self.steps:
            return rows[:height]
        parts = mean_parts(self.steps)
        table = self._parts(width, parts) if parts else []
        spare = max(0, height - len(rows) - 2 - (1 + len(table) if parts else 0))
        if spare >= 4:
            rows.append(blank(width, look.text))
        most_steps, most_members = (14, 8) if self.whole else (7, 3)
        steps, members = (
            1 + min(most_steps, max(0, spare - 2) * 2 // 3),
            1 + min(most_members, max(0, spare - 2) // 3),
        )
        last = (self.steps[-1].end - self.steps[-1].begin) / 1e6
        peak = nice_top(
            max(
                (value for value in self.step_ms.peaks(width, self.now) if value is not None),
                default=0.0,
            )
        )
        text = figures.milliseconds(last)
        rows.extend(self._chart(width, "step ms", text, self.step_ms, steps, peak, Stage.PREFILL))
        most = float(engine.max_batch or nice_top(engine.batch))
        rows.extend(
            self._chart(
                width,
                "batch",
                figures.count(engine.batch),
                self.members,
                members,
                most,
                Stage.DECODE,
            )
        )
        if parts:
            if spare >= 4:
                rows.append(blank(width, look.text))
            rows.append(self._stacked(width, parts))
            rows.extend(table)
        return rows[:height]

    def _gauges(self, width: int, height: int, engine: EngineView) -> list[Row]:
        """How full the batch is, of what, and what it cannot grow beyond: two to five rows."""
        look = self.look
        decode = max(0, engine.step_tokens - engine.prefill_tokens)
        rows: list[Row] = [
            self._gauge(
                width, "members", ((engine.batch, Stage.DECODE),), engine.max_batch, self.ridge
            ),
            self._gauge(
                width,
                "tokens",
                ((decode, Stage.DECODE), (engine.prefill_tokens, Stage.PREFILL)),
                engine.max_batch_tokens,
            ),
        ]
        if height >= 6:
            rows.append(self._limit(width, engine))
        if height >= 11:
            line = (
                Line(width)
                .put("step".ljust(8), look.dim)
                .put(look.fill(Stage.DECODE), look.stage(Stage.DECODE))
            )
            line.put(f" {figures.count(decode)} decode  ", look.text)
            line.put(look.fill(Stage.PREFILL), look.stage(Stage.PREFILL))
            line.put(f" {figures.count(engine.prefill_tokens)} prefill tokens", look.text)
            rows.append(line.end(look.text))
        if self.ridge is not None and height >= 9:
            line = (
                Line(width).put("ridge".ljust(8), look.dim).put(f"{look.glyphs.ridge} ", look.warn)
            )
            line.put(ridge_text(self.ridge, engine, line.room), look.text)
            rows.append(line.end(look.text))
        return rows

    def _limit(self, width: int, engine: EngineView) -> Row:
        """What the batch cannot grow beyond, and what the next in line waits for."""
        look = self.look
        line = Line(width).put("limit".ljust(8), look.dim)
        limit = engine.bound_by
        if limit is None:
            return line.put("none reached" if engine.batch else "nothing runs", look.dim).end(
                look.text
            )
        line.put(FULL[limit], look.warn)
        if self.next is not None and self.next.limit is limit:
            if limit is Limit.KV:
                line.put_text(
                    f": the next needs {wait_text(self.next)}",
                    look.text,
                    ellipsis=look.glyphs.ellipsis,
                )
            else:
                line.put(": the next one waits", look.text)
        return line.end(look.text)

    def _gauge(
        self,
        width: int,
        name: str,
        parts: Sequence[tuple[int, Stage]],
        most: int | None,
        mark: float | None = None,
    ) -> Row:
        """Parts of a whole one after the other; `mark` is a value at which a line stands."""
        look = self.look
        value = sum(part for part, _ in parts)
        line = Line(width).put(name.ljust(8), look.dim)
        text = f"{figures.count(value)}/{figures.count(most)}" if most else figures.count(value)
        cells = max(0, width - 8 - 12)
        if cells and most:
            segments = meter(look, [(part / most, stage) for part, stage in parts], cells)
            if mark is not None and mark <= most:
                column = min(cells - 1, int(mark / most * cells))
                segments = marked(segments, column, Segment(look.glyphs.ridge, look.warn))
            line.put_segments(segments, cells)
        else:
            line.fill_to(8 + cells, look.text)
        return line.put(text.rjust(12), look.text).end(look.text)

    # --- with all the room

    def _with_members(self, width: int, height: int, engine: EngineView) -> list[Row]:
        look = self.look
        if width >= BESIDE_FROM:
            left = width * 11 // 20
            charts = self._charts(left, height, engine)
            charts += [blank(left, look.text)] * (height - len(charts))
            gap = [Segment(f" {look.glyphs.vertical} ", look.faint)]
            table = self._table(width - left - 3, height, engine)
            return [[*row, *gap, *other] for row, other in zip(charts, table, strict=True)]
        table_height = min(len(self.batch_members) + 1, height // 2)
        charts = self._charts(width, height - table_height - 1, engine)
        charts += [blank(width, look.text)] * (height - table_height - len(charts))
        return charts + self._table(width, table_height, engine)

    def _table(self, width: int, height: int, engine: EngineView) -> list[Row]:
        """The members, those with most tokens in the last step first, in exactly `height` rows."""
        look = self.look
        names = min(width, 14, max(6, width // 4))
        line = Line(width).put("member".ljust(names), look.dim).put("step".rjust(7), look.dim)
        line.put("position".rjust(10), look.dim).put("prompt".rjust(8), look.dim).put(
            "out".rjust(7), look.dim
        )
        rows: list[Row] = [line.put("  ", look.text).put("phase", look.dim).end(look.text)]
        for view in self.batch_members[: max(0, height - 1)]:
            tokens = view.step_tokens or 0
            line = Line(width).put_segments(
                [Segment(short_id(view.id, names, look.glyphs.ellipsis), look.text)], names
            )
            prefill = view.output_tokens == 0 or tokens > 1
            line.put(
                figures.count(tokens).rjust(7),
                look.stage(Stage.PREFILL if prefill else Stage.DECODE, bold=True),
            )
            line.put(figures.count(view.computed_tokens).rjust(10), look.text)
            line.put(figures.short_count(view.prompt_tokens).rjust(8), look.dim)
            line.put(figures.short_count(view.output_tokens).rjust(7), look.dim)
            text, style = phase_text(view, look)
            rows.append(line.put("  ", look.text).put_text(text, style).end(look.text))
        if engine.batch > len(rows) - 1 and len(rows) == height and height > 1:
            left = engine.batch - (len(rows) - 2)
            rows[-1] = Line(width).put(f"and {figures.count(left)} more", look.dim).end(look.text)
        while len(rows) < height:
            rows.append(blank(width, look.text))
        return rows[:height]

    def _chart(
        self,
        width: int,
        name: str,
        value: str,
        history: History,
        height: int,
        top: float,
        stage: Stage,
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
    """Mean ms of each part over steps, in the order of a step; parts that no step tells are left
    out."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, ms in step.parts:
            sums[name] = sums.get(name, 0.0) + ms
    order = {name: index for index, (name, _) in enumerate(PARTS)}
    return {
        name: sums[name] / len(steps)
        for name in sorted(sums, key=lambda name: order.get(name, len(order)))
    }


def meter(look: Look, parts: Sequence[tuple[float, Stage]], cells: int) -> list[Segment]:
    """A gauge `cells` wide filled to each of `parts` (a share and the stage whose colour it takes)
    in turn, right to half a cell at the end. A part of any size has at least one cell where there
    is room."""
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
    """`segments` with a one-cell mark over what was in a column; every character of theirs takes
    one cell."""
    found: list[Segment] = []
    at = 0
    for text, style, _ in segments:
        inside = column - at
        if 0 <= inside < len(text):
            found += [Segment(text[:inside], style), mark, Segment(text[inside + 1 :], style)]
        else:
            found.append(Segment(text, style))
        at += len(text)
    return [segment for segment in found if segment.text]


def ridge_text(ridge: float, engine: EngineView, room: int) -> str:
    """Where the ridge is and on which side of it the batch is, in at most `room` cells as far as
    that goes."""
    at = f"at {figures.count(max(1, round(ridge)))}"
    if engine.batch > ridge:
        return figures.fitting(
            room, f"{at}, passed: one more makes each step longer", f"{at}, passed"
        )
    if engine.max_batch and ridge > engine.max_batch:
        return figures.fitting(
            room, f"{at}, above all slots: one more costs little", f"{at}, above all slots"
        )
    return figures.fitting(room, f"{at}, not reached: one more costs little", f"{at}, not reached")


def stacked(look: Look, parts: dict[str, float], cells: int) -> list[Segment]:
    """Parts side by side in proportion, exactly `cells` wide; a part of any length has at least one
    cell."""
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

"""The plots of the Numbers screen: latencies against a size, and one engine over time.

Both plots of ITL have one scale, so that it is seen which of the two it rises with: with the batch
it is compute-bound, with the position it reads the cache, with neither it is no matter of the
device. Time fills a plot and then jumps by a quarter of it: a plot that crept by a column would
send all of itself each time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from rich.segment import Segment

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.format import figures
from tracer.state.metrics.numbers import Curve, Numbers, Stretch
from tracer.tui.screens.numbers.tables import NumbersPart
from tracer.tui.toolkit.canvas import label
from tracer.tui.toolkit.columns import Cell, Column, Tone, bars, column_cells
from tracer.tui.toolkit.history import nice_top
from tracer.tui.toolkit.plot import Chart, Plot, swatches, tone
from tracer.tui.toolkit.theme import Look

RISES, FLAT = 1.5, 1.2
"""A rise (p50 at the upper end over p50 at the lower) that is one, and one that is none: within the
spread of a busy host and of the ranges' 4 %."""
SPAN = 3.0
"""Sizes must differ by so much for a curve to be called flat."""


class SizePlot(Plot, NumbersPart):
    """Columns of three tones side by side, one for each range of sizes."""

    words: tuple[str, str, str]
    """What the tones stand for."""

    @abstractmethod
    def tones(self) -> tuple[Tone, Tone, Tone]: ...

    @abstractmethod
    def columns(self, numbers: Numbers, most: int) -> tuple[list[tuple[int, Column]], float]:
        """Return at most the last `most` ranges, with the size at their lower end, and the top of
        the scale in ms."""

    def chart(self, cells: int, height: int) -> Chart | None:
        columns, top = self.columns(self.numbers, cells) if self.numbers is not None else ([], 1.0)
        if not columns:
            return None
        drawn, slot = bars(self.look, [column for _, column in columns], height, top, cells)
        labels = [(at * slot, figures.short_count(low)) for at, (low, _) in enumerate(columns)]
        upper, middle = scale_labels(top)
        return Chart(drawn, upper, labels=labels, middle=middle)

    def legend(self) -> list[Segment]:
        return swatches(self.look, list(zip(self.tones(), self.words, strict=True)))


class ItlPlot(SizePlot):
    """ITL `by` batch size or sequence position."""

    empty = "no step without a prompt has given two tokens yet"

    def __init__(self, look: Look, by: str, id: str) -> None:
        super().__init__(look, id=id)
        self.by = by
        self.words = ("p50", "p95", f"few samples   x: {by}")

    def title(self) -> str:
        return f"ITL by {self.by}"

    def curve(self, numbers: Numbers) -> Curve:
        return numbers.by_batch if self.by == "batch size" else numbers.by_position

    def note(self) -> list[Segment]:
        look, numbers = self.look, self.numbers
        curve = self.curve(numbers) if numbers is not None else Curve()
        if numbers is None or curve.rise is None:
            return []
        rises, flat = curve.rise >= RISES, curve.rise < FLAT
        cause = ""
        if rises:
            cause = ": compute-bound" if self.by == "batch size" else ": cache reads"
        elif word_of(numbers.by_batch) == word_of(numbers.by_position) == "flat":
            cause = ": CPU if slow"
        text = f"{look.glyphs.times}{curve.rise:.1f} {word_of(curve)}"
        text += cause if self.size.width >= 40 else ""
        return [Segment(text, look.warn if rises else look.good if flat else look.bold)]

    def tones(self) -> tuple[Tone, Tone, Tone]:
        look = self.look
        return (
            tone(look, Stage.DECODE),
            tone(look, Stage.DECODE, "░", ".", quiet=True),
            tone(look, Stage.TEARDOWN, "▒", "-"),
        )

    def columns(self, numbers: Numbers, most: int) -> tuple[list[tuple[int, Column]], float]:
        p50, p95, thin = self.tones()
        points = self.curve(numbers).points[-most:]
        few = max(20, sum(point.count for point in points) // 100)
        columns: list[tuple[int, Column]] = [
            (point.low, ((point.p50, p50 if point.count >= few else thin),
                         (point.p95 - point.p50, p95)))
            for point in points
        ]  # fmt: skip
        return columns, scale_of(numbers)


class PromptPlot(SizePlot):
    """Medians: queue below, prefill on it, the rest of TTFT on top."""

    empty = "no request has ended yet"
    words = ("queue", "prefill", "rest   p50, x: prompt tokens")

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="prompt-plot")

    def title(self) -> str:
        return "TTFT by prompt length"

    def note(self) -> list[Segment]:
        points = self.numbers.by_prompt if self.numbers is not None else ()
        count = sum(point.count for point in points)
        return [Segment(f"{figures.count(count)} requests", self.look.dim)] if count else []

    def tones(self) -> tuple[Tone, Tone, Tone]:
        look = self.look
        return (
            tone(look, Stage.ADMISSION, "░", "."),
            tone(look, Stage.PREFILL, "█", "#"),
            tone(look, Stage.STREAM, "▒", "+"),
        )

    def columns(self, numbers: Numbers, most: int) -> tuple[list[tuple[int, Column]], float]:
        queue, prefill, rest = self.tones()
        points = numbers.by_prompt[-most:]
        columns: list[tuple[int, Column]] = []
        for point in points:
            waited = min(point.queue or 0.0, point.p50)
            computed = min(point.prefill or 0.0, point.p50 - waited)
            others = point.p50 - waited - computed
            columns.append((point.low, ((waited, queue), (computed, prefill), (others, rest))))
        return columns, nice_top(max((point.p50 for point in points), default=0.0))


class HistoryPlot(Plot, NumbersPart):
    """The busiest engine over the window."""

    empty = "no engine has made a step yet"

    def note(self) -> list[Segment]:
        history = self.numbers.history if self.numbers is not None else None
        title = (history.title or history.engine) if history is not None else ""
        return [Segment(label(title)[:24], self.look.dim)] if title else []

    def chart(self, cells: int, height: int) -> Chart | None:
        numbers = self.numbers
        if numbers is None or not numbers.history.stretches:
            return None
        now_s = (numbers.now - numbers.began) / NS_PER_S
        window_s = numbers.window_s if math.isfinite(numbers.window_s) else max(now_s, 1.0)
        grain = numbers.history.grain_s
        per = grain * max(1, math.ceil(min(window_s, max(now_s, grain)) / grain / cells))
        last = math.floor(now_s / per)
        if now_s <= window_s:  # all of it, from the start
            end = max(cells, last + 1)
        else:
            jump = max(1, cells // 4)
            end = (last // jump + 1) * jump
        first = end - cells
        columns: list[list[Stretch]] = [[] for _ in range(cells)]
        for stretch in numbers.history.stretches:
            at = math.floor(stretch.begin_s / per) - first
            if 0 <= at < cells:
                columns[at].append(stretch)
        chart = self.drawn(columns, height, per, last - first)
        chart.labels = [
            (at, figures.instant(round((first + at) * per * NS_PER_S)))
            for at in range(0, cells - 4, max(1, cells // 5))
        ]
        return chart

    @abstractmethod
    def drawn(self, columns: list[list[Stretch]], height: int, per: float, now: int) -> Chart:
        """Draw the stretches in each column of `per` seconds; time has come to column `now`."""


class StepPlot(HistoryPlot):
    """Mean step time, up to the longest above it; a mark where members waited and no step ran."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="step-plot")

    def title(self) -> str:
        return "step time"

    def drawn(self, columns: list[list[Stretch]], height: int, per: float, now: int) -> Chart:
        look = self.look
        means, peaks = [_mean(column) for column in columns], [_peak(column) for column in columns]
        most = nice_top(min(max(peaks), 4 * max(means)) or 1.0)
        solid = tone(look, Stage.LM_HEAD if not look.fine else Stage.DECODE)
        quiet = tone(look, Stage.DECODE, "░", ".", quiet=True)
        drawn = [
            column_cells(look, ((mean, solid), (peak - mean, quiet)), height, most)
            for mean, peak in zip(means, peaks, strict=True)
        ]
        words = self.legend()
        stalls = [
            (index, stretch.wait)
            for index, column in enumerate(columns)
            for stretch in column
            if stretch.stalled
        ]
        for index, wait in stalls:  # no step ran until the one that tells of it
            for stalled in drawn[max(0, index - int(wait / 1000 / per)) : index + 1]:
                stalled[0] = (look.glyphs.warning, look.bad)
        if stalls:
            longest = figures.milliseconds(max(wait for _, wait in stalls))
            waited = f"members waited up to {longest} ms between steps"
            words = [Segment(f"{look.glyphs.warning} stalled: {waited}", look.bad)]
        top, middle = scale_labels(most)
        return Chart(drawn, top, words=words, middle=middle)

    def legend(self) -> list[Segment]:
        look = self.look
        longest = tone(look, Stage.DECODE, "░", ".", quiet=True)
        mean = tone(look, Stage.DECODE)
        return swatches(look, [(mean, "mean"), (longest, "longest   no stall")])


class PoolPlot(HistoryPlot):
    """Blocks that requests hold and blocks kept for reuse, as shares of all; below, on its own
    scale, the queue."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="pool-plot")

    def title(self) -> str:
        return "KV cache and queue"

    def drawn(self, columns: list[list[Stretch]], height: int, per: float, now: int) -> Chart:
        look = self.look
        queue_height = max(1, height // 3)
        queues = [max((stretch.waiting for stretch in column), default=0) for column in columns]
        longest = max(queues)
        deep = nice_top(max(1, longest))
        live, cached = tone(look, Stage.DECODE), tone(look, Stage.TEMPLATE, "░", ":", quiet=True)
        wait = tone(look, Stage.ADMISSION, "▒", "w")
        drawn: list[list[Cell]] = []
        used, kept, total = 0.0, 0.0, 0.0
        for column, queue in zip(columns[: now + 1], queues, strict=False):
            # what nothing changed is as it was
            used, kept, total = _pool(column) or (used, kept, total)
            parts = ((used / total, live), (kept / total, cached)) if total else ()
            above = column_cells(look, parts, height - queue_height, 1.0)
            drawn.append([*above, *column_cells(look, ((queue, wait),), queue_height, deep)])
        queue_text = f"queue, up to {figures.count(longest)}"
        words = swatches(look, [(live, "live"), (cached, "cached"), (wait, queue_text)])
        return Chart(drawn, "100 %", "queue", words=words)


def _mean(column: Sequence[Stretch]) -> float:
    steps = sum(stretch.steps for stretch in column)
    return sum(stretch.step * stretch.steps for stretch in column) / steps if steps else 0.0


def _peak(column: Sequence[Stretch]) -> float:
    return max((stretch.step_max for stretch in column), default=0.0)


def _pool(column: Sequence[Stretch]) -> tuple[float, float, float] | None:
    """Return the blocks in use and kept at the end of a column, and all of them."""
    for stretch in reversed(column):
        if stretch.used is not None and stretch.free is not None:
            kept = stretch.cached or 0
            return stretch.used, kept, stretch.used + kept + stretch.free
    return None


def scale_labels(top: float) -> tuple[str, str]:
    """Return what stands at the upper end and in the middle of a scale up to `top` ms."""
    value, unit = (top, "ms") if top < 10_000 else (top / 1000, "s")
    return f"{value:g} {unit}", f"{value / 2:g}"


def word_of(curve: Curve) -> str:
    if curve.rise is None:
        return ""
    if curve.rise >= RISES:
        return "slower"
    points = curve.points
    differ = bool(points) and points[-1].low >= SPAN * points[0].low
    return "flat" if curve.rise < FLAT and differ else "hardly slower"


def scale_of(numbers: Numbers) -> float:
    """Return one scale for both plots of ITL, in ms."""
    points = (*numbers.by_batch.points, *numbers.by_position.points)
    # A single wild range must not flatten all others.
    most = 4 * max((point.p50 for point in points), default=0.0)
    return nice_top(min(max((point.p95 for point in points), default=0.0), most))


def cause_of(numbers: Numbers) -> str:
    """Say what makes tokens slow, by the two curves."""
    batch, position = word_of(numbers.by_batch), word_of(numbers.by_position)
    if not batch and not position:
        return "not enough tokens yet to say what ITL depends on"
    if batch == position == "slower":
        return "ITL rises with batch and position: tracer diagnose finds which came first"
    if batch == "slower":
        return "ITL rises with the batch: compute-bound, more sequences slow every token"
    if position == "slower":
        return "ITL rises with the position: cache reads of long contexts"
    if batch == position == "flat":
        return (
            "ITL is flat in both: if it is slow, look at the CPU (steps, stream), not at the batch"
        )
    return "ITL depends little on batch and position, as far as they differ here"

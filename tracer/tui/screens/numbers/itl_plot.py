"""ITL against a size: batch or position in the sequence. Both on one scale, so that it is seen
which of the two it rises with: with the batch it is past the ridge, with the position it reads the
cache, with neither it is no matter of the device."""

from __future__ import annotations

from rich.segment import Segment

from engine_hooks.protocol.stages import Stage
from tracer.state.metrics.numbers import Curve, Numbers, Point
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.columns import bars
from tracer.tui.toolkit.history import nice_top
from tracer.tui.toolkit.plot import Chart, Plot, swatches, tone
from tracer.tui.toolkit.theme import Look

RISES, FLAT = 1.5, 1.2
"""A rise (p50 at the upper end over p50 at the lower) that is one, and one that is none: within the
spread of a busy host and of the ranges' 4 %."""
SPAN = 3.0
"""Sizes must differ by so much for a curve to be called flat."""


class ItlPlot(Plot):
    """One of the two. `by` is ``batch size`` or ``sequence position``."""

    empty = "no step without a prompt has given two tokens yet"

    def __init__(self, look: Look, by: str, id: str) -> None:
        super().__init__(look, id=id)
        self.by = by
        self.curve = Curve()
        self.top = 1.0
        self.cause = ""

    def show(self, curve: Curve, top: float, cause: str) -> None:
        """Draw a curve on a scale up to `top` ms; `cause` says in a few words what its shape
        means."""
        self.curve, self.top, self.cause = curve, top, cause
        self.repaint()

    def title(self) -> str:
        return f"ITL by {self.by}"

    def note(self) -> list[Segment]:
        rise = self.curve.rise
        if rise is None:
            return []
        look = self.look
        style = look.warn if rise >= RISES else look.good if rise < FLAT else look.bold
        words = f": {self.cause}" if self.cause and self.size.width >= 40 else ""
        return [Segment(f"{look.glyphs.times}{rise:.1f} {word_of(self.curve)}{words}", style)]

    def chart(self, cells: int, height: int) -> Chart | None:
        look, points = self.look, self.curve.points
        if not points:
            return None
        first = max(0, len(points) - cells)
        points = points[first:]
        most = sum(point.count for point in points)
        few = max(20, most // 100)
        solid, quiet = tone(look, Stage.DECODE), tone(look, Stage.DECODE, "░", ".", quiet=True)
        thin = tone(look, Stage.TEARDOWN, "▒", "-")
        columns = [
            ((point.p50, solid if point.count >= few else thin), (point.p95 - point.p50, quiet))
            for point in points
        ]
        drawn, slot = bars(look, columns, height, self.top, cells)
        return Chart(
            drawn,
            f"{self.top:g} ms",
            "0",
            [(at * slot, figures.short_count(p.low)) for at, p in enumerate(points)],
            middle=f"{self.top / 2:g}",
        )

    def legend(self) -> list[Segment]:
        look = self.look
        return swatches(
            look,
            [
                (tone(look, Stage.DECODE), "p50"),
                (tone(look, Stage.DECODE, "░", ".", quiet=True), "p95"),
                (tone(look, Stage.TEARDOWN, "▒", "-"), f"few samples   x: {self.by}"),
            ],
        )


def word_of(curve: Curve) -> str:
    """What a curve does, in a word."""
    if curve.rise is None:
        return ""
    if curve.rise >= RISES:
        return "rises"
    return "flat" if curve.rise < FLAT and wide(curve) else "hardly rises"


def wide(curve: Curve) -> bool:
    """Whether sizes differ enough for flatness to mean something."""
    points: tuple[Point, ...] = curve.points
    return bool(points) and points[-1].low >= SPAN * points[0].low


def scale_of(numbers: Numbers) -> float:
    """One scale for both plots, in ms."""
    values = [
        point.p95 for curve in (numbers.by_batch, numbers.by_position) for point in curve.points
    ]
    # A single wild range must not flatten all others.
    middle = [
        point.p50 for curve in (numbers.by_batch, numbers.by_position) for point in curve.points
    ]
    return nice_top(min(max(values, default=0.0), 4 * max(middle, default=0.0)))


def causes_of(numbers: Numbers) -> tuple[str, str]:
    """What the shape of each curve means, in a few words."""
    batch, position = numbers.by_batch, numbers.by_position
    if word_of(batch) == "flat" and word_of(position) == "flat":
        return "CPU if slow", "CPU if slow"
    return (
        "past the ridge" if word_of(batch) == "rises" else "",
        "cache reads" if word_of(position) == "rises" else "",
    )


def cause_of(numbers: Numbers) -> tuple[str, bool]:
    """What makes tokens slow, by the two curves: a sentence, and whether it names a cause."""
    batch, position = numbers.by_batch, numbers.by_position
    if batch.rise is None and position.rise is None:
        return "not enough tokens yet to tell what ITL depends on", False
    by_batch = batch.rise is not None and batch.rise >= RISES
    by_position = position.rise is not None and position.rise >= RISES
    if by_batch and by_position:
        return (
            "ITL rises with batch and with position: which came first, tracer diagnose tells",
            True,
        )
    if by_batch:
        return "ITL rises with the batch: past the ridge, more sequences cost every token", True
    if by_position:
        return "ITL rises with the position: cache reads of long contexts", True
    if word_of(batch) == "flat" and word_of(position) == "flat":
        return (
            "ITL is flat in both: if it is slow, look at the CPU (steps, stream), not at the batch",
            True,
        )
    return "ITL depends little on batch and position, as far as they differ here", False

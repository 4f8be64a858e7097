"""TTFT against the length of the prompt, split into queue and prefill: what grows with prompts, and
what does not."""

from __future__ import annotations

from rich.segment import Segment

from engine_hooks.protocol.stages import Stage
from tracer.state.metrics.numbers import PromptPoint
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.columns import Tone, bars
from tracer.tui.toolkit.history import nice_top
from tracer.tui.toolkit.plot import Chart, Plot, swatches, tone
from tracer.tui.toolkit.theme import Look


class PromptPlot(Plot):
    """Medians: queue below, prefill on it, the rest of TTFT on top."""

    empty = "no request has ended yet"

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="prompt-plot")
        self.points: tuple[PromptPoint, ...] = ()

    def show(self, points: tuple[PromptPoint, ...]) -> None:
        """Draw these ranges of prompt lengths."""
        self.points = points
        self.repaint()

    def title(self) -> str:
        return "TTFT by prompt length"

    def note(self) -> list[Segment]:
        count = sum(point.count for point in self.points)
        return [Segment(f"{figures.count(count)} requests", self.look.dim)] if count else []

    def _tones(self) -> tuple[Tone, Tone, Tone]:
        look = self.look
        return (
            tone(look, Stage.ADMISSION, "░", "."),
            tone(look, Stage.PREFILL, "█", "#"),
            tone(look, Stage.STREAM, "▒", "+"),
        )

    def chart(self, cells: int, height: int) -> Chart | None:
        points = self.points[-cells:] if cells > 0 else ()
        if not points:
            return None
        queue, prefill, rest = self._tones()
        columns = []
        for point in points:
            waited = min(point.queue or 0.0, point.p50)
            computed = min(point.prefill or 0.0, point.p50 - waited)
            columns.append(
                ((waited, queue), (computed, prefill), (point.p50 - waited - computed, rest))
            )
        top = nice_top(max(point.p50 for point in points))
        drawn, slot = bars(self.look, columns, height, top, cells)
        labels = [(at * slot, figures.short_count(point.low)) for at, point in enumerate(points)]
        name = f"{top:g} ms" if top < 10_000 else f"{top / 1000:g} s"
        return Chart(
            drawn, name, "0", labels, middle=f"{top / 2:g}" if top < 10_000 else f"{top / 2000:g}"
        )

    def legend(self) -> list[Segment]:
        queue, prefill, rest = self._tones()
        return swatches(
            self.look,
            [(queue, "queue"), (prefill, "prefill"), (rest, "rest   p50, x: prompt tokens")],
        )

"""Cards of plain rows on the Request screen: shapes and bytes, the decode breakdown, and what the
request holds."""

from __future__ import annotations

from rich.segment import Segment

from engine_hooks.protocol.stages import STAGES, Stage
from tracer.state.engine.pool import Prefix, prefix_of
from tracer.state.view import EngineView, RequestDetail
from tracer.tui.screens.live.batch_panel import part_stage, stacked
from tracer.tui.screens.live.kv_panel import prefix_strip
from tracer.tui.screens.request.shapes import Shape, shapes_of
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look


class ShapesCard(Panel):
    """What the request is at each stage, and how many bytes that takes."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="shapes", edge=True)
        self.shapes: list[Shape] = []

    def show(self, detail: RequestDetail, engine: EngineView | None) -> None:
        """Draw the shapes of a request on its engine."""
        self.shapes = shapes_of(detail, engine)
        self.repaint()

    def title(self) -> str:
        return "shapes and bytes"

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        if not self.shapes:
            rows.append(Line(width).put("not known yet", look.dim).end(look.text))
        names = 11 if width >= 56 else 0
        for shape in self.shapes[:height]:
            line = Line(width).put(f"{int(shape.stage):2d} ", look.stage(shape.stage, bold=True))
            if names:
                line.put(STAGES[shape.stage - 1].label.ljust(names), look.dim)
            line.put(shape.what.ljust(17), look.text).put(shape.shape, look.dim)
            size = "" if shape.size is None else figures.size(shape.size)
            line.fill_to(width - max(10, len(size) + 1), look.text)
            rows.append(line.put(size.rjust(line.room), look.bold).end(look.text))
        return rows


class DecodeCard(Panel):
    """Where the time of decode went."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="decode", edge=True)
        self.parts: dict[str, float] = {}
        self.tokens = 0

    def show(self, detail: RequestDetail) -> None:
        """Draw the parts of stage 11."""
        self.parts = dict(detail.view.stages[Stage.DECODE - 1].parts)
        self.tokens = detail.view.output_tokens
        self.repaint()

    def title(self) -> str:
        return "decode breakdown"

    def note(self) -> list[Segment]:
        steps = self.tokens - 1
        if steps < 1 or not self.parts:
            return []
        return [
            Segment(
                f"{figures.milliseconds(sum(self.parts.values()) / steps)} ms a token",
                self.look.dim,
            )
        ]

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        total = sum(self.parts.values())
        if total <= 0:
            return [Line(width).put("not known yet", look.dim).end(look.text)]
        rows: list[Row] = [stacked(look, self.parts, width)]
        per_row = 2 if width >= 50 else 1
        cells = width // per_row
        items = list(self.parts.items())
        for begin in range(0, len(items), per_row):
            line = Line(width)
            for index, (name, ms) in enumerate(items[begin : begin + per_row]):
                line.fill_to(index * cells, look.text)
                line.put(look.fill(part_stage(name)) + " ", look.stage(part_stage(name)))
                line.put_text(name, look.dim, 9).put(figures.aligned_milliseconds(ms, 8), look.text)
                line.put(f"{figures.percent(ms / total)}%".rjust(5), look.dim)
            rows.append(line.end(look.text))
        return rows[:height]


class HoldingsCard(Panel):
    """KV blocks held, prefill chunks, preemptions, and who shares the batch."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="holdings", edge=True)
        self.detail: RequestDetail | None = None
        self.engine: EngineView | None = None

    def show(self, detail: RequestDetail, engine: EngineView | None) -> None:
        """Draw what a request holds and shares."""
        self.detail, self.engine = detail, engine
        self.repaint()

    def title(self) -> str:
        return "KV blocks, chunks, batch"

    def body(self, width: int, height: int) -> list[Row]:
        detail, look = self.detail, self.look
        if detail is None:
            return []
        view = detail.view
        rows: list[Row] = []

        def row(name: str, text: str) -> None:
            line = Line(width).put(name.ljust(12), look.dim)
            rows.append(
                line.put_text(text, look.text, ellipsis=look.glyphs.ellipsis).end(look.text)
            )

        row("KV blocks", self._blocks())
        prefix = prefix_of(view, self.engine.block_size) if self.engine is not None else None
        if prefix is not None:
            rows.append(self._prefix(width, prefix))
        if detail.block_ids:
            row("block ids", _runs(detail.block_ids))
        if view.chunks:
            chunks = "  ".join(
                f"{figures.count(chunk.tokens)} in "
                f"{figures.milliseconds((chunk.end - chunk.begin) / 1e6)} ms"
                for chunk in view.chunks[:20]
            )
            row(
                "prefill",
                f"{len(view.chunks)} chunk{'s' if len(view.chunks) > 1 else ''}: {chunks}",
            )
        lost = (
            f", {figures.count(view.recomputed_tokens)} tokens computed again"
            if view.preemptions
            else ""
        )
        row("preemptions", f"{figures.count(view.preemptions)}{lost}")
        row("batch", figures.count(view.batch) if view.batch is not None else "in no step yet")
        if detail.batch_mates:
            row("batch-mates", ", ".join(detail.batch_mates[:60]))
        if view.sent_bytes is not None:
            row(
                "handed out",
                f"{figures.size(view.sent_bytes)} in {figures.count(view.sent_chunks)} chunks",
            )
        if view.client_id:
            row("client's id", view.client_id)
        if view.tenant:
            row("tenant", view.tenant)
        return rows[:height]

    def _prefix(self, width: int, prefix: Prefix) -> Row:
        """Which blocks of the prompt the prefix cache gave, as a strip and in figures."""
        look = self.look
        line = Line(width).put("prefix hits".ljust(12), look.dim)
        text = f"{figures.count(prefix.hit)} of {figures.count(prefix.prompt)} prompt blocks"
        text = figures.fitting(line.room, f"{text} ({figures.count(prefix.tokens)} tokens)", text)
        cells = min(line.room - len(text) - 2, prefix.prompt + prefix.grown)
        if cells >= 4:
            line.put_segments(prefix_strip(look, prefix, cells), cells).put("  ", look.text)
        return line.put(text, look.text).end(look.text)

    def _blocks(self) -> str:
        view = self.detail.view if self.detail is not None else None
        if view is None:
            return ""
        if view.freed_blocks is not None or view.kept_blocks is not None:
            freed, kept = figures.count(view.freed_blocks), figures.count(view.kept_blocks)
            return f"{freed} freed, {kept} kept in the prefix cache"
        text = f"{figures.count(view.blocks)} held"
        if self.engine is not None and self.engine.block_bytes and view.blocks is not None:
            text += f" = {figures.size(view.blocks * self.engine.block_bytes)}"
        return text


def _runs(ids: tuple[int, ...]) -> str:
    """Block ids with runs written as ``3-9``."""
    parts: list[str] = []
    begin = previous = None
    for value in [*ids[:400], None]:
        if begin is not None and previous is not None and value == previous + 1:
            previous = value
            continue
        if begin is not None:
            parts.append(str(begin) if begin == previous else f"{begin}-{previous}")
        begin = previous = value
    return " ".join(parts)

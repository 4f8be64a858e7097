"""Cards of the Request screen: prompt and output as the model gets and gives them, inter-token
latency, the decode breakdown, shapes and bytes, and what the request holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from rich.segment import Segment
from textual import events

from engine_hooks.protocol.stages import STAGES, Stage
from tracer.format import figures
from tracer.format.text import cell_width, fit
from tracer.state.engine.pool import Prefix, prefix_of
from tracer.state.metrics.quantiles import nearest_rank
from tracer.state.view import EngineView, RequestDetail, RequestView
from tracer.tui.screens.live.batch_panel import part_table, stacked
from tracer.tui.screens.live.kv_panel import prefix_strip
from tracer.tui.screens.live.rows import words
from tracer.tui.screens.request.shapes import shapes_of
from tracer.tui.toolkit.canvas import Line, Row
from tracer.tui.toolkit.columns import Tone, column_cells, rows_of
from tracer.tui.toolkit.history import nice_top, plot
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.plot import tone
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.wrapped import wrap

NAMES = 12
"""Cells of what a row of holdings is about."""
IDS_SHOWN = 6
"""Token ids shown at either end."""
SPIKE = 2.0
"""A gap between tokens of so many medians is drawn as a spike."""


class RequestCard(Panel):
    """A card that draws from the request given last. Subclasses paint its `rows`."""

    ID: ClassVar[str]
    HEADING: ClassVar[str]
    pad = 1
    detail: RequestDetail | None = None
    engine: EngineView | None = None

    def __init__(self, look: Look) -> None:
        super().__init__(look, id=self.ID, edge=True)

    def title(self) -> str:
        return self.HEADING

    def show(self, detail: RequestDetail, engine: EngineView | None) -> None:
        self.detail, self.engine = detail, engine
        self.repaint()

    def body(self, width: int, height: int) -> list[Row]:
        return [] if self.detail is None else self.rows(self.detail, width, height)[:height]

    def rows(self, detail: RequestDetail, width: int, height: int) -> list[Row]:
        raise NotImplementedError


class TextCard(RequestCard):
    """The prompt, or the output, whose end stays in sight while it grows: wrapped, scrollable,
    special tokens visible."""

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.edge = False
        self.tail = self.ID == "output"
        self.top = 0
        self.held = False
        """Whether the user has scrolled, so that the end is no longer followed."""
        self._wrapped: tuple[str | None, int, Look, list[list[Segment]]] | None = None

    @property
    def text(self) -> str | None:
        if self.detail is None:
            return None
        return self.detail.output_text if self.tail else self.detail.prompt_text

    @property
    def ids(self) -> tuple[int, ...]:
        return () if self.detail is None or self.tail else self.detail.prompt_ids

    def note(self) -> list[Segment]:
        if self.detail is None:
            return []
        view, reason = self.detail.view, ""
        tokens, chars = view.prompt_tokens, self.detail.prompt_chars
        if self.tail:
            tokens, chars = view.output_tokens, len(self.text) if self.text else None
            reason = view.finish_reason
        known = [(tokens, "tokens"), (chars, "characters")]
        facts = [f"{figures.count(count)} {of}" for count, of in known if count is not None]
        return [Segment(", ".join([*facts, reason] if reason else facts), self.look.dim)]

    def _absent(self, view: RequestView) -> str:
        told = view.output_tokens if self.tail else view.prompt_tokens is not None
        if told:
            return f"the {self.ID}'s text was not recorded"
        return "no token yet" if self.tail else "no prompt yet"

    def _text_rows(self, width: int) -> list[list[Segment]]:
        key = (self.text, width, self.look)
        if self._wrapped is None or self._wrapped[:3] != key:
            look = self.look
            rows = wrap(self.text or "", width, look.text, look.special, look.glyphs.newline)
            self._wrapped = (*key, rows)
        return self._wrapped[3]

    def _window(self, rows: int, height: int) -> tuple[int, int]:
        """Return the first row shown of so many in `height`, and the last that can be the first."""
        last = max(0, rows - height)
        return last if self.tail and not self.held else max(0, min(self.top, last)), last

    def rows(self, detail: RequestDetail, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = [self._ids_row(width)] if self.ids and height > 2 else []
        if not self.text:
            return [*rows, words(look, width, self._absent(detail.view))]
        wrapped = self._text_rows(width)
        room = max(0, height - len(rows))
        top, _ = self._window(len(wrapped), room)
        for segments in wrapped[top : top + room]:
            line = Line(width)
            for text, style, _ in segments:
                cells = min(cell_width(text), line.room)
                if cells and style is not None:
                    line.add_segments([Segment(fit(text, cells), style)], cells)
            rows.append(line.end(look.text))
        return rows

    def _ids_row(self, width: int) -> Row:
        look, ids = self.look, [str(value) for value in self.ids]
        if len(ids) > 2 * IDS_SHOWN:
            ids = [*ids[:IDS_SHOWN], look.glyphs.ellipsis, *ids[-IDS_SHOWN:]]
        line = Line(width).add("ids ", look.dim)
        return line.add(" ".join(ids), look.special).end(look.text)

    def scroll_rows(self, rows: int) -> None:
        """Scroll by rows (+ is down); at the end a growing text is followed again."""
        width = max(1, self.size.width - (3 if self.edge else 2 * self.pad))
        height = self.size.height
        room = height - (1 if self.titled else 0) - (1 if self.ids and height > 3 else 0)
        now, last = self._window(len(self._text_rows(width)), max(1, room))
        self.top = max(0, min(last, now + rows))
        self.held = self.top < last if self.tail else True
        self.repaint()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_rows(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_rows(3)


class PromptCard(TextCard):
    ID = HEADING = "prompt"


class OutputCard(TextCard):
    ID = HEADING = "output"


class ItlCard(RequestCard):
    """Gaps between tokens over the output, highest in each column; gaps far above the median stand
    out."""

    ID = "itl"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.first = True

    def title(self) -> str:
        return "inter-token latency" if self.size.width >= 72 else "ITL"

    def note(self) -> list[Segment]:
        look = self.look
        if self.detail is None or not self.detail.itl_ms:
            return []
        ordered = sorted(self.detail.itl_ms)
        segments: list[Segment] = []
        for name, share in (("p50 ", 0.5), ("  p95 ", 0.95), ("  max ", 1.0)):
            value = figures.milliseconds(nearest_rank(ordered, share))
            segments += [Segment(name, look.dim), Segment(value, look.bold)]
        return [*segments, Segment(" ms", look.dim)]

    def rows(self, detail: RequestDetail, width: int, height: int) -> list[Row]:
        look, gaps, batches = self.look, detail.itl_ms, detail.itl_batch
        if not gaps:
            return [words(look, width, "no second token yet")]
        labels = 8 if width >= 40 and height >= 3 else 0
        cells = max(1, width - labels)
        columns = bucketed(gaps, cells)
        with_batch = height >= 4 and bool(batches)
        lines = height - with_batch - 1 if height >= 3 else height
        top = nice_top(max(gaps))
        calm, high = tone(look, Stage.DECODE), Tone(look.palette.warn, "▓", "!")
        spike = nearest_rank(sorted(gaps), 0.5) * SPIKE
        drawn = [
            column_cells(look, ((gap, high if gap > spike else calm),), lines, top)
            for gap in columns
        ]
        scale = [figures.milliseconds(top), *[""] * (lines - 2), "0"] if lines > 1 else [""]
        rows: list[Row] = []

        def add(name: str, segments: list[Segment]) -> None:
            line = Line(width).add(f"{name.rjust(labels - 1)} " if labels else "", look.dim)
            cells = sum(len(segment.text) for segment in segments)
            rows.append(line.add_segments(segments, cells).end(look.text))

        for name, segments in zip(scale, rows_of(drawn, lines), strict=True):
            add(name, segments)
        if with_batch:
            sizes = bucketed([float(size) for size in batches], cells)
            text = plot(sizes, look.glyphs.rises, 1, max(sizes))[0]
            add(f"b {figures.count(max(sizes))}", [Segment(text, look.stage(Stage.DECODE))])
        if height >= 3:
            line = Line(width).fill_to(labels, look.dim).add("token 2", look.dim)
            end = figures.count(len(gaps) + 1)
            line.fill_to(labels + len(columns) - len(end), look.dim).add(end, look.dim)
            rows.append(line.end(look.text))
        return rows


class ShapesCard(RequestCard):
    """What the request is at each stage, and how many bytes that takes."""

    ID, HEADING = "shapes", "shapes and bytes"

    def rows(self, detail: RequestDetail, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        for shape in shapes_of(detail, self.engine):
            line = Line(width).add(f"{int(shape.stage):2d} ", look.stage(shape.stage, bold=True))
            if width >= 56:
                line.add(STAGES[shape.stage - 1].label.ljust(11), look.dim)
            line.add(shape.what.ljust(17), look.text).add(shape.shape, look.dim)
            size = "" if shape.size is None else figures.size(shape.size)
            line.fill_to(width - max(10, len(size) + 1), look.text)
            rows.append(line.add(size.rjust(line.room), look.bold).end(look.text))
        return rows or [words(look, width, "not known yet")]


class DecodeCard(RequestCard):
    """Where the time of decode went."""

    ID, HEADING = "decode", "decode breakdown"

    def note(self) -> list[Segment]:
        if self.detail is None:
            return []
        steps, parts = self.detail.view.output_tokens - 1, decode_parts(self.detail)
        if steps < 1 or not parts:
            return []
        each = figures.milliseconds(sum(parts.values()) / steps)
        return [Segment(f"{each} ms a token", self.look.dim)]

    def rows(self, detail: RequestDetail, width: int, height: int) -> list[Row]:
        look, parts = self.look, decode_parts(detail)
        if sum(parts.values()) <= 0:
            return [words(look, width, "not known yet")]
        return [stacked(look, parts, width), *part_table(look, width, parts)]


def decode_parts(detail: RequestDetail) -> dict[str, float]:
    """Return the parts of stage 11 in ms."""
    return dict(detail.view.stages[Stage.DECODE - 1].parts)


class HoldingsCard(RequestCard):
    """KV blocks held, prefill chunks, preemptions, and who shares the batch."""

    ID, HEADING = "holdings", "KV blocks, chunks, batch"

    def rows(self, detail: RequestDetail, width: int, height: int) -> list[Row]:
        look, view = self.look, detail.view
        rows: list[Row] = []
        for name, text in self._facts(detail):
            if text:
                line = Line(width).add(name.ljust(NAMES), look.dim)
                line.add_text(text, look.text, ellipsis=look.glyphs.ellipsis)
                rows.append(line.end(look.text))
        prefix = prefix_of(view, self.engine.block_size) if self.engine is not None else None
        if prefix is not None:
            rows.insert(1, self._prefix(width, prefix))
        return rows

    def _facts(self, detail: RequestDetail) -> list[tuple[str, str]]:
        """Return names and texts of the rows; an empty text for what is not known."""
        view = detail.view
        count = len(view.chunks)
        chunks = "  ".join(
            f"{figures.count(chunk.tokens)} in "
            f"{figures.milliseconds((chunk.end - chunk.begin) / 1e6)} ms"
            for chunk in view.chunks[:20]
        )
        preempted = figures.count(view.preemptions)
        if view.preemptions:
            preempted += f", {figures.count(view.recomputed_tokens)} tokens computed again"
        sent = f"{figures.size(view.sent_bytes)} in {figures.count(view.sent_chunks)} chunks"
        return [
            ("KV blocks", self._blocks(view)),
            ("block ids", _runs(detail.block_ids[:400])),
            ("prefill", f"{count} chunk{'s' if count > 1 else ''}: {chunks}" if chunks else ""),
            ("preemptions", preempted),
            ("batch", "in no step yet" if view.batch is None else figures.count(view.batch)),
            ("batch-mates", ", ".join(detail.batch_mates[:60])),
            ("sent", "" if view.sent_bytes is None else sent),
            ("client's id", view.client_id),
            ("tenant", view.tenant),
        ]

    def _prefix(self, width: int, prefix: Prefix) -> Row:
        look = self.look
        line = Line(width).add("prefix hits".ljust(NAMES), look.dim)
        text = f"{figures.count(prefix.hit)} of {figures.count(prefix.prompt)} prompt blocks"
        text = figures.fitting(line.room, f"{text} ({figures.count(prefix.tokens)} tokens)", text)
        cells = min(line.room - len(text) - 2, prefix.prompt + prefix.grown)
        if cells >= 4:
            line.add_segments(prefix_strip(look, prefix, cells), cells).add("  ", look.text)
        return line.add(text, look.text).end(look.text)

    def _blocks(self, view: RequestView) -> str:
        if view.freed_blocks is not None or view.kept_blocks is not None:
            freed, kept = figures.count(view.freed_blocks), figures.count(view.kept_blocks)
            return f"{freed} freed, {kept} kept in the prefix cache"
        text = f"{figures.count(view.blocks)} held"
        if self.engine is not None and self.engine.block_bytes and view.blocks is not None:
            text += f" = {figures.size(view.blocks * self.engine.block_bytes)}"
        return text


def _runs(ids: tuple[int, ...]) -> str:
    """Write block ids with runs as ``3-9``."""
    if not ids:
        return ""
    breaks = [place for place in range(1, len(ids)) if ids[place] != ids[place - 1] + 1]
    runs = [ids[begin:end] for begin, end in pairwise([0, *breaks, len(ids)])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def bucketed(values: Sequence[float], cells: int) -> list[float]:
    """Return at most `cells` values: the largest of each run of neighbours, so that a spike never
    disappears."""
    if len(values) <= cells:
        return list(values)
    edges = [index * len(values) // cells for index in range(cells + 1)]
    return [max(values[a:b]) for a, b in pairwise(edges)]

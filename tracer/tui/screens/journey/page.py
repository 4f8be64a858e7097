"""One page of the Journey: large, calm, one thing at a time."""

from __future__ import annotations

from rich.style import Style

from engine_hooks.protocol.stages import STAGES, Stage, info
from tracer.analysis.budget.economics import balance
from tracer.format import figures
from tracer.format.text import cell_width
from tracer.state.view import RequestView, Status
from tracer.tui.naming import short_id
from tracer.tui.screens.journey.data import Journey
from tracer.tui.screens.journey.story import AFTER, BEFORE, TOLD
from tracer.tui.screens.live.device_strip import magnitude
from tracer.tui.screens.live.rows import filled, words
from tracer.tui.screens.request.shapes import Shape
from tracer.tui.toolkit.bar import WAIT, Bars, Stretch
from tracer.tui.toolkit.canvas import Canvas, Line, Row, blank, label
from tracer.tui.toolkit.digits import ROWS, large
from tracer.tui.toolkit.theme import ASCII, Look
from tracer.tui.toolkit.words import paragraph, plain

FIRST, LAST = 0, len(STAGES) + 1
"""Pages: one before the stages, one for each, one behind them."""
WIDEST = 104
"""Cells of text at most: longer lines are hard to read from afar."""
_NAMES = 14


class JourneyPage(Canvas):
    """Draws page `page` of a journey."""

    can_focus = True

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="page")
        self.add_class("tile")
        self.journey: Journey | None = None
        self.page = FIRST
        self.now = 0
        self.trouble = ""

    def show(self, journey: Journey | None, page: int, now: int, trouble: str) -> None:
        """Draw a page of a request at an instant, or say why there is none."""
        self.journey, self.page, self.now, self.trouble = journey, page, now, trouble
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        look, journey = self.look, self.journey
        inner = max(1, min(WIDEST, width - 4))
        left = (width - inner) // 2
        if journey is None:
            rows = self._paragraph(inner, self.trouble, look.warn)
        else:
            gap = blank(inner, look.text)
            rows = [self._head(inner, journey), gap, *self._progress(inner)]
            rows += [gap] * (3 if height >= 40 else 2 if height >= 30 else 1)
            stage = Stage(self.page) if FIRST < self.page < LAST else None
            if stage is None:
                rows += self._between(inner, journey)
            else:
                rows += self._stage(inner, journey, stage, height - len(rows) - 3, height >= 30)
            foot = self._whole(inner, journey.detail.view, stage)
            rows = filled(look, rows, inner, max(0, height - len(foot))) + foot
        margin, rest = blank(left, look.text), blank(width - left - inner, look.text)
        return [[*margin, *row, *rest] for row in rows[:height]]

    def _paragraph(self, width: int, text: str, style: Style) -> list[Row]:
        look = self.look
        return [words(look, width, line, style) for line in paragraph(text, width, look)]

    def _head(self, width: int, journey: Journey) -> Row:
        look, view, engine = self.look, journey.detail.view, journey.engine
        right = label(journey.about)
        name = short_id(view.id, min(24, max(6, cell_width(label(view.id)))), look.glyphs.ellipsis)
        line = Line(width).add_text("" if journey.modelled else name, look.accent)
        parts = []
        if engine is not None:
            model = label(engine.model.rstrip("/").rsplit("/", 1)[-1])
            where = journey.device.title if journey.device is not None else engine.device
            parts.append(f"{model} on {label(plain(where, look))}")
        prompt, output = figures.count(view.prompt_tokens), figures.count(view.output_tokens)
        parts.append(f"{prompt} {look.glyphs.arrow} {output} tokens")
        for text in parts:
            if line.used + cell_width(text) + 3 > width - cell_width(right) - 1:
                continue
            if line.used:
                line.add(f" {look.glyphs.dot} ", look.faint)
            line.add_text(text, look.text)
        if cell_width(right) < line.room:
            line.fill_to(width - cell_width(right), look.text)
            line.add_text(right, look.warn if journey.modelled else look.good)
        return line.end(look.text)

    def _progress(self, width: int) -> list[Row]:
        """Draw where in the twelve stages the page is."""
        look, glyphs = self.look, self.look.glyphs
        marks, names = Line(width), Line(width)
        for index, known in enumerate(STAGES):
            begin, end = index * width // len(STAGES), (index + 1) * width // len(STAGES)
            cells = max(1, end - begin - 1)
            here, passed = known.stage == self.page, known.stage < self.page
            glyph = look.fill(known.stage) if here else glyphs.line if passed else glyphs.track
            style = look.stage(known.stage, bold=here) if here or passed else look.faint
            marks.add(glyph * cells, style).fill_to(end, look.text)
            text = str(int(known.stage)).center(cells)[:cells]
            names.fill_to(begin, look.text).add(text, look.bold if here else look.faint)
        return [marks.end(look.text), names.end(look.text)]

    def _between(self, width: int, journey: Journey) -> list[Row]:
        """Draw the page before the stages, and the one behind them."""
        look = self.look
        gap = blank(width, look.text)
        if self.page == FIRST:
            title = words(look, width, "one request", look.accent)
            text = self._paragraph(width, BEFORE, look.text)
            return [*self._total(width, journey.detail.view), gap, title, gap, *text]
        title = words(look, width, "token 1 against token 2", look.accent)
        text = self._paragraph(width, AFTER, look.text)
        return [title, gap, *text, gap, *self._economics(width, journey)]

    def _stage(
        self, width: int, journey: Journey, stage: Stage, height: int, roomy: bool
    ) -> list[Row]:
        look, row = self.look, journey.detail.view.stages[stage - 1]
        gap: list[Row] = [blank(width, look.text)]
        low = height < 12
        line = Line(width).add(f"{int(stage)}  {info(stage).label}", look.stage(stage, bold=True))
        beside = f"{figures.milliseconds(row.ms)} ms" if low else info(stage).where
        line.add(f"   {beside}", look.dim)
        if row.status is not Status.MEASURED and not journey.modelled:
            reason = f": {row.reason}" if row.reason else ""
            line.add_text(f"   {row.status}{reason}", look.warn)
        rows = [] if low else self._clock(width, journey.detail.view, stage) + gap
        rows += [line.end(look.text), *(gap if roomy else [])]
        rows += self._paragraph(width, TOLD[stage], look.text) + gap
        facts = self._facts(width, journey, stage)
        if stage not in (Stage.PREFILL, Stage.DECODE):
            return rows + facts
        table = self._economics(width, journey)
        if len(rows) + len(facts) + len(table) + 1 <= height:
            return rows + facts + gap + table
        brief = self._economics(width, journey, brief=True)
        return rows + facts[1:2] * (len(rows) + len(brief) < height) + brief

    def _total_ms(self, view: RequestView) -> float:
        return view.e2e_ms if view.e2e_ms is not None else (self.now - view.received) / 1e6

    def _total(self, width: int, view: RequestView) -> list[Row]:
        look = self.look
        beside = [
            ("ms" if view.closed is not None else "ms so far", look.bold),
            (f"first token after {figures.milliseconds(view.ttft_ms)} ms", look.text),
            (f"then one every {figures.milliseconds(view.tpot_ms)} ms", look.text),
        ]
        return self._digits(width, self._total_ms(view), look.accent, beside)

    def _clock(self, width: int, view: RequestView, stage: Stage) -> list[Row]:
        """Draw how long it took, large, and where on the request's clock that lies."""
        look, row, total = self.look, view.stages[stage - 1], self._total_ms(view)
        beside = [("ms", look.bold)]
        if row.begin is not None:
            until = row.end if row.end is not None else self.now
            begin = figures.milliseconds((row.begin - view.received) / 1e6)
            end = figures.milliseconds((until - view.received) / 1e6)
            beside.append((f"on the clock {begin} {look.glyphs.arrow} {end} ms", look.text))
        if row.ms is not None and total > 0:
            share = f"{figures.percentage(row.ms / total)} of {figures.milliseconds(total)} ms"
            beside.append((share, look.dim))
        return self._digits(width, row.ms, look.stage(stage, bold=True), beside)

    def _digits(
        self, width: int, ms: float | None, colour: Style, beside: list[tuple[str, Style]]
    ) -> list[Row]:
        """Draw a large figure with up to three lines beside it."""
        look, text = self.look, figures.milliseconds(ms)
        digits = large(text) if look.glyphs is not ASCII else ["", text, ""]
        cells = len(digits[1])
        beside = [*beside, *[("", look.text)] * (ROWS - len(beside))]
        return [
            Line(width).add(f"{row.ljust(cells)}  ", colour).add(said, style).end(look.text)
            for row, (said, style) in zip(digits, beside, strict=True)
        ]

    def _facts(self, width: int, journey: Journey, stage: Stage) -> list[Row]:
        look = self.look
        known, row = info(stage), journey.detail.view.stages[stage - 1]
        should = figures.milliseconds(journey.expected.get(stage))
        expected = f"{should} ms, from {journey.expected_from}"
        parts = "   ".join(f"{name} {figures.milliseconds(ms)}" for name, ms in row.parts)
        facts = (
            ("input", _shapes(journey.input(stage)), look.text),
            ("output", _shapes(journey.output(stage)), look.bold),
            ("bounded by", known.bounded_by, look.text),
            ("worse with", known.worse, look.text),
            ("expected", expected if stage in journey.expected else "", look.text),
            ("of which", parts, look.text),
        )
        rows: list[Row] = []
        for name, text, style in facts:
            if text:
                line = Line(width).add(name.ljust(_NAMES), look.dim)
                line.add_text(plain(text, look), style, ellipsis=look.glyphs.ellipsis)
                rows.append(line.end(look.text))
        return rows

    def _economics(self, width: int, journey: Journey, *, brief: bool = False) -> list[Row]:
        """Draw token 1 beside token 2; `brief`: only what makes the difference."""
        look, reads, view = self.look, journey.reads(), journey.detail.view
        if reads is None:
            return [words(look, width, "the engine did not tell the size of its model")]
        one, two = reads
        several = two.sharers > 1
        stages = (Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE)
        first = sum(view.stages[stage - 1].ms or 0.0 for stage in stages)
        table = [
            ("", "token 1", "token 2" + (f", batch {two.sharers}" if several else "")),
            ("tokens in the pass", figures.count(one.tokens),
             f"1 of {two.sharers}" if several else "1"),
            ("reads", figures.size(one.weight_bytes + one.kv_bytes),
             figures.size(two.weight_bytes + two.kv_bytes)),
            ("computes", f"{magnitude(one.flops)}FLOP", f"{magnitude(two.flops)}FLOP"),
            ("FLOPs a byte", figures.count(one.intensity), figures.count(two.intensity)),
        ]  # fmt: skip
        device, model = journey.device, journey.model
        if device is not None and model is not None:
            dtype = model.compute_dtype
            table.append(("waits for", one.bound_by(device, dtype), two.bound_by(device, dtype)))
        if first:
            each, tpot = first / max(1.0, one.tokens), figures.milliseconds(view.tpot_ms)
            table.append(("took", f"{figures.milliseconds(first)} ms", f"{tpot} ms"))
            table.append(("ms a token", figures.milliseconds(each), tpot))
        if brief:
            table = [row for row in table if row[0] not in ("computes", "took", "waits for")]
        cells = max(18, min(24, (width - 20) // 2))
        rows: list[Row] = []
        for name, left, right in table:
            styles = [look.bold] * 2
            if not name:
                styles = [look.stage(stage, bold=True) for stage in (Stage.PREFILL, Stage.DECODE)]
            line = Line(width).add(name.ljust(20), look.dim)
            line.add(left.rjust(cells), styles[0]).add(right.rjust(cells), styles[1])
            rows.append(line.end(look.text))
        if device is not None and model is not None and not brief:
            even = figures.count(balance(device, model.compute_dtype))
            text = f"this device can do {even} FLOPs while it reads a byte"
            rows.append(words(look, width, text))
        return rows

    def _whole(self, width: int, view: RequestView, stage: Stage | None) -> list[Row]:
        """Draw the request on a linear scale, with a mark under the stage of the page."""
        look = self.look
        end = view.closed if view.closed is not None else max(self.now, view.received + 1)
        span = max(1, end - view.received)
        bars = Bars(look, width)

        def place(t: int | None) -> int:
            return ((end if t is None else t) - view.received) * bars.units // span

        stretches = [
            Stretch(place(segment.begin), place(segment.end),
                    int(segment.stage) | (WAIT if segment.waiting else 0))
            for segment in view.segments
        ]  # fmt: skip
        mark = Line(width)
        row = view.stages[stage - 1] if stage is not None else None
        if row is not None and row.begin is not None and stage is not None:
            begin = min(width - 1, place(row.begin) // bars.unit)
            cells = max(1, min(width - begin, (place(row.end) - place(row.begin)) // bars.unit))
            mark.fill_to(begin, look.text).add(look.glyphs.up * cells, look.stage(stage))
        return [
            Line(width).add_segments(bars.draw(stretches), width).end(look.text),
            mark.end(look.text),
        ]


def _shapes(shapes: list[Shape]) -> str:
    return "; ".join(
        f"{shape.what} {shape.shape}".strip()
        + (
            ""
            if shape.size is None
            else f"{' =' if shape.shape else ','} {figures.size(shape.size)}"
        )
        for shape in shapes
    )

"""One page of the Journey: large, calm, one thing at a time."""

from __future__ import annotations

from rich.style import Style

from engine_hooks.protocol.stages import STAGES, Stage, info
from tracer.analysis.budget.economics import balance
from tracer.format.text import cell_width
from tracer.state.view import Status
from tracer.tui.naming import short_id
from tracer.tui.screens.journey.data import Tale
from tracer.tui.screens.journey.story import AFTER, BEFORE, TOLD
from tracer.tui.screens.request.shapes import Shape
from tracer.tui.toolkit import figures
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
    """Draws page `page` of a tale."""

    can_focus = True

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="page")
        self.add_class("tile")
        self.tale: Tale | None = None
        self.page = FIRST
        self.now = 0
        self.trouble = ""

    def show(self, tale: Tale | None, page: int, now: int, trouble: str = "") -> None:
        """Draw a page of a request at an instant, or say why there is none."""
        self.tale, self.page, self.now, self.trouble = tale, page, now, trouble
        self.repaint()

    # --- rows

    def paint(self, width: int, height: int) -> list[Row]:
        """The rows, in a column in the middle."""
        look, tale = self.look, self.tale
        inner = max(1, min(WIDEST, width - 4))
        left = (width - inner) // 2
        if tale is None:
            rows = [
                self._text(inner, line, look.warn) for line in paragraph(self.trouble, inner, look)
            ]
        else:
            roomy = height >= 30
            rows = [self._head(inner, tale), blank(inner, look.text), *self._track(inner)]
            rows += [blank(inner, look.text)] * (3 if height >= 40 else 2 if roomy else 1)
            stage = Stage(self.page) if FIRST < self.page < LAST else None
            if stage is None:
                rows += self._page_between(inner, tale)
            else:
                rows += self._stage(inner, tale, stage, height - len(rows) - 3, roomy)
            foot = self._whole(inner, tale, stage)
            rows = rows[: max(0, height - len(foot))]
            rows += [blank(inner, look.text)] * max(0, height - len(foot) - len(rows)) + foot
        margin, rest = blank(left, look.text), blank(width - left - inner, look.text)
        return [[*margin, *row, *rest] for row in rows[:height]]

    def _text(self, width: int, text: str, style: Style) -> Row:
        return Line(width).put_text(text, style).end(self.look.text)

    def _head(self, width: int, tale: Tale) -> Row:
        look, view = self.look, tale.detail.view
        right = label(tale.about)
        line = Line(width)
        name = short_id(view.id, min(24, max(6, cell_width(label(view.id)))), look.glyphs.ellipsis)
        line.put_text("" if tale.modelled else name, look.accent)
        parts = []
        if tale.engine is not None:
            model = label(tale.engine.model.rstrip("/").rsplit("/", 1)[-1])
            where = tale.device.title if tale.device is not None else tale.engine.device
            parts.append(f"{model} on {label(plain(where, look))}")
        tokens = (
            f"{figures.count(view.prompt_tokens)} {look.glyphs.arrow} "
            f"{figures.count(view.output_tokens)}"
        )
        parts.append(f"{tokens} tokens")
        for text in parts:
            if line.used + cell_width(text) + 3 > width - cell_width(right) - 1:
                continue
            if line.used:
                line.put(f" {look.glyphs.dot} ", look.faint)
            line.put_text(text, look.text)
        if cell_width(right) < line.room:
            line.fill_to(width - cell_width(right), look.text)
            line.put_text(right, look.warn if tale.modelled else look.good)
        return line.end(look.text)

    def _track(self, width: int) -> list[Row]:
        """Where in the twelve stages the page is."""
        look, glyphs = self.look, self.look.glyphs
        marks, names = Line(width), Line(width)
        for index, known in enumerate(STAGES):
            begin, end = index * width // len(STAGES), (index + 1) * width // len(STAGES)
            cells = max(1, end - begin - 1)
            here, passed = known.stage == self.page, known.stage < self.page
            style = look.stage(known.stage, bold=here) if here or passed else look.faint
            marks.put(
                (look.fill(known.stage) if here else glyphs.line if passed else glyphs.track)
                * cells,
                style,
            )
            marks.fill_to(end, look.text)
            text = str(int(known.stage))
            names.fill_to(begin, look.text).put(
                text.center(cells)[:cells], look.bold if here else look.faint
            )
        return [marks.end(look.text), names.end(look.text)]

    def _page_between(self, width: int, tale: Tale) -> list[Row]:
        """The page before the stages, and the one behind them."""
        look = self.look
        first = self.page == FIRST
        title = "one request" if first else "token 1 against token 2"
        rows: list[Row] = [*self._large(width, tale), blank(width, look.text)] if first else []
        rows += [Line(width).put(title, look.accent).end(look.text), blank(width, look.text)]
        rows += [
            self._text(width, line, look.text)
            for line in paragraph(BEFORE if first else AFTER, width, look)
        ]
        return rows if first else [*rows, blank(width, look.text), *self._economics(width, tale)]

    def _stage(self, width: int, tale: Tale, stage: Stage, height: int, roomy: bool) -> list[Row]:
        look = self.look
        known, row = info(stage), tale.detail.view.stages[stage - 1]
        colour = look.stage(stage, bold=True)
        gap: list[Row] = [blank(width, look.text)]
        low = height < 12
        rows = [] if low else self._clock(width, tale, stage) + gap
        line = Line(width).put(f"{int(stage)}  {known.label}", colour)
        line.put(f"   {figures.milliseconds(row.ms)} ms" if low else f"   {known.where}", look.dim)
        if row.status is not Status.MEASURED and not tale.modelled:
            line.put_text(f"   {row.status}" + (f": {row.reason}" if row.reason else ""), look.warn)
        rows.append(line.end(look.text))
        rows += gap if roomy else []
        rows += [
            self._text(width, text, look.text) for text in paragraph(TOLD[stage], width, look)
        ] + gap
        facts = self._facts(width, tale, stage)
        if stage in (Stage.PREFILL, Stage.DECODE):
            table = self._economics(width, tale)
            if len(rows) + len(facts) + len(table) + 1 <= height:
                return rows + facts + gap + table
            brief = self._economics(width, tale, brief=True)
            room = max(0, height - len(rows) - len(brief))
            return rows + facts[1 : 1 + min(1, room)] + brief
        return rows + facts

    def _large(self, width: int, tale: Tale) -> list[Row]:
        """What all of it took."""
        look, view = self.look, tale.detail.view
        total = view.e2e_ms if view.e2e_ms is not None else (self.now - view.received) / 1e6
        beside = [
            ("ms" if view.closed is not None else "ms so far", look.bold),
            (f"the first token after {figures.milliseconds(view.ttft_ms)} ms", look.text),
            (f"then one every {figures.milliseconds(view.tpot_ms)} ms", look.text),
        ]
        return self._digits(width, figures.milliseconds(total), look.accent, beside)

    def _clock(self, width: int, tale: Tale, stage: Stage) -> list[Row]:
        """How long it took, large, and where on the request's clock that lies."""
        look, view = self.look, tale.detail.view
        row = view.stages[stage - 1]
        beside = [("ms", look.bold)]
        if row.begin is not None:
            until = row.end if row.end is not None else self.now
            begin, end = (
                figures.milliseconds((t - view.received) / 1e6) for t in (row.begin, until)
            )
            beside.append((f"on the clock {begin} {look.glyphs.arrow} {end} ms", look.text))
        total = view.e2e_ms if view.e2e_ms is not None else (self.now - view.received) / 1e6
        if row.ms is not None and total > 0:
            beside.append(
                (
                    f"{figures.percent(row.ms / total)} % of {figures.milliseconds(total)} ms",
                    look.dim,
                )
            )
        return self._digits(
            width, figures.milliseconds(row.ms), look.stage(stage, bold=True), beside
        )

    def _digits(
        self, width: int, told: str, colour: Style, beside: list[tuple[str, Style]]
    ) -> list[Row]:
        """A large figure with up to three lines beside it."""
        look = self.look
        digits = large(told) if look.glyphs is not ASCII else ["", told, ""]
        cells = len(digits[1])
        rows: list[Row] = []
        for index in range(ROWS):
            line = Line(width).put(digits[index].ljust(cells), colour).put("  ", look.text)
            if index < len(beside):
                line.put(*beside[index])
            rows.append(line.end(look.text))
        return rows

    def _facts(self, width: int, tale: Tale, stage: Stage) -> list[Row]:
        """What goes in and comes out, what bounds it, what was expected."""
        look = self.look
        known, row = info(stage), tale.detail.view.stages[stage - 1]
        rows: list[Row] = []

        def fact(name: str, text: str, style: Style = look.text) -> None:
            line = Line(width).put(name.ljust(_NAMES), look.dim)
            rows.append(
                line.put_text(plain(text, look), style, ellipsis=look.glyphs.ellipsis).end(
                    look.text
                )
            )

        if shapes := tale.into(stage):
            fact("goes in", _shapes(shapes))
        if shapes := tale.out(stage):
            fact("comes out", _shapes(shapes), look.bold)
        fact("bounded by", known.bounded_by)
        fact("worse with", known.worse)
        should = tale.expected.get(stage)
        if should is not None:
            text = f"{figures.milliseconds(should)} ms, from {tale.expected_from}"
            fact("expected", text)
        if row.parts:
            fact(
                "of which",
                "   ".join(f"{name} {figures.milliseconds(ms)}" for name, ms in row.parts),
            )
        return rows

    def _economics(self, width: int, tale: Tale, *, brief: bool = False) -> list[Row]:
        """Token 1 beside token 2; `brief`: only what makes the difference."""
        look, reads, view = self.look, tale.reads(), tale.detail.view
        if reads is None:
            return [self._text(width, "the engine did not tell the size of its model", look.dim)]
        one, two = reads
        first = sum(view.stages[stage - 1].ms or 0.0 for stage in (
            Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE))  # fmt: skip
        table = [
            ("", "token 1", f"token 2{f', batch {two.sharers}' if two.sharers > 1 else ''}"),
            (
                "tokens in the pass",
                figures.count(one.tokens),
                "1" if two.sharers == 1 else f"1 of {two.sharers}",
            ),
            ("reads", _gb(one.weight_bytes + one.kv_bytes), _gb(two.weight_bytes + two.kv_bytes)),
            ("computes", _flop(one.flops), _flop(two.flops)),
            ("FLOPs a byte", figures.count(one.intensity), figures.count(two.intensity)),
        ]
        if tale.device is not None and tale.model is not None:
            dtype = tale.model.compute_dtype
            table.append(
                ("waits for", one.bound_by(tale.device, dtype), two.bound_by(tale.device, dtype))
            )
        if first:
            table.append(
                (
                    "took",
                    f"{figures.milliseconds(first)} ms",
                    f"{figures.milliseconds(view.tpot_ms)} ms",
                )
            )
            each = figures.milliseconds(first / max(1.0, one.tokens))
            table.append(("ms a token", each, figures.milliseconds(view.tpot_ms)))
        if brief:
            table = [row for row in table if row[0] not in ("computes", "took", "waits for")]
        cells = max(18, min(24, (width - 20) // 2))
        rows: list[Row] = []
        for index, (name, left, right) in enumerate(table):
            style = look.dim if not index else look.bold
            line = Line(width).put(name.ljust(20), look.dim)
            line.put(
                left.rjust(cells), look.stage(Stage.PREFILL, bold=True) if not index else style
            )
            rows.append(
                line.put(
                    right.rjust(cells), look.stage(Stage.DECODE, bold=True) if not index else style
                ).end(look.text)
            )
        if tale.device is not None and tale.model is not None and not brief:
            even = balance(tale.device, tale.model.compute_dtype)
            said = f"this device can do {even:,.0f} FLOPs while it reads a byte"
            rows.append(self._text(width, plain(said, look), look.dim))
        return rows

    def _whole(self, width: int, tale: Tale, stage: Stage | None) -> list[Row]:
        """All of the request on a linear scale, with a mark under the stage of the page."""
        look, view = self.look, tale.detail.view
        end = view.closed if view.closed is not None else max(self.now, view.received + 1)
        span = max(1, end - view.received)
        bars = Bars(look, width)

        def place(t: int) -> int:
            return (t - view.received) * bars.units // span

        stretches = [
            Stretch(place(segment.begin), place(end if segment.end is None else segment.end),
                    int(segment.stage) | (WAIT if segment.waiting else 0))
            for segment in view.segments
        ]  # fmt: skip
        mark = Line(width)
        row = view.stages[stage - 1] if stage is not None else None
        if row is not None and row.begin is not None and stage is not None:
            until = row.end if row.end is not None else end
            begin = min(width - 1, place(row.begin) // bars.unit)
            cells = max(1, min(width - begin, (place(until) - place(row.begin)) // bars.unit))
            mark.fill_to(begin, look.text).put(look.glyphs.up * cells, look.stage(stage))
        return [
            Line(width).put_segments(bars.draw(stretches), width).end(look.text),
            mark.end(look.text),
        ]


def _shapes(shapes: list[Shape]) -> str:
    return "; ".join(
        f"{shape.what} {shape.shape}"
        + ("" if shape.size is None else f" = {figures.size(shape.size)}")
        for shape in shapes
    )


def _gb(value: float) -> str:
    return f"{value / 1e9:,.3g} GB" if value >= 1e8 else f"{value / 1e6:,.3g} MB"


def _flop(value: float) -> str:
    return f"{value / 1e12:,.3g} TFLOP" if value >= 1e11 else f"{value / 1e9:,.3g} GFLOP"

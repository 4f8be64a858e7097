"""The result of a budget: what it is about, its figures as a card or a line, what binds, and its
assumptions."""

from __future__ import annotations

import math

from rich.style import Style

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.analysis.budget.budget import Budget, sentence
from tracer.format import figures
from tracer.format.text import cell_width
from tracer.tui.screens.budget.model import tokens_per_s
from tracer.tui.toolkit.canvas import Canvas, Line, Row, blank, label
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.words import paragraph

GROUPS = tuple(
    (group, tuple(known.stage for known in STAGES if known.group is group)) for group in Group
)
_COLOURS = {
    Group.FRONT_END: Stage.TOKENISE,
    Group.PREFILL: Stage.PREFILL,
    Group.FIRST_BYTE: Stage.STREAM,
    Group.DECODE: Stage.DECODE,
    Group.TEARDOWN: Stage.TEARDOWN,
}


class BudgetHead(Canvas):
    """One row: model, device and what they are taken to reach, and at the right whether the figures
    are modelled or as traced."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="head")
        self.made: Budget | None = None
        self.basis = ""
        self.status = ""
        self.status_style: Style = look.warn

    def show(self, made: Budget, basis: str, status: str, style: Style) -> None:
        """Draw what a budget is about; `basis`: where its shares of the device come from, if not
        from the device."""
        self.made, self.basis, self.status, self.status_style = made, basis, status, style
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        look, made = self.look, self.made
        line = Line(width).add(" ", look.text)
        if made is None:
            return [line.end(look.text)]
        room = max(0, width - len(self.status) - 3)
        tuned = made.efficiency
        count = f" {look.glyphs.times} {made.tp}" if made.tp > 1 else ""
        host = f", host {tuned.host_ms:.2g} ms" if tuned.host_ms else ""
        parts = [
            f"{made.model.name} {made.model.weight_dtype}",
            made.device.title + count,
            f"MFU {100 * tuned.mfu:.0f} %, MBU {100 * tuned.mbu:.0f} %{host}",
            f"{tuned.roofline.value}, {made.counting.value}",
            self.basis,
        ]
        for index, part in enumerate(filter(None, parts)):
            if line.used + cell_width(label(part)) + 3 > room:
                continue
            if index:
                line.add(f" {look.glyphs.dot} ", look.faint)
            line.add_text(part, look.text if index else look.accent)
        line.fill_to(width - len(self.status) - 1, look.text)
        return [line.add(self.status, self.status_style).end(look.text)]


class BudgetCard(Panel):
    """Figures in rows, and the five groups as one bar."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="figures", edge=True)
        self.made: Budget | None = None

    def show(self, made: Budget) -> None:
        self.made = made
        self.repaint()

    def title(self) -> str:
        return "result"

    def body(self, width: int, height: int) -> list[Row]:
        made, look = self.made, self.look
        if made is None:
            return []
        rows: list[Row] = []
        for name, value, more in _figures(made):
            line = Line(width).add(name.ljust(9), look.dim).add(value, look.bold)
            for part in more:  # what has no room is left out, not cut
                if len(part) + 2 <= line.room:
                    line.add(f"  {part}", look.dim)
            rows.append(line.end(look.text))
        if height > len(rows):
            rows.append(self._groups(width, made))
        return rows[:height]

    def _groups(self, width: int, made: Budget) -> Row:
        """Return the whole request as one bar."""
        look = self.look
        shares = [sum(made.stage(stage).share for stage in stages) for _, stages in GROUPS]
        total = sum(shares) or 1.0
        line, done = Line(width), 0.0
        for (group, _), share in zip(GROUPS, shares, strict=True):
            done += share
            stage, until = _COLOURS[group], round(done / total * width)
            line.add(look.fill(stage) * max(0, until - line.used), look.stage(stage))
        return line.end(look.text)


class BudgetLine(Canvas):
    """The same figures in one row, for screens that are low."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="figures-line")
        self.made: Budget | None = None

    def show(self, made: Budget) -> None:
        self.made = made
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        line = Line(width).add(" ", look.text)
        for name, value, _ in _figures(self.made) if self.made is not None else ():
            if line.room < len(name) + len(value) + 3:
                break
            line.add("   " if line.used > 1 else "", look.text)
            line.add(name + " ", look.dim).add(value, look.bold)
        return [line.end(look.text)]


class BudgetNotes(Panel):
    """The assumptions of a budget, after what a fit found if there is one."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="notes")
        self.made: Budget | None = None
        self.finding = ""

    def show(self, made: Budget, finding: str) -> None:
        self.made, self.finding = made, finding
        self.repaint()

    def title(self) -> str:
        return "assumptions"

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        found = (self.finding,) if self.finding else ()
        for text in found + (self.made.assumptions if self.made is not None else ()):
            for index, piece in enumerate(paragraph(text, width - 2, look)):
                line = Line(width).add("  " if index else f"{look.glyphs.dot} ", look.faint)
                rows.append(line.add_text(piece, look.dim).end(look.text))
        return rows[:height]


class Sentence(Canvas):
    """Words that wrap: what binds, or what is wrong."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="sentence")
        self.text = ""
        self.wrong = False

    def show(self, made: Budget | None, trouble: str) -> None:
        self.wrong = made is None
        self.text = trouble if made is None else sentence(made)
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        style = look.warn if self.wrong else look.text
        return [
            Line(width).add(" ", look.text).add_text(line, style).end(look.text)
            for line in paragraph(self.text, width - 2, look)[:height]
        ] or [blank(width, look.text)]


def _figures(made: Budget) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (name, figure, details) of each figure."""
    ms = figures.milliseconds
    fits = made.capacity
    rate = tokens_per_s(made)
    here = made.ridge_batch_here
    held = made.workload.prompt + made.workload.output
    more: tuple[str, ...] = (
        "like this one",
        f"{fits.users_worst_case:,} at {fits.longest:,} tokens",
    )
    users = "any"
    if not fits.fits:
        users, more = "none", ("no room beside the weights",)
    elif math.isfinite(fits.users_observed):
        users = f"{fits.users_observed:,.0f}"
    else:
        more = ("no cache that grows",)
    return [
        ("TTFT", f"{ms(made.ttft_ms)} ms", ()),
        (
            "ITL",
            f"{ms(made.itl_ms)} ms",
            (f"{rate:,.0f} tok/s",) * math.isfinite(rate)
            + (f"{ms(made.itl_first_ms)} to {ms(made.itl_last_ms)}",),
        ),
        ("total", f"{ms(made.total_ms)} ms", (f"{made.steps:,} steps",)),
        (
            "ridge",
            f"batch {made.ridge_batch:,.0f}",
            ("at this context never" if here is None else f"at this context {here:,.0f}",),
        ),
        (
            "KV",
            figures.size(float(made.model.kv_bytes(float(held)))),
            (
                f"{-(-held // fits.block_size):,} blocks",
                f"{figures.size(made.step_kv_bytes)} read a step",
            ),
        ),
        ("fits", users, more),
    ]

"""What follows from a budget: its figures as a card or a line, and the sentence that says what
binds."""

from __future__ import annotations

import math

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.analysis.budget.budget import Budget, sentence
from tracer.tui.screens.budget.desk import group_shares, tokens_per_s
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Canvas, Line, Row, blank
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


class BudgetCard(Panel):
    """Figures in rows, and the five groups as one bar."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="figures", edge=True)
        self.made: Budget | None = None

    def show(self, made: Budget) -> None:
        """Draw a budget."""
        self.made = made
        self.repaint()

    def title(self) -> str:
        return "what follows"

    def body(self, width: int, height: int) -> list[Row]:
        made, look = self.made, self.look
        if made is None:
            return []
        rows: list[Row] = []
        for name, value, more in _figures(made):
            line = Line(width).put(name.ljust(9), look.dim).put(value, look.bold)
            for part in more:  # what has no room is left out, not cut
                if len(part) + 2 <= line.room:
                    line.put(f"  {part}", look.dim)
            rows.append(line.end(look.text))
        if height > len(rows):
            rows.append(self._groups(width, made))
        return rows[:height]

    def _groups(self, width: int, made: Budget) -> Row:
        """The whole request as one bar."""
        look = self.look
        shares = group_shares(made, [stages for _, stages in GROUPS])
        total = sum(shares) or 1.0
        line, done = Line(width), 0.0
        for (group, _), share in zip(GROUPS, shares, strict=True):
            done += share
            until = round(done / total * width)
            line.put(
                look.fill(_COLOURS[group]) * max(0, until - line.used), look.stage(_COLOURS[group])
            )
        return line.end(look.text)


class BudgetLine(Canvas):
    """The same figures in one row, for screens that are low."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="figures-line")
        self.add_class("tile")
        self.made: Budget | None = None

    def show(self, made: Budget) -> None:
        """Draw a budget."""
        self.made = made
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """The row."""
        look = self.look
        line = Line(width).put(" ", look.text)
        for index, (name, value, _) in enumerate(
            _figures(self.made) if self.made is not None else ()
        ):
            if line.room < len(name) + len(value) + 3:
                break
            line.put("   " if index else "", look.text).put(name + " ", look.dim).put(
                value, look.bold
            )
        return [line.end(look.text)]


class BudgetNotes(Panel):
    """What a budget takes for granted."""

    pad = 1

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="notes")
        self.made: Budget | None = None
        self.finding = ""

    def show(self, made: Budget, finding: str = "") -> None:
        """Draw a budget's assumptions, after what a fit found if there is one."""
        self.made, self.finding = made, finding
        self.repaint()

    def title(self) -> str:
        return "what this takes for granted"

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        found = (self.finding,) if self.finding else ()
        for said in found + (self.made.assumptions if self.made is not None else ()):
            for index, text in enumerate(paragraph(said, width - 2, look)):
                line = Line(width).put("  " if index else f"{look.glyphs.dot} ", look.faint)
                rows.append(line.put_text(text, look.dim).end(look.text))
        return rows[:height]


class Sentence(Canvas):
    """Words that wrap."""

    def __init__(self, look: Look, *, id: str = "sentence") -> None:
        super().__init__(look, id=id)
        self.add_class("tile")
        self.text = ""
        self.bad = False

    def show(self, made: Budget | None, trouble: str = "") -> None:
        """Draw what binds, or what is wrong."""
        self.text, self.bad = (
            (sentence(made) if made is not None and not trouble else trouble),
            bool(trouble),
        )
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """The rows."""
        look = self.look
        style = look.warn if self.bad else look.text
        lines = paragraph(self.text, width - 2, look)[:height]
        rows: list[Row] = [
            Line(width).put(" ", look.text).put_text(line, style).end(look.text) for line in lines
        ]
        return rows or [blank(width, look.text)]


def _figures(made: Budget) -> list[tuple[str, str, tuple[str, ...]]]:
    """(name, figure, what else there is to say about it)."""
    ms = figures.milliseconds
    fits = made.capacity
    rate = tokens_per_s(made)
    here = (
        "never, with this context"
        if made.ridge_batch_here is None
        else f"{made.ridge_batch_here:,.0f} here"
    )
    held = -(-(made.workload.prompt + made.workload.output) // fits.block_size)
    kept = made.model.kv_bytes(float(made.workload.prompt + made.workload.output))
    more: tuple[str, ...]
    if not fits.fits:
        users, more = "none", ("no room beside weights",)
    elif math.isfinite(fits.users_observed):
        users = f"{fits.users_observed:,.0f}"
        more = ("like this one", f"{fits.users_worst_case:,} of {fits.longest:,}")
    else:
        users, more = "any", ("no cache that grows",)
    return [
        ("TTFT", f"{ms(made.ttft_ms)} ms", ()),
        (
            "ITL",
            f"{ms(made.itl_ms)} ms",
            (f"{rate:,.0f} tok/s",) * math.isfinite(rate)
            + (f"{ms(made.itl_first_ms)} to {ms(made.itl_last_ms)}",),
        ),
        ("total", f"{ms(made.total_ms)} ms", (f"{made.steps:,} steps",)),
        ("ridge", f"{made.ridge_batch:,.0f}", ("sequences", here)),
        (
            "KV",
            figures.size(float(kept)),
            (f"{held:,} blocks", f"a step reads {figures.size(made.step_kv_bytes)}"),
        ),
        ("users", users, more),
    ]

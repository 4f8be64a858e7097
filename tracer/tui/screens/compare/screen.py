"""The Compare screen: stages and timers of two or three traces side by side, and the stage that
explains the difference.

Noise is found by resampling, which takes longer than a frame: a thread does it, at most every few
seconds while the trace goes on, and the screen shows the last result meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.widget import Widget
from textual.widgets import Input

from tracer.analysis.compare import Comparison, Pair, Trace, compare
from tracer.analysis.compare.cells import MATCHES
from tracer.analysis.compare.result import PERCENTILES
from tracer.tui.listing import Query
from tracer.tui.screens.base import FrameScreen, column
from tracer.tui.screens.compare.distribution_card import DistributionCard
from tracer.tui.screens.compare.head import CompareHead
from tracer.tui.screens.compare.subjects import Subject, Subjects, read_baseline, same
from tracer.tui.screens.compare.table import MATCHES as MATCH_NAMES
from tracer.tui.screens.compare.table import CompareTable
from tracer.tui.toolkit.key_bar import Key
from tracer.tui.toolkit.line_input import LineInput, LineLabel
from tracer.tui.toolkit.theme import Look

BESIDE_FROM = 150
"""Columns from which the distribution stands beside the rows."""
EVERY = 50
"""Frames between comparisons of a trace that goes on: five seconds."""
ROUNDS = 500
"""Rounds of resampling: enough for a screen."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What to compare, and how."""

    traces: tuple[Trace, ...]
    percentile: str
    match: str

    def same_as(self, other: _Question | None) -> bool:
        """Return True if both have one answer."""
        return (
            other is not None
            and (self.percentile, self.match) == (other.percentile, other.match)
            and same(self.traces, other.traces)
        )


class CompareScreen(FrameScreen):
    """See the module."""

    NAME = "Compare"
    AUTO_FOCUS = "#compare-table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "leave", "back", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move(-8)", "page up", show=False),
        Binding("pagedown", "move(8)", "page down", show=False),
        Binding("home", "move(-1000)", "to the top", show=False),
        Binding("end", "move(1000)", "to the end", show=False),
        Binding("enter", "spread", "distribution of the row", show=False),
        Binding("p", "percentile", "percentile: p50, p95 or p99", show=False),
        Binding("x", "match", "match requests by length, by work, or not", show=False),
        Binding("s", "subject", "compare other sides", show=False),
        Binding("m", "mark", "split at this instant", show=False),
        Binding("f", "file", "compare with a file", show=False),
        Binding("a", "all", "whole trace or time window", show=False),
        Binding("n", "pair", "next pair", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.subjects = Subjects()
        self.percentile = PERCENTILES[0]
        self.match = MATCHES[0]
        self.windowed = False
        self.spread = False
        """True while the distribution is shown in place of the rows."""
        self.which = 0
        self.comparison: Comparison | None = None
        self.trouble = ""
        self.working = False
        self._answered: _Question | None = None
        self._stale = True
        self._head_rows = 0
        self.head = CompareHead(look)
        self.table = CompareTable(look)
        self.card = DistributionCard(look)
        self.line = LineInput(look)
        self.line_label = LineLabel(look)

    def compose(self) -> ComposeResult:
        yield from (self.head, self.table, self.card, self.line_label, self.line, self.key_bar)

    # --- what is compared -------------------------------------------------------------------------

    def set_traces(self, traces: Sequence[Trace], percentile: str, match: str) -> None:
        """Compare these, whatever else is shown."""
        self.subjects.given = tuple(traces)
        self.subjects.subject = Subject.GIVEN
        self.percentile, self.match = percentile, match
        self._stale = True

    @property
    def pair(self) -> Pair | None:
        """The pair that is shown."""
        pairs = self.comparison.pairs if self.comparison is not None else ()
        return pairs[self.which % len(pairs)] if pairs else None

    @property
    def _window(self) -> float | None:
        return self.tracer.frozen.window_s if self.windowed else None

    def _compare_again(self) -> None:
        """Start a comparison when there is something new, one at a time."""
        if self.working or not (self._stale or self.frame % EVERY == 0):
            return
        feed = self.tracer.feed
        if self._answered is not None and not self._stale and self.tracer.frozen.paused:
            return
        self._stale = False
        traces = self.subjects.traces(feed.state, feed.now(), self._window)
        question = _Question(traces, self.percentile, self.match)
        if not question.same_as(self._answered):
            self.working = True
            self.run_worker(self._answer(question), name="compare", exit_on_error=False)

    async def _answer(self, question: _Question) -> None:
        try:
            self.comparison = await asyncio.to_thread(
                compare,
                question.traces,
                percentile=question.percentile,
                match=question.match,
                rounds=ROUNDS,
            )
        except Exception as error:
            self.trouble = f"the comparison failed: {error}"
        else:
            self.trouble = ""
            self._answered = question
        finally:
            self.working = False
        if self.is_mounted:
            self.place()

    # --- layout -----------------------------------------------------------------------------------

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        width, height = size
        keys = 1 if height >= 5 else 0
        line = 1 if self.line.shown else 0
        head = min(self.head.rows(width, height), max(1, height - keys - line - 3))
        main = max(1, height - head - keys - line)
        regions = column(0, 0, width, [(self.head, head)])
        beside = width >= BESIDE_FROM and self.comparison is not None
        self.card.edge = beside
        if beside:
            side = max(60, width * 2 // 5)
            regions[self.table] = Region(0, head, width - side, main)
            regions[self.card] = Region(width - side, head, side, main)
        elif self.spread:
            regions[self.card] = Region(0, head, width, main)
        else:
            regions[self.table] = Region(0, head, width, main)
        below = head + main
        cells = min(10, width // 3)
        regions.update(column(0, below, cells, [(self.line_label, line)]))
        regions.update(column(cells, below, width - cells, [(self.line, line)]))
        regions.update(column(0, below + line, width, [(self.key_bar, keys)]))
        return regions

    # --- drawing ----------------------------------------------------------------------------------

    def draw(self) -> None:
        if not self.is_mounted or not self.table.is_mounted:
            return
        app = self.tracer
        self._compare_again()
        status, style = app.status_of(app.frozen.snapshot(Query(limit=0)))
        if self.working:
            status = f"comparing {self.look.glyphs.ellipsis}  {status}"
        waiting = self.trouble or ("" if self.comparison is not None else "comparing")
        subject = self.subjects.describe(app.feed.state, self._window)
        self.head.show(subject, self.comparison, self.pair, waiting, status, style)
        self.table.show(self.comparison, self.pair)
        traces = self._answered.traces if self._answered is not None else ()
        self.card.show(self.table.row, traces, self.comparison, self.pair)
        rows = self.head.rows(*self.size)
        if rows != self._head_rows:
            self._head_rows = rows
            self.place()
        note = app.note or self.table.explained()
        self.key_bar.show(self.keys(), note, news=app.note_is_news)
        self.frame += 1

    def keys(self) -> Sequence[Key]:
        pairs = self.comparison.pairs if self.comparison is not None else ()
        keys = [
            Key("?", "help", "app.help"),
            Key("Esc", "back", "leave"),
            Key("p", self.percentile, "percentile"),
            Key("x", MATCH_NAMES[self.match], "match"),
            Key("Enter", "distribution", "spread", self.spread),
            Key("f", "file", "file"),
            Key("m", "mark now", "mark"),
            Key("s", "other sides", "subject"),
            Key("n", "next pair", "pair"),
            Key("a", "window only", "all", self.windowed),
            Key("q", "quit", "app.quit"),
        ]
        without = {
            "spread": self.size.width >= BESIDE_FROM,
            "subject": len(self.subjects.possible()) < 2,
            "pair": len(pairs) < 2,
            "all": self.subjects.subject is Subject.GIVEN,
        }
        return [key for key in keys if not without.get(key.action)]

    # --- what the user does -----------------------------------------------------------------------

    def action_leave(self) -> None:
        if self.spread:
            self.action_spread()
        else:
            self.tracer.action_tab(1)

    def action_move(self, rows: int) -> None:
        self.table.select(self.table.selected + rows)
        self.draw()

    def action_spread(self) -> None:
        self.spread = self.size.width < BESIDE_FROM and not self.spread
        self.place()

    def action_percentile(self) -> None:
        self.percentile = PERCENTILES[(PERCENTILES.index(self.percentile) + 1) % len(PERCENTILES)]
        self._ask()

    def action_match(self) -> None:
        self.match = MATCHES[(MATCHES.index(self.match) + 1) % len(MATCHES)]
        self._ask()

    def action_subject(self) -> None:
        self.subjects.next()
        self._ask()

    def action_mark(self) -> None:
        """Compare requests received before this instant with later ones."""
        self.subjects.mark = self.tracer.feed.now()
        self.subjects.subject = Subject.MARK
        self.tracer.report("requests received so far are compared with later ones")
        self._ask()

    def action_all(self) -> None:
        self.windowed = not self.windowed
        self._ask()

    def action_pair(self) -> None:
        self.which += 1
        self.place()

    def _ask(self) -> None:
        self._stale = True
        self.draw()

    def action_file(self) -> None:
        self.line_label.show("baseline")
        self.line.open("file", "", "path of a recorded trace, Esc to cancel")
        self.place()

    @on(Input.Submitted, "#line")
    def file_named(self, event: Input.Submitted) -> None:
        path = event.value.strip()
        self._close_line()
        if path:
            self.run_worker(self._read(path), name="baseline", exit_on_error=False)

    @on(LineInput.Cancelled)
    def file_not_named(self) -> None:
        self._close_line()

    def _close_line(self) -> None:
        self.line.close()
        self.set_focus(self.table)
        self.place()

    async def _read(self, path: str) -> None:
        try:
            baseline = await asyncio.to_thread(read_baseline, path)
        except Exception as error:
            self.tracer.report(str(error), grave=True)
            return
        self.subjects.baseline = baseline
        self.subjects.subject = Subject.FILE
        self._ask()

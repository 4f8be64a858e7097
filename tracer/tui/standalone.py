"""The apps of ``tracer budget --screen`` and ``tracer compare --screen``, with no live engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tracer.analysis.budget.budget import Budget
from tracer.analysis.budget.capacity import pool
from tracer.analysis.compare import Trace
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.screens.budget.model import BudgetModel
from tracer.tui.screens.compare.screen import CompareScreen
from tracer.tui.toolkit.theme import Look

BUDGET_TAB, COMPARE_TAB, JOURNEY_TAB = 5, 6, 7


class StillFeed:
    """A state in which nothing happens any more."""

    def __init__(self, state: TraceState, status: str) -> None:
        self.state = state
        self.status = status

    def now(self) -> int:
        return self.state.now

    async def run(self) -> None:
        await asyncio.Event().wait()


class BudgetApp(TracerApp):
    """Starts on the Budget screen, or on the Journey screen, with the setting of a budget."""

    def __init__(self, made: Budget, *, journey: bool = False, look: Look | None = None) -> None:
        feed = StillFeed(TraceState(), "no engine: tracer attach, tracer demo")
        super().__init__(feed, title="budget", mode="budget", look=look)
        self.budget_model = model_of(made)
        self._first_tab = JOURNEY_TAB if journey else BUDGET_TAB

    def on_ready(self) -> None:
        self.action_tab(self._first_tab)


def model_of(made: Budget) -> BudgetModel:
    """Return the setting of a budget. A KV pool other than the device's own is kept."""
    model = BudgetModel()
    model.model, model.device, model.workload = made.model, made.device, made.workload
    model.efficiency, model.counting = made.efficiency, made.counting
    model.tp, model.ignore_kv = made.tp, made.ignore_kv
    model.block_size, model.longest = made.capacity.block_size, made.capacity.longest
    if made.capacity.pool_bytes != max(0.0, pool(made.model, made.device, made.tp)):
        model.pool_bytes = made.capacity.pool_bytes
    model.changed()
    return model


class CompareApp(TracerApp):
    """The screens of the last trace, and in front of them how it compares with the others."""

    def __init__(
        self,
        traces: Sequence[Trace],
        state: TraceState,
        *,
        percentile: str = "p50",
        match: str = "length",
        look: Look | None = None,
    ) -> None:
        name = traces[-1].context.name
        super().__init__(StillFeed(state, "ended"), title=name, mode="compare", look=look)
        screen = CompareScreen(self.look)
        screen.set_traces(traces, percentile, match)
        self.keep(COMPARE_TAB, screen)

    def on_ready(self) -> None:
        self.action_tab(COMPARE_TAB)


def show_comparison(
    traces: Sequence[Trace], state: TraceState, *, percentile: str, match: str
) -> int:
    """Show the comparison until the user leaves; return the exit code."""
    app = CompareApp(traces, state, percentile=percentile, match=match)
    app.run()
    return app.return_code or 0

"""The Budget and Journey screens without any engine: the same app over a trace in which nothing
happens."""

from __future__ import annotations

import asyncio

from tracer.analysis.budget.budget import Budget
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.screens.budget.desk import Desk
from tracer.tui.toolkit.theme import Look

BUDGET_TAB, JOURNEY_TAB = 5, 7


class StillFeed:
    """A feed that has nothing to tell."""

    def __init__(self) -> None:
        self.state = TraceState()
        self.status = "no engine: tracer attach, tracer demo"

    def now(self) -> int:
        """No time passes."""
        return 0

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.Event().wait()


class BudgetApp(TracerApp):
    """Begins on the Budget screen, or with `journey` on that one, with the setting of a budget."""

    def __init__(self, made: Budget, *, journey: bool = False, look: Look | None = None) -> None:
        super().__init__(StillFeed(), title="budget", mode="budget", look=look)
        self.desk = desk_of(made)
        self._number = JOURNEY_TAB if journey else BUDGET_TAB

    def on_ready(self) -> None:
        """Go to the screen that was asked for."""
        self.action_tab(self._number)


def desk_of(made: Budget) -> Desk:
    """A desk with the setting of a budget. Its KV pool stays the one that was given, if it is not
    the device's own."""
    from tracer.analysis.budget.capacity import pool

    desk = Desk()
    desk.model, desk.device, desk.efficiency, desk.workload = (
        made.model,
        made.device,
        made.efficiency,
        made.workload,
    )
    desk.counting, desk.tp, desk.ignore_kv = made.counting, made.tp, made.ignore_kv
    desk.block_size, desk.longest = made.capacity.block_size, made.capacity.longest
    if made.capacity.pool_bytes != max(0.0, pool(made.model, made.device, made.tp)):
        desk.pool_bytes = made.capacity.pool_bytes
    desk.touched()
    return desk

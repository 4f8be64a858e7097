"""The counters that the latencies over windows and the Numbers view are read from.

`TraceState` writes them as events come in; `numbers` reads them. They hold counts, not requests:
nothing in them grows without bound, and a request that was dropped long ago is still in them.
"""

from __future__ import annotations

from typing import Any, Final

from engine_hooks.protocol.events import Step
from tracer.state.metrics.engine_series import EngineSeries
from tracer.state.metrics.finished_table import FinishedTable
from tracer.state.metrics.gap_counter import COLUMNS, TIMERS, WIDTH, GapCounter
from tracer.state.metrics.groups import GROUPS, Groups
from tracer.state.metrics.total_counters import Distribution
from tracer.state.metrics.windowed import WindowedCounts
from tracer.state.request.request import Request

_MOST: Final = 1 << 40
"""No number of tokens of ours is larger, whatever a peer says."""
STEPS: Final = WIDTH * (GROUPS + 1)
STEP_TOKENS, STEP_BUDGET = STEPS + 1, STEPS + 2
"""Series of all engines' steps; of the tokens scheduled in those whose engine told its budget; of
these budgets."""
_PLACES: Final = {name: place for place, name in enumerate(COLUMNS)}


class Counters:
    """See the module."""

    def __init__(self) -> None:
        self.groups = Groups()
        self.counts = WindowedCounts(
            [*range(len(TIMERS)), *[-1] * (WIDTH - len(TIMERS))] * (GROUPS + 1)
        )
        """By group: `gap_counter.COLUMNS`; steps; gaps by batch size and by position. Its sums:
        `gap_counter.TIMERS` of all."""
        self.finished_table = FinishedTable()
        self.gap_counters: dict[str, GapCounter] = {}
        self.engine_series: dict[str, EngineSeries] = {}

    # --- what is written

    def gap_counter(self, source: str, itl: Distribution) -> GapCounter:
        """The pace of a source's batch. `itl`: where its gaps are added up exactly."""
        counter = self.gap_counters.get(source)
        if counter is None:
            counter = self.gap_counters[source] = GapCounter(self.counts, self.groups, itl)
        return counter

    def sample(self, request: Request, name: str, t: int, ns: float) -> None:
        """A latency of the request became known, to be counted at `t` (ns)."""
        self.counts.add(t, self.groups.of(request) * WIDTH + _PLACES[name], ns)

    def count(self, request: Request, name: str, t: int, amount: int = 1) -> None:
        """Something of the request is to be counted at `t` (ns)."""
        if amount > 0:
            self.counts.add(
                t, self.groups.of(request) * WIDTH + _PLACES[name], 0.0, min(amount, _MOST)
            )

    def scheduled(self, request: Request, t: int) -> None:
        """The request was scheduled for the first time."""
        self.count(request, "tokens_in", t, request.prompt_tokens)
        self.count(request, "tokens_cached", t, request.cached_tokens)

    def preemption(self, request: Request, t: int) -> None:
        """The request lost its place."""
        self.count(request, "preemptions", t)

    def settled(self, request: Request) -> None:
        """Write the request's row if it is over, and take it back if it is not after all."""
        if request.over is not None:
            self.finished_table.write(request, self.groups.of(request))
        else:
            self.finished_table.drop(request.serial)

    def joined(self, old: Request, new: Request) -> None:
        """Two requests turned out to be one, which is not over: neither has a row that counts."""
        self.finished_table.drop(old.serial)
        self.finished_table.drop(new.serial)

    def step(
        self, source: str, step: Step, length: int, wait: int, batch: int, budget: int
    ) -> None:
        """A step of `length` ns was taken in, whose members waited for `wait` ns; `budget`: tokens
        that it could have run, -1 when that is not known."""
        tokens = min(max(0, step.tokens), _MOST)
        self.counts.add(step.t, STEPS, 0.0)
        if 0 < budget < _MOST:
            self.counts.add(step.t, STEP_BUDGET, 0.0, budget)
            if tokens:
                self.counts.add(step.t, STEP_TOKENS, 0.0, tokens)
        series = self.engine_series.get(source)
        if series is None:
            series = self.engine_series[source] = EngineSeries()
        series.add(
            step.t,
            length,
            wait,
            batch,
            tokens,
            step.used,
            step.cached,
            step.free,
            max(0, step.waiting),
        )

    def entries(self) -> dict[str, Any]:
        """Everything, by what it is; equal counters give equal entries."""
        return {
            "groups": self.groups.known,
            "counts": self.counts.entries(),
            "table": self.finished_table.entries(),
            "tracks": {name: series.entries() for name, series in self.engine_series.items()},
            "runs": {name: counter.runs() for name, counter in self.gap_counters.items()},
        }

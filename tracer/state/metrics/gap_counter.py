"""The pace of one engine's batch: the gap before each token, by group, by batch size and by
position in the sequence.

All members of a batch that yield one token a step see the same gap, so a step costs a few
additions, not one a token: how many such members are in each group and in each range of positions
is kept up to date as runs open and close, and as positions cross from one range into the next
(every range is half an octave: rarely).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tracer.state.metrics.groups import GROUPS, Groups
from tracer.state.metrics.octaves import RANGES, high_of, range_of
from tracer.state.metrics.total_counters import Distribution
from tracer.state.metrics.windowed import COARSE, SERIES, WindowedCounts
from tracer.state.request.request import Request

TIMERS: Final = ("queue", "prefill", "ttft", "itl", "tpot", "e2e")
COUNTERS: Final = ("requests", "tokens_in", "tokens_cached", "tokens_out", "preemptions")
COLUMNS: Final = (*TIMERS, *COUNTERS)
"""What is counted for each group, a series each."""
ITL: Final = COLUMNS.index("itl")
TOKENS_OUT: Final = COLUMNS.index("tokens_out")
WIDTH: Final = 16
"""Series that belong to one group, and room."""
BY_BATCH: Final = COARSE
"""First of the series of gaps by batch size, one for each range."""
BY_PLACE: Final = COARSE + RANGES
"""Likewise by position in the sequence."""
_LONGEST: Final = 1 << 40
"""A prompt of more tokens is none of ours."""

assert WIDTH * (GROUPS + 1) <= COARSE and BY_PLACE + RANGES <= SERIES


@dataclass(slots=True, eq=False)
class Run:
    """A member that yields a token a step. In step *i* (index of the history) it is at position
    `base` + *i*; `base` is None when the length of its prompt is not known. `place`: range of the
    position, -1 then; `crossing`: the step in which it comes into the next one."""

    group: int
    base: int | None
    place: int = -1
    crossing: int = -1


class GapCounter:
    """Counts the gaps of one batch into `counts`, and into `itl`, which keeps their exact sum."""

    def __init__(self, counts: WindowedCounts, groups: Groups, itl: Distribution) -> None:
        self._counts, self._groups, self._itl = counts, groups, itl
        self._runs: dict[int, Run] = {}
        """Open runs by request."""
        self._members: dict[int, int] = {}
        """How many of them are in each group."""
        self._places = [0] * RANGES
        self._crossings: dict[int, list[Run]] = {}
        """Which runs come into the next range of positions in a step."""

    # --- runs

    def opened(self, request: Request, index: int) -> None:
        """The request had a token in step `index`, not counted here, and goes on with one a
        step."""
        base = None
        if 0 <= request.prompt_tokens < _LONGEST:
            base = (
                request.prompt_tokens
                + request.settled.count
                + request.produced
                + request.unseen
                + 1
                - index
            )
        self._begin(request.serial, Run(self._groups.of(request), base), index)

    def _begin(self, serial: int, run: Run, index: int) -> None:
        self.closed(serial)
        self._runs[serial] = run
        self._members[run.group] = self._members.get(run.group, 0) + 1
        if run.base is not None:
            run.place = range_of(run.base + index + 1)
            self._places[run.place] += 1
            self._await(run)

    def _await(self, run: Run) -> None:
        if run.base is not None and run.place < RANGES - 1:
            run.crossing = high_of(run.place) + 1 - run.base
            self._crossings.setdefault(run.crossing, []).append(run)

    def closed(self, serial: int) -> None:
        """The request does not go on like that."""
        run = self._runs.pop(serial, None)
        if run is None:
            return
        left = self._members[run.group] - 1
        if left:
            self._members[run.group] = left
        else:
            del self._members[run.group]
        if run.place >= 0:
            self._places[run.place] -= 1
            waiting = self._crossings.get(run.crossing, [])
            if run in waiting:
                waiting.remove(run)
                if not waiting:
                    del self._crossings[run.crossing]

    def exchange(self, old: int, new: int) -> None:
        """A request has another number from now on."""
        run = self._runs.pop(old, None)
        if run is not None:
            self.closed(new)
            self._runs[new] = run

    # --- tokens

    def step(self, index: int, token: int, gap: int | None, size: int, alone: bool) -> None:
        """Step `index` gave each open run a token at the instant `token`, `gap` ns after the one
        before it (None: not known). `size`: members of the batch; `alone`: whether the step ran no
        prompt beside them: only then is the gap put down to the batch's size and to positions."""
        for run in self._crossings.pop(index, ()):
            self._places[run.place] -= 1
            run.place += 1 if run.place else 2
            self._places[run.place] += 1
            self._await(run)
        if not self._runs:
            return
        add = self._counts.add
        for group, number in self._members.items():
            add(token, group * WIDTH + TOKENS_OUT, 0.0, number)
        if gap is None:
            return
        self._itl.add(gap, len(self._runs))
        for group, number in self._members.items():
            add(token, group * WIDTH + ITL, gap, number)
        if not alone:
            return
        add(token, BY_BATCH + range_of(size), gap, len(self._runs))
        for place, number in enumerate(self._places):
            if number:
                add(token, BY_PLACE + place, gap, number)

    def token(self, request: Request, token: int, gap: float | None, given: int) -> None:
        """The request, which has no open run, got `given` tokens at the instant `token`, each `gap`
        ns after the one before it (None: not known)."""
        series = self._groups.of(request) * WIDTH
        self._counts.add(token, series + TOKENS_OUT, 0.0, given)
        if gap is not None:
            self._itl.add(gap, given)
            self._counts.add(token, series + ITL, gap, given)

    def runs(self) -> list[tuple[int, int, int | None]]:
        """The open runs: request, group and base of each."""
        return [(serial, run.group, run.base) for serial, run in sorted(self._runs.items())]

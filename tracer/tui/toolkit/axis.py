"""Time axes: which column an instant falls into.

The shared axis of the Live screen jumps by a quarter of a page instead of scrolling by columns:
scrolling redraws every bar every few frames (78 kB/s), a jump redraws them once in some seconds (9
kB/s), and bars that stand still can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.format import figures

_MS: Final = (1, 2, 4, 10, 20, 40, 100, 200, 400, 600, 800)
_SECONDS: Final = (1, 1.6, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30, 40, 60, 80, 100, 120, 160, 200)
_LONG: Final = (240, 300, 400, 600, 800, 1200, 1800, 2400, 3600, 7200, 14400, 43200, 86400, 604800)
SPANS: Final = (
    *(ms * NS_PER_MS for ms in _MS),
    *(int(seconds * NS_PER_S) for seconds in (*_SECONDS, *_LONG)),
)
"""Lengths of a page in ns, one of which is always used."""

SHORTEST: Final = 4 * NS_PER_S
"""The shortest page chosen without being asked: a shorter one would jump, and redraw everything,
too often."""

JUMP: Final = 4
"""The page moves on by this part of itself."""
SPACING: Final = 10
"""Columns between two marks at least."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis at a column, with its label."""

    column: int
    label: str


class PageAxis:
    """A page of time: `begin` ns and `span` ns. `version` changes whenever either does."""

    def __init__(self) -> None:
        self.begin = 0
        self.span = SHORTEST * 2
        self.version = 0
        self.zoom: int | None = None
        """Index into `SPANS` chosen by hand; None lets the page fit what is shown."""

    def fit(self, earliest: int, latest: int, shortest: int = SHORTEST) -> None:
        """Move the page so that it holds `latest`, as long as it takes to reach back to `earliest`.

        Grows as soon as it must, shrinks only when little more than half of it would do, so that it
        does not flap.
        """
        span = self.span
        if self.zoom is not None:
            span = SPANS[self.zoom]
        else:
            reach = max(latest - earliest, 1)
            room = _history(span)
            if not self.version or reach > room or reach < room * 6 // 10 or span < shortest:
                fitting = (s for s in SPANS if s >= shortest and _history(s) >= reach)
                span = next(fitting, SPANS[-1])
        jump = span // JUMP
        begin = latest // jump * jump - span + jump
        moved = span != self.span or not self.begin <= latest < self.begin + self.span
        if moved and (begin, span) != (self.begin, self.span):
            self.begin, self.span = begin, span
            self.version += 1

    def zoom_by(self, steps: int) -> None:
        """Choose longer (+) or shorter (-) pages by hand."""
        index = SPANS.index(self.span) if self.zoom is None else self.zoom
        self.zoom = max(0, min(len(SPANS) - 1, index + steps))

    def fit_again(self) -> None:
        """Return to pages that fit what is shown."""
        self.zoom = None

    def column(self, t: int, width: int) -> int:
        """Return the column of an instant; outside 0 … width-1 off the page."""
        return (t - self.begin) * width // self.span

    def ticks(self, width: int, origin: int) -> list[Tick]:
        """Return marks at round times counted from `origin`, at least `SPACING` columns apart."""
        if width < 4:
            return []
        least = self.span * SPACING // width
        step = next((s for s in _STEPS if s >= least), _STEPS[-1])
        first = max(0, -(-(self.begin - origin) // step) * step)
        times = range(first, self.begin - origin + self.span, step)
        return [Tick(self.column(t + origin, width), tick_label(t, step)) for t in times]


_STEPS: Final = (
    *(us * 1_000 for us in (100, 200, 500)),
    *(ms * NS_PER_MS for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
    *(s * NS_PER_S for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900)),
    *(s * NS_PER_S for s in (1800, 3600, 7200, 21600, 86400)),
)
"""Distances of marks in ns."""


def _history(span: int) -> int:
    """Return what is visible before the latest instant, wherever in the last quarter that lies."""
    return span - span // JUMP


def tick_label(t: int, step: int) -> str:
    """Return time since the start of the trace, with the digits that a step of `step` ns needs."""
    text = figures.instant(t)
    if step >= NS_PER_S:
        return text
    digits = next(d for d in range(1, 10) if step * 10**d % NS_PER_S == 0)
    return f"{text}.{t % NS_PER_S * 10**digits // NS_PER_S:0{digits}d}"


def elastic_widths(durations: Sequence[float], width: int) -> list[int]:
    """Return columns for consecutive intervals where 0.1 ms and 1,800 ms share a line.

    `durations` in ms. Half of the columns go by log(1 + duration / 10 µs), half by duration; each
    interval of any length gets at least one; the sum is `width`.
    """
    logs = [math.log1p(max(0.0, duration) / 0.01) for duration in durations]
    alive = [index for index, weight in enumerate(logs) if weight > 0]
    columns = [0] * len(logs)
    if not alive or width <= 0:
        return columns
    spare = width - len(alive)
    if spare <= 0:
        for index in alive[:width]:
            columns[index] = 1
        return columns
    whole, whole_log = sum(durations[index] for index in alive), sum(logs)
    exact = {
        index: (durations[index] / whole + logs[index] / whole_log) / 2 * spare for index in alive
    }
    for index, share in exact.items():
        columns[index] = 1 + int(share)
    left = width - sum(columns)
    by_remainder = sorted(alive, key=lambda index: int(exact[index]) - exact[index])
    for index in by_remainder[:left]:
        columns[index] += 1
    return columns

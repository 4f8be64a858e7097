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

from engine_hooks.protocol.clock import NS_PER_S
from tracer.tui.toolkit import figures

SPANS: Final = tuple(
    int(seconds * NS_PER_S)
    for seconds in (
        0.001,
        0.002,
        0.004,
        0.01,
        0.02,
        0.04,
        0.1,
        0.2,
        0.4,
        0.6,
        0.8,
        1,
        1.6,
        2,
        3,
        4,
        5,
        6,
        8,
        10,
        12,
        16,
        20,
        24,
        30,
        40,
        60,
        80,
        100,
        120,
        160,
        200,
        240,
        300,
        400,
        600,
        800,
        1200,
        1800,
        2400,
        3600,
        7200,
        14400,
        43200,
        86400,
        604800,
    )
)
"""Lengths of a page in ns, one of which is always used."""

SHORTEST: Final = 4 * NS_PER_S
"""The shortest page chosen without being asked: a shorter one would jump, and redraw everything,
too often."""

JUMP: Final = 4
"""The page moves on by this part of itself."""


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
        """Move the page so that it holds `latest`, and choose its length so that it reaches back to
        `earliest`.

        Grows as soon as it must, shrinks only when little more than half of it would do, so that it
        does not flap.
        """
        span = self.span
        if self.zoom is not None:
            span = SPANS[self.zoom]
        else:
            reach = max(latest - earliest, 1)
            room = self._history(span)
            if not self.version or reach > room or reach < room * 6 // 10 or span < shortest:
                span = next(
                    (s for s in SPANS if s >= shortest and self._history(s) >= reach), SPANS[-1]
                )
        jump = span // JUMP
        begin = latest // jump * jump - span + jump
        moved = span != self.span or not self.begin <= latest < self.begin + self.span
        if moved and (begin, span) != (self.begin, self.span):
            self.begin, self.span = begin, span
            self.version += 1

    @staticmethod
    def _history(span: int) -> int:
        """What is surely visible before the latest instant, wherever in the last quarter it
        falls."""
        return span - span // JUMP

    def zoom_by(self, steps: int) -> None:
        """Longer (+) or shorter (-) pages, by hand from now on."""
        index = SPANS.index(self.span) if self.zoom is None else self.zoom
        self.zoom = max(0, min(len(SPANS) - 1, index + steps))

    def fit_again(self) -> None:
        """Back to pages that fit what is shown."""
        self.zoom = None

    def column(self, t: int, width: int) -> int:
        """The column of an instant; outside 0 … width-1 when it is off the page."""
        return (t - self.begin) * width // self.span

    def ticks(self, width: int, origin: int, spacing: int = 10) -> list[Tick]:
        """Marks at round times counted from `origin`, at least `spacing` columns apart."""
        if width < 4:
            return []
        least = self.span * spacing // width
        step = next((s for s in _STEPS if s >= least), _STEPS[-1])
        first = -(-(self.begin - origin) // step) * step
        ticks: list[Tick] = []
        for t in range(first, self.begin - origin + self.span, step):
            if t < 0:
                continue
            ticks.append(Tick((t + origin - self.begin) * width // self.span, tick_label(t, step)))
        return ticks


_STEPS: Final = tuple(
    int(seconds * NS_PER_S)
    for seconds in (
        0.0001,
        0.0002,
        0.0005,
        0.001,
        0.002,
        0.005,
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        21600,
        86400,
    )
)


def tick_label(t: int, step: int) -> str:
    """Time since the start of the trace, with the digits that a step of `step` ns needs."""
    text = figures.instant(t)
    if step >= NS_PER_S:
        return text
    digits = next(d for d in range(1, 10) if step * 10**d % NS_PER_S == 0)
    return f"{text}.{t % NS_PER_S * 10**digits // NS_PER_S:0{digits}d}"


def elastic_widths(durations: Sequence[float], width: int) -> list[int]:
    """Columns for consecutive intervals so that the shortest is seen and the longest still looks
    longest.

    `durations` in ms. Half of the columns go by log(1 + duration / 10 µs), half by duration; each
    interval of any length gets at least one; they sum to `width` exactly. Used where 0.1 ms and
    1,800 ms share a line.
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
    exact = [(durations[index] / whole + logs[index] / whole_log) / 2 * spare for index in alive]
    for index, share in zip(alive, exact, strict=True):
        columns[index] = 1 + int(share)
    left = width - sum(columns)
    for index, _ in sorted(zip(alive, exact, strict=True), key=lambda pair: int(pair[1]) - pair[1])[
        :left
    ]:
        columns[index] += 1
    return columns

"""The nine numbers: four timers with p50, p95 and p99, and five gauges. Their columns never move
with their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tracer.format import figures
from tracer.state.metrics.histogram import Quantiles
from tracer.state.view import Snapshot
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look

TIMERS = ("queue", "prefill", "ttft", "itl")
COLUMNS_FROM = 112
"""Cells from which quantiles have columns of their own."""


class Gauge(NamedTuple):
    """A figure of now with its name, and a short name for narrow screens."""

    name: str
    short: str
    value: str


class NumbersStrip(Canvas):
    """Two rows (names, values), or one where the screen is low."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="numbers")
        self.add_class("tile")
        self.snapshot: Snapshot | None = None

    def show(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        if height < 2:
            return [self._one_row(width)]
        columns = width >= COLUMNS_FROM
        return self._columns(width) if columns else self._slashes(width)

    def _quantiles(self) -> list[tuple[str, Quantiles]]:
        timers = self.snapshot.timers if self.snapshot else {}
        return [(name.upper(), timers.get(name, Quantiles())) for name in TIMERS]

    def _columns(self, width: int) -> list[Row]:
        look = self.look
        cells = 8 if width >= 170 else 7 if width >= 140 else 6
        names, values = Line(width).add(" ", look.text), Line(width).add(" ", look.text)
        for name, quantiles in self._quantiles():
            unit, texts = in_one_unit(quantiles, lambda texts: max(map(len, texts)) < cells)
            first = max(cells, len(name) + 4)
            names.add(f"{name} {unit}".ljust(first), look.accent)
            names.add("p95".ljust(cells) + "p99".ljust(cells + 1), look.dim)
            values.add(texts[0].ljust(first), look.bold)
            values.add(texts[1].ljust(cells) + texts[2].ljust(cells + 1), look.text)
        gauges = gauges_of(self.snapshot)
        spare = width - names.used - 1 - sum(len(gauge.name) + 2 for gauge in gauges)
        for gauge in gauges:
            if spare >= 0:
                name, slot = gauge.name, len(gauge.name) + 2 + min(4, spare // len(gauges))
            else:
                name, slot = gauge.short, max(6, len(gauge.value) + 1 if "/" in gauge.value else 0)
            names.add(name.ljust(slot)[:slot], look.accent)
            values.add(gauge.value.ljust(slot)[:slot], look.bold)
        return [names.end(look.text), values.end(look.text)]

    def _slashes(self, width: int) -> list[Row]:
        look = self.look
        names, values = Line(width).add(" ", look.text), Line(width).add(" ", look.text)
        gauges = [
            (gauge, 1 + max(len(gauge.short), 5 if gauge.short == "KV" else 3))
            for gauge in gauges_of(self.snapshot)
        ]
        room = width - 1 - sum(cells for _, cells in gauges)
        slot = max(8, min(20, room // len(TIMERS)))
        for name, quantiles in self._quantiles():
            before = values.used
            unit = self._triple(values, quantiles, slot - 1)
            names.add(f"{name} {unit}".ljust(slot)[:slot], look.accent)
            values.fill_to(before + slot, look.text)
        for gauge, cells in gauges:
            names.add(gauge.short.ljust(cells), look.accent)
            values.add(gauge.value.partition("/")[0].ljust(cells)[:cells], look.bold)
        return [names.end(look.text), values.end(look.text)]

    def _triple(self, line: Line, quantiles: Quantiles, room: int) -> str:
        """Put p50/p95/p99 into `room` cells and return their unit."""
        look = self.look
        unit, (p50, p95, p99) = in_one_unit(quantiles, lambda texts: len("/".join(texts)) <= room)
        line.add(p50, look.bold)
        for text in (p95, p99):
            line.add("/", look.dim).add(text, look.text)
        return unit

    def _one_row(self, width: int) -> Row:
        look = self.look
        line = Line(width)
        queue, prefill, ttft, itl = self._quantiles()
        for name, quantiles in (ttft, itl, queue, prefill):
            line.add(f" {name} ", look.accent)
            line.add(f" {self._triple(line, quantiles, 14)}", look.dim)
        for gauge in gauges_of(self.snapshot):
            line.add(f" {gauge.short} ", look.accent).add(gauge.value, look.bold)
        return line.end(look.text)


def in_one_unit(quantiles: Quantiles, fits: Callable[[list[str]], bool]) -> tuple[str, list[str]]:
    """Return ``ms`` or ``s`` and p50, p95, p99 in that unit, with as many digits as fit."""
    known = (quantiles.p50, quantiles.p95, quantiles.p99)
    seconds = [None if ms is None else ms / 1000 for ms in known]
    texts: list[str] = []
    for unit, values in (("ms", known), ("s", seconds)):
        for written in (figures.milliseconds, _two_digits):
            texts = [written(value) for value in values]
            if fits(texts):
                return unit, texts
    return "s", texts


def _two_digits(value: float | None) -> str:
    """Return two digits below ten, a whole number above."""
    if value is None or value >= 9.95:
        return figures.count(value)
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def gauges_of(snapshot: Snapshot | None) -> list[Gauge]:
    """Return the five gauges, summed over the engines that report them."""
    engines = engines_of(snapshot) if snapshot else []
    blocks = [
        (e.used + e.cached, e.num_blocks)
        for e in engines
        if e.num_blocks and e.used is not None and e.cached is not None
    ]
    kv = sum(held for held, _ in blocks) / sum(total for _, total in blocks) if blocks else None
    slots = sum(e.max_batch or 0 for e in engines)
    batch = f"{sum(e.batch for e in engines)}" + (f"/{slots}" if slots else "")

    def total(values: list[int]) -> str:
        return figures.count(sum(values)) if engines else figures.UNKNOWN

    out = snapshot.context.tokens_out if snapshot and engines else None
    return [
        Gauge("OUT tok/s", "tok/s", figures.short_count(out)),
        Gauge("KV CACHE", "KV", figures.percentage(kv)),
        Gauge("WAITING", "Q", total([e.waiting for e in engines])),
        Gauge("BATCH", "B", batch if engines else figures.UNKNOWN),
        Gauge("PREEMPTED", "P", total([e.preempted for e in engines])),
    ]

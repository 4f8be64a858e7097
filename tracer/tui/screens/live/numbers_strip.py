"""The nine numbers: four timers with p50, p95 and p99, and five gauges. Their columns never move
with their values."""

from __future__ import annotations

from tracer.state.metrics.histogram import Quantiles
from tracer.state.view import Snapshot
from tracer.tui.screens.context_strip import engines_of
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look

TIMERS = (("QUEUE", "queue"), ("PREFILL", "prefill"), ("TTFT", "ttft"), ("ITL", "itl"))


class NumbersStrip(Canvas):
    """Two rows (names, values), or one where the screen is low."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="numbers")
        self.add_class("tile")
        self.snapshot: Snapshot | None = None

    def show(self, snapshot: Snapshot | None) -> None:
        """Draw the timers and gauges of a snapshot."""
        self.snapshot = snapshot
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        """Names above values; the widest form that fits."""
        timers = self.snapshot.timers if self.snapshot else {}
        gauges = gauges_of(self.snapshot)
        if height < 2:
            return [self._one_row(width, timers, gauges)]
        if width >= 112:
            return self._columns(
                width, timers, gauges, 8 if width >= 170 else 7 if width >= 140 else 6
            )
        return self._slashes(width, timers, gauges)

    def _columns(
        self,
        width: int,
        timers: dict[str, Quantiles],
        gauges: list[tuple[str, str, str]],
        cells: int,
    ) -> list[Row]:
        look = self.look
        names, values = Line(width).put(" ", look.text), Line(width).put(" ", look.text)
        for label, key in TIMERS:
            quantiles = timers.get(key, Quantiles())
            first = max(cells, len(label) + 4)
            names.put(f"{label} ms".ljust(first), look.accent)
            names.put("p95".ljust(cells), look.dim).put("p99".ljust(cells + 1), look.dim)
            values.put(_short_ms(quantiles.p50).ljust(first), look.bold)
            values.put(_short_ms(quantiles.p95).ljust(cells), look.text)
            values.put(_short_ms(quantiles.p99).ljust(cells + 1), look.text)
        room = max(0, width - names.used - 1)
        long = room >= sum(len(name) + 2 for name, _, _ in gauges)
        spare = (
            max(0, room - sum(len(name) + 2 for name, _, _ in gauges)) // len(gauges) if long else 0
        )
        for name, value, short in gauges:
            slot = (
                len(name) + 2 + min(4, spare)
                if long
                else max(6, len(value) + 1 if "/" in value else 0)
            )
            names.put((name if long else short).ljust(slot)[:slot], look.accent)
            values.put(value.ljust(slot)[:slot], look.bold)
        return [names.end(look.text), values.end(look.text)]

    def _slashes(
        self, width: int, timers: dict[str, Quantiles], gauges: list[tuple[str, str, str]]
    ) -> list[Row]:
        look = self.look
        names, values = Line(width).put(" ", look.text), Line(width).put(" ", look.text)
        cells = [max(len(short), 3) + 1 for _, _, short in gauges]
        slot = max(8, min(20, (width - 1 - sum(cells)) // len(TIMERS)))
        for label, key in TIMERS:
            names.put(f"{label} ms".ljust(slot)[:slot], look.accent)
            before = values.used
            self._triple(values, timers.get(key, Quantiles()), slot - 1)
            values.fill_to(before + slot, look.text)
        for (_, value, short), room in zip(gauges, cells, strict=True):
            names.put(short.ljust(room), look.accent)
            values.put(value.partition("/")[0].ljust(room)[:room], look.bold)
        return [names.end(look.text), values.end(look.text)]

    def _triple(self, line: Line, quantiles: Quantiles, room: int) -> None:
        """p50/p95/p99 in `room` cells, with as many digits as fit."""
        look = self.look
        known = (quantiles.p50, quantiles.p95, quantiles.p99)
        texts = [_short_ms(value) for value in known]
        if sum(map(len, texts)) + 2 > room:
            texts = [_seconds(value, 1) for value in known]
            if all(text.endswith("s") for text in texts):
                # one unit for all three
                texts = [text.removesuffix("s") for text in texts[:2]] + texts[2:]
        if sum(map(len, texts)) + 2 > room:
            texts = [_seconds(value, 0) for value in known]
        for index, text in enumerate(texts):
            if index:
                line.put("/", look.dim)
            line.put(text, look.text if index else look.bold)

    def _one_row(
        self, width: int, timers: dict[str, Quantiles], gauges: list[tuple[str, str, str]]
    ) -> Row:
        look = self.look
        line = Line(width)
        for label, key in (
            ("TTFT", "ttft"),
            ("ITL", "itl"),
            ("QUEUE", "queue"),
            ("PREFILL", "prefill"),
        ):
            line.put(f" {label} ", look.accent)
            self._triple(line, timers.get(key, Quantiles()), 14)
        for _, value, short in gauges:
            line.put(f" {short} ", look.accent).put(value.split(" ")[0], look.bold)
        return line.end(look.text)


def _short_ms(ms: float | None) -> str:
    """At most five characters."""
    if ms is None:
        return figures.UNKNOWN
    if ms < 9.95:
        return f"{ms:.1f}" if ms >= 0.95 else f"{ms:.2f}"
    if ms < 9999.5:
        return f"{ms:.0f}"
    seconds = ms / 1000
    return (
        f"{seconds:.1f}s"
        if seconds < 99.95
        else f"{seconds:.0f}s"
        if seconds < 9999.5
        else f"{seconds / 3600:.0f}h"
    )


def _seconds(ms: float | None, digits: int) -> str:
    """Like `_short_ms`, but in seconds from 1,000 ms on, with `digits` decimals below ten."""
    if ms is None or ms < 999.5:
        return _short_ms(ms)
    seconds = ms / 1000
    if seconds >= 999.5:
        return f"{seconds / 60:.0f}m"
    return f"{seconds:.{digits if seconds < 9.95 else 0}f}s"


def gauges_of(snapshot: Snapshot | None) -> list[tuple[str, str, str]]:
    """(name, value, short name) of the five gauges, summed over the engines that tell them."""
    engines = engines_of(snapshot) if snapshot else []
    blocks = [
        (e.used + e.cached, e.num_blocks)
        for e in engines
        if e.num_blocks and e.used is not None and e.cached is not None
    ]
    kv = sum(held for held, _ in blocks) / sum(total for _, total in blocks) if blocks else None
    slots = sum(e.max_batch or 0 for e in engines)
    batch = sum(e.batch for e in engines)
    out = snapshot.context.tokens_out if snapshot and engines else None
    return [
        ("OUT tok/s", figures.short_count(out), "tok/s"),
        ("KV CACHE", f"{figures.percent(kv)}%" if kv is not None else figures.UNKNOWN, "KV"),
        (
            "WAITING",
            figures.count(sum(e.waiting for e in engines)) if engines else figures.UNKNOWN,
            "Q",
        ),
        (
            "BATCH",
            (f"{batch}/{slots}" if slots else f"{batch}") if engines else figures.UNKNOWN,
            "B",
        ),
        (
            "PREEMPTED",
            figures.count(sum(e.preempted for e in engines)) if engines else figures.UNKNOWN,
            "P",
        ),
    ]

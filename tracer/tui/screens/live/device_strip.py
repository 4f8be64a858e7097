"""The device in one row: what it is, how busy, how near to its peaks, and what holds it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich.segment import Segment
from rich.style import Style

from tracer.format import figures
from tracer.format.text import cell_width
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.monitor.hardware.gauge import Reading

WORTH_A_WARNING: Final = 0.01
"""Share of the time in which a control group may be throttled unremarked."""
BAR: Final = 10
"""Cells of a bar."""


class DeviceStrip(Canvas):
    """One row; the screen gives it none while nothing is `known`."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="device")
        self.add_class("tile")
        self.reading: Reading | None = None

    @property
    def known(self) -> bool:
        return self.reading is not None

    def show(self, reading: Reading | None) -> bool:
        """Draw a reading; True when the strip comes or goes."""
        before = self.known
        if reading != self.reading:
            self.reading = reading
            self.repaint()
        return before != self.known

    def paint(self, width: int, height: int) -> list[Row]:
        """Draw what matters most first; items that have no room are left out."""
        look = self.look
        line = Line(width).add(" ", look.text)
        for item in self._items(self.reading, width) if self.reading is not None else ():
            cells = sum(cell_width(segment.text) for segment in item)
            gap = 3 if line.used > 1 else 0
            if gap + cells < line.room:
                line.add(" " * gap, look.text).add_segments(item, cells)
        return [line.end(look.text)]

    def _items(self, reading: Reading, width: int) -> list[list[Segment]]:
        look, gpus, done = self.look, reading.gpus, reading.achieved
        items = [[Segment(self._device(reading)[: width // 4], look.accent)]]
        items += self._pairs(look.warn, [("throttled", _throttled(reading))])
        if done is not None:
            wide = width >= 120
            items += self._pairs(look.bold, [("busy", figures.percentage(done.busy))])
            flops, moved = f"{magnitude(done.flops)}FLOP/s", f"{magnitude(done.bytes)}B/s"
            items.append(self._rate("compute", flops, reading.flops_share, wide))
            items.append(self._rate("memory", moved, reading.bytes_share, wide))
        slowed = dict.fromkeys(word for gpu in gpus for word in gpu.slowed)
        items += self._pairs(look.warn, [("slowed by", ", ".join(slowed))])
        clocks = [(gpu.clock, gpu.clock_most) for gpu in gpus if gpu.clock]
        clock, most = min(clocks, default=(None, None))  # of the slowest
        cores = "" if reading.cores is None else f"{reading.cores:.2f}"
        limit = reading.throttling.cores if reading.throttling is not None else None
        used = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
        held, power = _sum(gpu.memory_used for gpu in gpus), _sum(gpu.power for gpu in gpus)
        capacity = _sum(gpu.memory_total for gpu in gpus)
        told = [
            ("kernels", figures.percentage(sum(used) / len(used)) if used else ""),
            ("HBM", _of(held, capacity, figures.size)),
            ("power", _of(power, _sum(gpu.power_most for gpu in gpus), figures.count, " W")),
            ("clock", _of(clock, most, figures.count, " MHz")),
            ("cores", cores if limit is None else f"{cores} of {figures.rate(limit)}"),
            ("RSS", "" if reading.rss is None else figures.size(reading.rss)),
        ]
        return items + self._pairs(look.bold, told)

    def _device(self, reading: Reading) -> str:
        gpus = reading.gpus
        name = gpus[0].name if gpus else ""
        several = f" {self.look.glyphs.times}{len(gpus)}" if len(gpus) > 1 else ""
        return (label(name or reading.device) or "device") + several

    def _pairs(self, style: Style, told: Sequence[tuple[str, str]]) -> list[list[Segment]]:
        name_style = self.look.dim
        return [
            [Segment(f"{name} ", name_style), Segment(value, style)]
            for name, value in told
            if value
        ]

    def _rate(self, name: str, value: str, share: float | None, wide: bool) -> list[Segment]:
        """Draw a rate with its share of the peak, as a bar where there is room."""
        look = self.look
        told = [Segment(f"{name} ", look.dim), Segment(value, look.bold)]
        if share is None:
            return told
        if wide:
            full = min(BAR, round(share * BAR))
            told.append(Segment(f" {look.glyphs.line * full}", look.accent))
            told.append(Segment(look.glyphs.track * (BAR - full), look.faint))
        return [*told, Segment(f" {figures.percentage(share)} of peak", look.text)]


def _throttled(reading: Reading) -> str:
    share = reading.throttling.share if reading.throttling is not None else None
    return "" if share is None or share < WORTH_A_WARNING else figures.percentage(share)


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _of(
    value: float | None, most: float | None, write: Callable[[float], str], unit: str = ""
) -> str:
    """Return ``612 of 700 W``; empty where the value is not known."""
    if value is None:
        return ""
    return write(value) + (f" of {write(most)}" if most else "") + unit


def magnitude(value: float) -> str:
    """Return three digits and a decimal prefix: ``12.3 G``, ``989 T``."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            digits = 0 if value >= 99.95 or not unit else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    return f"{value:,.0f} E"

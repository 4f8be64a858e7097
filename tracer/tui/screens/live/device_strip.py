"""The device in one row: what it is, how busy, how near to its peaks, and what holds it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.segment import Segment
from rich.style import Style

from tracer.format.text import cell_width
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.canvas import Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.monitor.hardware.gauge import Reading
    from tracer.monitor.hardware.nvml import Gpu

WORTH_A_WARNING: Final = 0.01
"""Share of the time in which a control group may be throttled unremarked."""
BAR: Final = 10
"""Cells of a bar."""


class DeviceStrip(Canvas):
    """One row. `known` says whether there is anything to show; the screen gives it no row when
    there is not."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="device")
        self.add_class("tile")
        self.reading: Reading | None = None

    @property
    def known(self) -> bool:
        """Whether anything is known of a device."""
        return self.reading is not None

    def show(self, reading: Reading | None) -> bool:
        """Take on a reading; True when the strip comes or goes."""
        before = self.known
        if reading != self.reading:
            self.reading = reading
            self.repaint()
        return before != self.known

    def paint(self, width: int, height: int) -> list[Row]:
        """The row: what matters most first; items that have no room are left out."""
        look = self.look
        line = Line(width).put(" ", look.text)
        reading = self.reading
        if reading is None:
            return [line.end(look.text)]
        items = self._items(reading, width)
        first = True
        for item in items:
            cells = sum(cell_width(segment.text) for segment in item)
            gap = 1 if first else 4
            if cells + gap - 1 > line.room - 1:
                continue
            if not first:
                line.put("   ", look.text)
            line.put_segments(item, cells)
            first = False
        return [line.end(look.text)]

    def _items(self, reading: Reading, width: int) -> list[list[Segment]]:
        look = self.look
        wide = width >= 120
        items: list[list[Segment]] = [[Segment(self._what(reading)[: width // 4], look.accent)]]
        done = reading.achieved
        if done is not None:
            items.append(self._pair("busy", f"{figures.percent(done.busy)} %"))
            items.append(self._rate("compute", done.flops, "FLOP/s", reading.flops_share, wide))
            items.append(self._rate("memory", done.bytes, "B/s", reading.bytes_share, wide))
        items += self._gpus(reading.gpus)
        if reading.cores is not None:
            limit = reading.throttling.cores if reading.throttling is not None else None
            of = f" of {figures.rate(limit)}" if limit is not None else ""
            items.append(self._pair("cores", f"{reading.cores:.2f}{of}"))
        share = reading.throttling.share if reading.throttling is not None else None
        if share is not None and share >= WORTH_A_WARNING:
            items.insert(1, self._pair("throttled", f"{figures.percent(share)} %", look.warn))
        if reading.rss is not None:
            items.append(self._pair("RSS", figures.size(reading.rss)))
        return items

    def _what(self, reading: Reading) -> str:
        if reading.gpus:
            count = len(reading.gpus)
            several = f" {self.look.glyphs.times}{count}" if count > 1 else ""
            return label(reading.gpus[0].name or reading.device) + several
        return label(reading.device) or "device"

    def _pair(self, name: str, value: str, style: Style | None = None) -> list[Segment]:
        look = self.look
        return [Segment(f"{name} ", look.dim), Segment(value, style or look.bold)]

    def _rate(
        self, name: str, value: float, unit: str, share: float | None, wide: bool
    ) -> list[Segment]:
        """A rate with its share of the peak, as a bar where there is room."""
        look = self.look
        told = [Segment(f"{name} ", look.dim), Segment(f"{magnitude(value)}{unit}", look.bold)]
        if share is None:
            return told
        if wide:
            full = min(BAR, round(share * BAR))
            told += [
                Segment(" ", look.text), Segment(look.glyphs.line * full, look.accent),
                Segment(look.glyphs.track * (BAR - full), look.faint),
            ]  # fmt: skip
        return [*told, Segment(f" {figures.percent(share)} % of peak", look.text)]

    def _gpus(self, gpus: tuple[Gpu, ...]) -> list[list[Segment]]:
        look = self.look
        items: list[list[Segment]] = []
        used = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
        if used:
            items.append(self._pair("kernels", f"{figures.percent(sum(used) / len(used))} %"))
        held = [gpu for gpu in gpus if gpu.memory_used is not None and gpu.memory_total]
        if held:
            total = sum(gpu.memory_total or 0 for gpu in held)
            items.append(
                self._pair(
                    "HBM",
                    f"{figures.size(sum(gpu.memory_used or 0 for gpu in held))} of "
                    f"{figures.size(total)}",
                )
            )
        power = [gpu for gpu in gpus if gpu.power is not None]
        if power:
            most = sum(gpu.power_most or 0.0 for gpu in power)
            of = f" of {most:,.0f}" if most else ""
            items.append(
                self._pair("power", f"{sum(gpu.power or 0.0 for gpu in power):,.0f}{of} W")
            )
        clocks = [gpu for gpu in gpus if gpu.clock is not None]
        if clocks:
            slowest = min(clocks, key=lambda gpu: gpu.clock or 0)
            limit = f" of {slowest.clock_most:,}" if slowest.clock_most else ""
            items.append(self._pair("clock", f"{slowest.clock:,}{limit} MHz"))
        slowed = dict.fromkeys(word for gpu in gpus for word in gpu.slowed)
        if slowed:
            items.insert(0, self._pair("slowed by", ", ".join(slowed), look.warn))
        return items


def magnitude(value: float) -> str:
    """Three digits and a decimal prefix: ``12.3 G``, ``989 T``."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            digits = 0 if value >= 99.95 or not unit else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    return f"{value:,.0f} E"

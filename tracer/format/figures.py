"""Numbers as text: one rounding, one sign for what is not known, the same widths everywhere.

`None` and what is not finite are *not known*: a dash, never zero.
"""

from __future__ import annotations

import math
from typing import Final

UNKNOWN: Final = "–"


def milliseconds(ms: float | None, *, fine: bool = False) -> str:
    """Three digits below 100 ms, whole with separators above: ``0.12``, ``8.41``, ``86.2``,
    ``1,883``. `fine` adds a third decimal below 0.1 ms."""
    if ms is None or not math.isfinite(ms):
        return UNKNOWN
    size = abs(ms)
    if size >= 99.95:
        return f"{ms:,.0f}"
    if size >= 9.995:
        return f"{ms:.1f}"
    return f"{ms:.3f}" if fine and 0 < size < 0.0995 else f"{ms:.2f}"


def signed_milliseconds(ms: float | None) -> str:
    """Fine milliseconds with their sign, ``+0.086``; ``0`` for what would be written as zero."""
    if ms is None or not math.isfinite(ms):
        return UNKNOWN
    if abs(ms) < 0.0005:
        return "0"
    return ("+" if ms > 0 else "") + milliseconds(ms, fine=True)


def aligned_milliseconds(ms: float | None, cells: int) -> str:
    """Milliseconds in `cells` columns with the decimal point always in the same column."""
    if ms is None:
        return (UNKNOWN + "   ").rjust(cells)
    whole, point, fraction = milliseconds(ms).partition(".")
    return (whole + (point + fraction).ljust(3)).rjust(cells)[-cells:] if cells > 0 else ""


def clock(ms: float | None, cells: int) -> str:
    """A running clock in whole milliseconds, right-aligned in `cells`; seconds or hours once it
    would not fit."""
    if ms is None:
        return UNKNOWN.rjust(cells)
    text = f"{ms:,.0f}"
    if len(text) > cells:
        seconds = ms / 1000
        text = f"{seconds:,.0f}s" if seconds < 36000 else f"{seconds / 3600:,.0f}h"
    return text.rjust(cells)[-cells:] if cells > 0 else ""


def duration(ms: float | None) -> str:
    """A length of time with its unit, for sentences: ``8.41 ms``, ``12.3 s``, ``5 min 39 s``,
    ``2 h 3 min``."""
    if ms is None or not math.isfinite(ms):
        return UNKNOWN
    if abs(ms) < 999.5:
        return f"{milliseconds(ms)} ms"
    if abs(ms) < 59_950:
        return f"{milliseconds(ms / 1000)} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def instant(ns: int) -> str:
    """Trace time as ``m:ss`` or ``h:mm:ss``; tenths are added where a tick needs them."""
    sign = "-" if ns < 0 else ""
    seconds = abs(ns) // 1_000_000_000
    if seconds >= 3600:
        return f"{sign}{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{sign}{seconds // 60}:{seconds % 60:02d}"


def span(seconds: float) -> str:
    """The length of a window: ``10 s``, ``1 min``, ``2 h``; ``all`` for one without end."""
    if seconds == float("inf"):
        return "all"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"


def count(value: float | None) -> str:
    """A whole number with separators."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.0f}"


def short_count(value: float | None) -> str:
    """At most five characters: ``812``, ``9,999``, ``12.3k``, ``4.1M``."""
    if value is None:
        return UNKNOWN
    if value < 9_999.5:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
    return "huge"


def significant(value: float | None) -> str:
    """Three significant digits, all digits before the point: ``0.243``, ``12.3``, ``1,234``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(value: float | None) -> str:
    """Bytes in binary units: ``512 B``, ``9.00 KiB``, ``128 KiB``, ``1.24 GiB``."""
    if value is None:
        return UNKNOWN
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.5:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{value:,.0f} TiB"


def rate(value: float | None) -> str:
    """A rate: two decimals below 1, one below 100."""
    if value is None:
        return UNKNOWN
    if 0 < value < 0.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """A share of 0 to 1 in per cent: ``<0.1``, ``0.4``, ``12``, ``100``, without the sign."""
    if share is None:
        return UNKNOWN
    value = share * 100
    if 0 < value < 0.1:
        return "<0.1"
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:.0f}"


def percentage(share: float | None) -> str:
    """A share of 0 to 1 with its sign: ``12 %``."""
    return UNKNOWN if share is None else f"{percent(share)} %"


def change(relative: float | None) -> str:
    """A relative change: ``+9.5 %``, and a factor where that says more: ``×12``."""
    if relative is None or not math.isfinite(relative):
        return UNKNOWN
    return f"{relative * 100:+.1f} %" if relative < 9.995 else f"×{relative + 1:,.0f}"


def factor(value: float) -> str:
    """``×1.5``, ``×12``, and ``>×1,000``."""
    if value >= 1000:
        return ">×1,000"
    return f"×{value:.1f}" if value < 10 else f"×{value:.0f}"


def fitting(cells: int, *texts: str) -> str:
    """The first of `texts`, longest first, that fits into `cells`; the last one when none does."""
    return next((text for text in texts if len(text) <= cells), texts[-1])

"""Numbers as text: fixed rules, so that columns align and a figure never changes its width class by
surprise.

`None` is *not known* and is always written as a dash, never as zero.
"""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "-"


def milliseconds(ms: float | None) -> str:
    """Three significant digits below 100 ms, whole with separators above: ``0.12``, ``8.41``,
    ``86.2``, ``1,883``."""
    if ms is None:
        return UNKNOWN
    if ms < 0:
        return "-" + milliseconds(-ms)
    if ms < 9.995:
        return f"{ms:.2f}"
    if ms < 99.95:
        return f"{ms:.1f}"
    return f"{ms:,.0f}"


def aligned_milliseconds(ms: float | None, cells: int) -> str:
    """Milliseconds in `cells` columns with the decimal point always in the same column."""
    if ms is None:
        return (UNKNOWN + "   ").rjust(cells)
    text = milliseconds(ms)
    whole, point, fraction = text.partition(".")
    return (whole + (point + fraction).ljust(3)).rjust(cells)[-cells:] if cells > 0 else ""


def clock(ms: float | None, cells: int) -> str:
    """A running clock in whole milliseconds, right-aligned in `cells`; minutes once it would not
    fit."""
    if ms is None:
        return UNKNOWN.rjust(cells)
    text = f"{ms:,.0f}"
    if len(text) > cells:
        seconds = ms / 1000
        text = f"{seconds:,.0f}s" if seconds < 36000 else f"{seconds / 3600:,.0f}h"
    return text.rjust(cells)[-cells:] if cells > 0 else ""


def count(value: float | None) -> str:
    """A whole number with separators."""
    return UNKNOWN if value is None else f"{value:,.0f}"


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


def size(value: float | None) -> str:
    """Bytes in binary units: ``512 B``, ``9.0 KiB``, ``128 KiB``, ``0.24 GiB``."""
    if value is None:
        return UNKNOWN
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 9.995:
            return f"{value:.2f} {unit}"
        if value < 99.95:
            return f"{value:.1f} {unit}"
        if value < 1023.5:
            return f"{value:.0f} {unit}"
    return f"{value:,.0f} TiB"


def rate(value: float | None) -> str:
    """A rate: one decimal below 100."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """A share of 0 to 1 in per cent: ``<0.1``, ``0.4``, ``12``, ``100``, without the sign."""
    if share is None:
        return UNKNOWN
    value = share * 100
    if 0 < value < 0.1:
        return "<0.1"
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:.0f}"


def instant(ns: int) -> str:
    """Trace time as ``m:ss`` or ``h:mm:ss``; tenths are added where a tick needs them."""
    sign = "-" if ns < 0 else ""
    seconds = abs(ns) // 1_000_000_000
    if seconds >= 3600:
        return f"{sign}{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{sign}{seconds // 60}:{seconds % 60:02d}"


def span(seconds: float) -> str:
    """A stretch of time in words fit for a strip: ``10 s``, ``1 min``, ``2 h``; ``all`` for one
    without end."""
    if seconds == float("inf"):
        return "all"
    if seconds >= 3600 and seconds % 3600 == 0:
        return f"{seconds / 3600:.0f} h"
    if seconds >= 60 and seconds % 60 == 0:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:g} s"


def fitting(cells: int, *texts: str) -> str:
    """The first of `texts`, longest first, that fits into so many cells; the last one when none
    does."""
    return next((text for text in texts if len(text) <= cells), texts[-1])

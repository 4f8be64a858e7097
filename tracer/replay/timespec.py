"""Places in a trace as a user types them: ``90``, ``1:30``, ``+10``, ``50%``."""

from __future__ import annotations

import math
import re
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from tracer.recording.trace_file import TraceFile

_NUMBER: Final = re.compile(r"\d{1,12}(\.\d{0,9})?")


class PlaceError(ValueError):
    """This is no time. The message is one line fit for a user."""


def instant(text: str, trace: TraceFile, now: int | None = None) -> int:
    """The instant (ns of the trace's clock) that `text` means: seconds, minutes:seconds or h:m:s
    since the begin, a share in percent, or, with a sign, so much before or after `now`. It lies
    within the trace. Raises PlaceError."""
    plain = text.strip()
    sign = {"+": 1, "-": -1}.get(plain[:1], 0)
    if plain.endswith("%") and not sign:
        share = _number(plain[:-1], text) / 100
        t = trace.begin + int((trace.end - trace.begin) * min(share, 1.0))
    else:
        seconds = 0.0
        for part in plain[abs(sign) :].split(":"):
            seconds = seconds * 60 + _number(part, text)
        if not math.isfinite(seconds) or (sign and now is None):
            raise PlaceError(f"{text!r} is no time: use 90, 1:30 or 50%")
        ns = int(min(seconds, 1e9) * NS_PER_S)
        t = trace.begin + ns if not sign or now is None else now + sign * ns
    return min(max(t, trace.begin), trace.end)


def _number(part: str, text: str) -> float:
    if not _NUMBER.fullmatch(part):
        raise PlaceError(f"{text!r} is no time: use 90, 1:30 or 50%")
    return float(part)


def clock_of(ns: int) -> str:
    """A length of time as a player shows it: ``0:07.3``, ``12:05``, ``1:02:05``."""
    tenths = max(0, ns) * 10 // NS_PER_S
    seconds, tenth = divmod(tenths, 10)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}.{tenth}"

"""Service-level objectives: what a user wants a request's latencies to stay within, as
``ttft=500ms,itl=50ms``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

TARGETS: Final = ("queue", "prefill", "ttft", "itl", "tpot", "e2e")
"""Latencies that can have one; `docs/numbers.md` says what each is."""
_UNITS: Final = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 60e3, "h": 3600e3, "": 1.0}
_FORM: Final = re.compile(r"\s*([a-z0-9_]+)\s*(?:=|<=|:)\s*([0-9.eE+-]+?)\s*([a-zµ]*)\s*")


class SloError(ValueError):
    """What is wrong with a target, in a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in ms by latency; one that is not set is no condition. A request attains them when it
    is within all."""

    targets: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.targets)

    def __str__(self) -> str:
        return ",".join(f"{name}={_length(ms)}" for name, ms in self.targets)


NO_TARGETS: Final = Slo()


def parse(text: str) -> Slo:
    """The targets that `text` names, in the order of `TARGETS`; none for an empty text. Raises
    SloError."""
    found: dict[str, float] = {}
    for part in filter(str.strip, text.split(",")):
        match = _FORM.fullmatch(part)
        if match is None:
            raise SloError(f"{part.strip()!r} is no target: write for example ttft=500ms,itl=50ms")
        name, number, unit = match.groups()
        if name not in TARGETS:
            raise SloError(f"there is no latency {name!r}: targets are for {', '.join(TARGETS)}")
        if name in found:
            raise SloError(f"two targets for {name}")
        try:
            ms = float(number) * _UNITS[unit]
        except (ValueError, KeyError):
            raise SloError(f"{number + unit!r} is no time: write 50ms or 0.5s") from None
        if not 0 < ms < math.inf:
            raise SloError(f"a target above 0 is needed for {name}")
        found[name] = ms
    return Slo(tuple((name, found[name]) for name in TARGETS if name in found))


def _length(ms: float) -> str:
    return f"{ms / 1000:g}s" if ms >= 1000 else f"{ms:g}ms"

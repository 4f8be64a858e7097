"""Clocks: the only place that reads one.

Events are stamped with `now()`, the host's monotonic clock in nanoseconds, which all processes of a
Linux host share. One `ClockAnchor` a process ties that clock to wall time; times of different hosts
are only compared after the offset between their anchors was estimated. Never subtract times of
different clocks.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Final

import msgspec

now: Final = time.monotonic_ns
"""Monotonic time in ns: the stamp of every event."""

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


class ClockAnchor(msgspec.Struct, frozen=True, array_like=True):
    """One instant on two clocks: `monotonic` ns and `wall` ns since the Unix epoch."""

    monotonic: int
    wall: int

    @classmethod
    def read(cls) -> ClockAnchor:
        """Read both clocks, the monotonic one on either side of the wall clock so that the middle
        is used."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        return cls((before + after) // 2, wall)

    def to_wall(self, monotonic: int) -> int:
        """Wall time in ns since the epoch of a monotonic stamp of the same host."""
        return self.wall + (monotonic - self.monotonic)


@functools.cache
def boot_id() -> str:
    """Which boot of which kernel the monotonic clock belongs to; empty where the system does not
    tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""

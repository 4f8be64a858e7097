"""Limits of a process's control groups: cores, and the time for which they were throttled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S

PROC: Final = Path("/proc")
MOUNT: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Throttling:
    """`cores`: how many the process may use, None without a limit. `share` of the wall time since
    the sample before in which a group of it was throttled, 0-1; None before there are two samples.
    `total_s` throttled so far."""

    cores: float | None = None
    share: float | None = None
    total_s: float | None = None


class CgroupWatch:
    """The control groups of one process. `proc` and `mount`: where the kernel shows them."""

    def __init__(self, pid: int, *, proc: Path = PROC, mount: Path = MOUNT) -> None:
        self.pid = pid
        self._mount = mount
        self._folders = _folders(pid, proc, mount)
        self._before: tuple[int, float] | None = None

    def sample(self, now: int) -> Throttling | None:
        """Return the state at `now` (monotonic ns); None where there are no control groups."""
        seconds = [each for folder in self._folders if (each := _throttled_s(folder)) is not None]
        limits = [each for folder in self._folders if (each := _cores(folder)) is not None]
        throttled, cores = max(seconds, default=None), min(limits, default=None)
        if throttled is None and cores is None:
            return None
        share = None
        if throttled is not None:
            if self._before is not None and now > self._before[0]:
                passed = (now - self._before[0]) / NS_PER_S
                share = min(1.0, max(0.0, (throttled - self._before[1]) / passed))
            self._before = (now, throttled)
        return Throttling(cores, share, throttled)


def _folders(pid: int, proc: Path, mount: Path) -> list[Path]:
    """Return the folders of the process's CPU group and of those around it, innermost first
    (version 2, else version 1)."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root = mount
        elif "cpu" in controllers.split(","):
            names = (controllers, "cpu,cpuacct", "cpu")
            root = next((mount / name for name in names if (mount / name).is_dir()), mount)
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path is that of the host, and what is mounted is the group itself.
        while root in folder.parents and not folder.is_dir():
            folder = folder.parent
        found += [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return list(dict.fromkeys(found))


def _throttled_s(folder: Path) -> float | None:
    numbers = dict(line.split(" ", 1) for line in _lines(folder / "cpu.stat") if " " in line)
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
        if numbers.get(name, "").isdecimal():
            return int(numbers[name]) * unit
    return None


def _cores(folder: Path) -> float | None:
    """Return the limit of a group, which version 2 has in one file and version 1 in two."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    if not words:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [line for name in names for line in _lines(folder / name)[:1]]
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []

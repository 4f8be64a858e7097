"""How many objects of an engine live in a server's processes, asked from outside (see
`sitecustomize` beside this)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE_S = 60


def counting(folder: Path) -> dict[str, str]:
    """What a server's environment needs for it; counts go to `folder`."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TRACER_TEST_CENSUS": str(folder)}


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for known in found:
        for task in Path(f"/proc/{known}/task").glob("*"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def settled(pid: int, folder: Path) -> Counter[str]:
    """Class → how many of it live in a server's processes, once that no longer changes."""
    before = None
    deadline = time.monotonic() + DEADLINE_S
    while True:
        counts = _count(pid, folder)
        if counts == before:
            return counts
        assert time.monotonic() < deadline, f"objects come and go: {before} {counts}"
        before = counts
        time.sleep(0.2)


def left_behind(hooked: Counter[str], without: Counter[str], rounds: int) -> dict[str, int]:
    """Class → how many more of it live with the hooks than without, where it is one in five rounds
    or more.

    What lives once an engine may differ: the last step's objects are in the frames of functions
    that wait for the next one.
    """
    more = {name: count - without[name] for name, count in hooked.items()}
    return {name: count for name, count in more.items() if count >= rounds / 5}


def _count(pid: int, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for process in family(pid):
        # Not told by its environment: vLLM writes its processes' titles over theirs.
        if not _is_python(process):
            continue
        told = folder / f"{process}.json"
        told.unlink(missing_ok=True)
        os.kill(process, signal.SIGUSR2)
        deadline = time.monotonic() + DEADLINE_S
        while not told.exists():
            assert time.monotonic() < deadline, f"process {process} does not count"
            time.sleep(0.02)
        found.update(json.loads(told.read_text()))
    return found


def _is_python(pid: int) -> bool:
    """Whether it handles the signal: what is no Python of ours would die of it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False

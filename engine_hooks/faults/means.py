"""What faults are made of: a gate that opens them, a function that is replaced, work that takes its
time."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

CHUNK_S: Final = 0.020
SORT_S: Final = 0.150
STALL_S: Final = 1.5
STALL_EVERY_S: Final = 4.0
DECODE_S: Final = 0.0015
"""Seconds a token of the output so far."""

Around = Callable[..., Any]
"""``around(original, *args, **kwargs)``: what is called in place of a function."""


class Gate:
    """Closed until `after` seconds have passed since it was first asked; says on stderr when it
    opens."""

    def __init__(self, after: float) -> None:
        self.after = after
        self._first: float | None = None
        self._open = False
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        """Whether the fault has begun."""
        if self._open:
            return True
        now = time.monotonic()
        with self._lock:
            if self._first is None:
                self._first = now
            if self._open or now - self._first < self.after:
                return self._open
            self._open = True
        sys.stderr.write(f"tracer: the fault begins at {time.monotonic_ns()}\n")
        sys.stderr.flush()
        return True


def wrap(gate: Gate, module: str, owner: str, name: str, around: Around) -> None:
    """Replace a function or method by ``around(original, *args, **kwargs)``, once the gate is
    open."""
    place: Any = importlib.import_module(module)
    if owner:
        place = getattr(place, owner)
    original = getattr(place, name)

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if gate() else original(*args, **kwargs)

    setattr(place, name, faulty)


def busy(seconds: float, work: Callable[[], object]) -> None:
    """Work for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()


def stalling() -> Around:
    """A callback that blocks its thread now and then."""
    last = [time.monotonic()]

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() - last[0] > STALL_EVERY_S:
            time.sleep(STALL_S)
            last[0] = time.monotonic()
        return original(*args, **kwargs)

    return around


def doubled(text: Any) -> Any:
    """A rendered prompt with its first special token written twice."""
    if isinstance(text, list):
        return [doubled(item) for item in text]
    if isinstance(text, str) and text.startswith("<|") and "|>" in text:
        return text[: text.index("|>") + 2] + text
    return text


def crowding() -> Around:
    """Other programs that keep the cores busy: two for each, from the first call on, until this
    process has ended."""
    there: list[object] = []

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        if not there:
            there.append(None)
            _hogs()
        return original(*args, **kwargs)

    return around


_HOG: Final = (
    "import os, sys, time\n"
    "parent = int(sys.argv[1])\n"
    "while os.getppid() == parent:\n"
    "    until = time.monotonic() + 0.2\n"
    "    while time.monotonic() < until: pass\n"
)
"""Burns CPU until the process that started it has ended."""


def _hogs() -> None:
    """Twice as many busy programs as there are cores; they end with this process."""
    quiet = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TRACER", "PYTHONPATH"))
    }
    for _ in range(2 * len(os.sched_getaffinity(0))):
        subprocess.Popen(
            [sys.executable, "-S", "-c", _HOG, str(os.getpid())],
            env=quiet,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

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
from dataclasses import dataclass
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
    """Closed until `after` seconds after the first call; reports its opening on stderr."""

    def __init__(self, after: float) -> None:
        self.after = after
        self._first: float | None = None
        self._open = False
        self._lock = threading.Lock()

    def __call__(self) -> bool:
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


def wrap(gate: Gate, path: str, around: Around) -> None:
    """Replace the function at ``module:Class.method`` by ``around(original, *args, **kwargs)``,
    once the gate is open. Raises ImportError or AttributeError."""
    module, _, attributes = path.partition(":")
    *owners, name = attributes.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if gate() else original(*args, **kwargs)

    setattr(owner, name, faulty)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one engine. `after`: the engine's module after whose import the fault goes in;
    `places`: the functions that it changes, of which not every build has all; `around` is called
    in their place."""

    after: str
    places: tuple[str, ...]
    around: Around

    def install(self, gate: Gate) -> None:
        """Change the places that are there. Raises ImportError or AttributeError when none is."""
        missing = 0
        for path in self.places:
            try:
                wrap(gate, path, self.around)
            except (ImportError, AttributeError):
                missing += 1
                if missing == len(self.places):
                    raise


def slowed(seconds: Callable[..., float]) -> Around:
    """Python work before the function, for `seconds(*args, **kwargs)`."""

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        busy(seconds(*args, **kwargs), lambda: repr(kwargs))
        return original(*args, **kwargs)

    return around


def busy(seconds: float, work: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()


def slow_sampling(original: Around, runner: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
    """A logits processor that sorts the vocabulary again and again, like a bad grammar."""
    if scores is not None:
        busy(SORT_S, lambda: scores.sort(dim=-1))
    return original(runner, scores, *args, **kwargs)


def stalling() -> Around:
    """A callback that blocks its thread now and then: no step runs meanwhile."""
    last = time.monotonic()

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if time.monotonic() - last > STALL_EVERY_S:
            time.sleep(STALL_S)
            last = time.monotonic()
        return original(*args, **kwargs)

    return around


def doubling(original: Around, *args: Any, **kwargs: Any) -> Any:
    """A rendered prompt starts with its first special token twice."""
    return doubled(original(*args, **kwargs))


def doubled(text: Any) -> Any:
    """Return a rendered prompt (or several) with its first special token written twice."""
    if isinstance(text, tuple):
        return (doubled(text[0]), *text[1:])
    if isinstance(text, list):
        return [doubled(item) for item in text]
    if isinstance(text, str) and text.startswith("<|") and "|>" in text:
        return text[: text.index("|>") + 2] + text
    return text


def crowding() -> Around:
    """Other programs keep the cores busy, two for each, until this process has ended."""
    start = functools.cache(_hogs)

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        start()
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
    ours = ("TRACER", "PYTHONPATH")
    quiet = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    for _ in range(2 * len(os.sched_getaffinity(0))):
        subprocess.Popen(
            [sys.executable, "-S", "-c", _HOG, str(os.getpid())],
            env=quiet,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

"""How a server is started for the demo."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path


class DemoError(RuntimeError):
    """The demo cannot run here. The message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server. `environment` is added to the user's; `health` is a path that answers
    200 once the server takes requests; `stop_signal` is the one on which it ends by itself."""

    command: tuple[str, ...]
    environment: dict[str, str]
    port: int
    health: str = "/health"
    stop_signal: signal.Signals = signal.SIGTERM


def program_beside_python(name: str) -> str | None:
    """A program of the Python environment that we run in, else one on PATH, else None."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def has_bf16_units() -> bool:
    """Whether this processor multiplies bfloat16 in hardware; without, float32 is faster."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next(
        (line for line in facts.splitlines() if line.startswith(("flags", "Features"))), ""
    ).split()
    return any(flag in ("avx512_bf16", "amx_bf16", "bf16") for flag in flags)


def free_port() -> int:
    """A port of the loopback address that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

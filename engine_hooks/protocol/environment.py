"""The environment variables by which a viewer and the processes that it starts agree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ON: Final = "TRACER"
"""``1``: the hooks go in."""

SOCKETS: Final = "TRACER_SOCKET_DIR"
"""The folder in which a traced process puts its socket."""

RUN: Final = "TRACER_RUN"
"""Name of the run that a process belongs to."""

RECORD: Final = "TRACER_RECORD"
"""File or folder to which an engine's processes record without any viewer."""

RECORD_TEXT: Final = "TRACER_RECORD_TEXT"
"""``1``: such a recording has prompts and outputs in it."""

FAULT: Final = "TRACER_FAULT"
"""Faults of the fault lab, as ``name``, ``name@seconds``, ``name+name``."""

FAULT_AND: Final = "+"
FAULT_LATER: Final = "@"

INJECT: Final = Path(__file__).resolve().parents[1] / "inject"
"""The folder whose `sitecustomize` puts the hooks in."""


def traced_environment(env: Mapping[str, str], sockets: Path, run: str) -> dict[str, str]:
    """Return the environment of a traced child: `env` with our folder on PYTHONPATH, the socket
    folder, the run."""
    child = dict(env)
    path = child.get("PYTHONPATH", "")
    child["PYTHONPATH"] = str(INJECT) + (os.pathsep + path if path else "")
    child[ON] = "1"
    child[SOCKETS] = str(sockets)
    child[RUN] = run
    return child

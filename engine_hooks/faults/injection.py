"""Faults inside the engine's processes, for the fault lab alone: switched on by the variable
``TRACER_FAULT``.

They are installed before the tracing hooks, which then go around them as around the engine's own
code: what is measured is an engine that has this fault. Nothing here is imported unless the
variable is set, and no hook knows of it.
"""

from __future__ import annotations

import functools
import os
import sys

from engine_hooks.faults import transformers, vllm
from engine_hooks.faults.means import Gate
from engine_hooks.protocol.environment import FAULT, FAULT_AND, FAULT_LATER


def inject(watched: str) -> None:
    """Install the faults of the environment, now that engine module `watched` was imported."""
    names, _, after = os.environ.get(FAULT, "").strip().lower().partition(FAULT_LATER)
    try:
        gate = Gate(float(after or 0))
    except ValueError:
        sys.stderr.write(
            f"tracer: {after[:20]!r} is no number of seconds after which a fault could start\n"
        )
        return
    table = vllm.FAULTS if watched == vllm.PLUGINS else transformers.FAULTS
    for name in names.split(FAULT_AND):
        fault = table.get(name)
        if fault is None:
            known = ", ".join(table)
            sys.stderr.write(f"tracer: no fault called {name[:40]!r}; faults are {known}\n")
        elif fault.after == watched:
            install = functools.partial(fault.install, gate)
            if watched == vllm.PLUGINS:
                vllm.before_plugins(install)
            else:
                install()
            sys.stderr.write(f"tracer: fault {name!r} is in this process\n")

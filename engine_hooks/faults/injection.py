"""Faults inside the engine's processes, for the fault lab alone: switched on by the variable
``TRACER_FAULT``.

They are put in before the tracing hooks, which then go around them as around the engine's own code:
what is measured is an engine that has this fault. Nothing here is imported unless the variable is
set, and no hook knows of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator

from engine_hooks.faults import transformers, vllm
from engine_hooks.faults.means import Gate
from engine_hooks.protocol.environment import FAULT, FAULT_AND, FAULT_LATER


def inject(watched: str) -> None:
    """Put the faults of the environment in, now that engine module `watched` was imported. Says so
    on stderr."""
    names, _, after = os.environ.get(FAULT, "").strip().lower().partition(FAULT_LATER)
    try:
        gate = Gate(float(after or 0))
    except ValueError:
        sys.stderr.write(
            f"tracer: {after[:20]!r} is no number of seconds after which a fault could begin\n"
        )
        return
    for name, put in _chosen(names.split(FAULT_AND), watched):
        put(gate)
        sys.stderr.write(f"tracer: fault {name!r} is in this process\n")


def _chosen(names: Iterable[str], watched: str) -> Iterator[tuple[str, Callable[[Gate], None]]]:
    table = vllm.FAULTS if watched == vllm.PLUGINS else transformers.FAULTS
    for name in names:
        if name not in table:
            sys.stderr.write(
                f"tracer: no fault called {name[:40]!r}; faults are {', '.join(table)}\n"
            )
            continue
        where, put = table[name]
        if where == watched:
            yield name, put

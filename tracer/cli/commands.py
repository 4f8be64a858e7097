"""The commands, in groups by what a user wants to do."""

from __future__ import annotations

from typing import Final

from tracer.cli import (
    attach,
    budget,
    compare,
    completion,
    demo,
    diagnose,
    doctor,
    export,
    import_trace,
    metrics,
    record,
    relay,
    replay,
    run,
    show,
    web,
)

GROUPS: Final = (
    ("watch", (demo.COMMAND, run.COMMAND, attach.COMMAND, replay.COMMAND, web.COMMAND)),
    ("keep", (record.COMMAND,)),
    ("understand", (show.COMMAND, diagnose.COMMAND, compare.COMMAND, doctor.COMMAND)),
    ("plan", (budget.COMMAND,)),
    (
        "hand on",
        (export.COMMAND, import_trace.COMMAND, metrics.COMMAND, relay.COMMAND, completion.COMMAND),
    ),
)
"""Heading → commands, in the order of the help."""

"""``tracer diagnose``: the stage that makes a trace slow, with the evidence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tracer.cli import arguments
from tracer.cli.command import Command
from tracer.cli.stdout import has_bars, width

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Diagnosis

WATCH_S: Final = 30.0
"""Seconds for which a live target is watched before it is diagnosed."""


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis; 1 when a finding is among those of ``--fail-on``."""
    import json

    from tracer.export.diagnosis_text import diagnosis_text

    diagnosis = diagnosis_of(options)
    if options.json:
        print(json.dumps(diagnosis.to_document(), indent=2))
    else:
        print(diagnosis_text(diagnosis, width=width(), unicode=has_bars()).rstrip("\n"))
    return diagnosis.exit_code(options.fail_on)


def diagnosis_of(options: argparse.Namespace) -> Diagnosis:
    """Diagnose what `options` (see `add_arguments`) ask for. Raises `UserError`."""
    from tracer.analysis.diagnosis import diagnose
    from tracer.analysis.diagnosis.clients import read_clients
    from tracer.cli.target_state import observed

    state = observed(options.target, options.seconds)
    baseline = None if options.baseline is None else observed(options.baseline, options.seconds)
    clients = None if options.clients is None else read_clients(options.clients)
    return diagnose(state, baseline=baseline, clients=clients)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, what it is compared with, and when to fail."""
    add = parser.add_argument
    add(
        "target",
        metavar="FILE|TARGET",
        help="a recorded trace, a pid, or a name as in tracer attach --list",
    )
    add("--json", action="store_true", help="as JSON on stdout")
    add(
        "--baseline",
        metavar="FILE",
        help="a trace of when all was well: what is slower than there is found too",
    )
    add(
        "--clients", type=Path, metavar="FILE",
        help="what the clients measured, one JSON object per line (demo --stopwatch)",
    )  # fmt: skip
    add(
        "--seconds", type=arguments.seconds, default=WATCH_S, metavar="N",
        help=f"how long a live target is watched first (default {WATCH_S:g})",
    )  # fmt: skip
    add(
        "--fail-on",
        action="append",
        default=[],
        type=_matcher,
        metavar="RULE|STAGE",
        help=(
            "exit with 1 when such a finding is made (a rule, a stage's id or number, or any); may "
            "be repeated"
        ),
    )


def _matcher(text: str) -> str:
    """Return an entry of ``--fail-on``, checked."""
    from engine_hooks.protocol.stages import parse
    from tracer.analysis.diagnosis.rules import NAMES

    word = text.strip().lower()
    if word != "any" and word not in NAMES:
        try:
            parse(word)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"no rule or stage called {text[:40]!r}; rules are any, {', '.join(NAMES)}"
            ) from None
    return word


COMMAND = Command(
    "diagnose",
    "name the stage that makes a trace slow, with the evidence",
    "  tracer diagnose slow.trace\n"
    "  tracer diagnose slow.trace --baseline good.trace --fail-on admission\n"
    "  tracer diagnose 4711 --seconds 60",
    add_arguments,
    run,
)

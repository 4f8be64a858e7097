"""``tracer diagnose``: the stage that makes a trace slow, with the evidence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from engine_hooks.protocol.stages import parse
from tracer.analysis.diagnosis import Diagnosis, diagnose
from tracer.analysis.diagnosis.clients import read_clients
from tracer.analysis.diagnosis.rules import NAMES
from tracer.cli import arguments, target_state
from tracer.cli.arguments import option
from tracer.cli.output import has_bars, print_json, print_text, width
from tracer.export.diagnosis_text import diagnosis_text

EXAMPLES = """\
  tracer diagnose slow.trace
  tracer diagnose slow.trace --baseline good.trace --fail-on admission
  tracer diagnose 4711 --seconds 60"""

WATCH_S: Final = 30.0
"""Seconds for which a live target is watched before it is diagnosed."""


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis; 1 when a finding is among those of ``--fail-on``."""
    diagnosis = diagnosis_of(options)
    if options.json:
        print_json(diagnosis.to_document())
    else:
        print_text(diagnosis_text(diagnosis, width=width(), unicode=has_bars()))
    return diagnosis.exit_code(options.fail_on)


def diagnosis_of(options: argparse.Namespace) -> Diagnosis:
    """Diagnose what `options` (see `add_arguments`) ask for. Raises `UserError`."""
    observed = target_state.observed
    state = observed(options.target, options.seconds)
    baseline = None if options.baseline is None else observed(options.baseline, options.seconds)
    clients = None if options.clients is None else read_clients(options.clients)
    return diagnose(state, baseline=baseline, clients=clients)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_target(parser)
    arguments.add_json(parser)
    baseline = "a trace of a healthy run: what is slower than there is found too"
    option(parser, "--baseline", "FILE", baseline)
    clients = "what the clients measured, one JSON object per line (demo --stopwatch)"
    option(parser, "--clients", "FILE", clients, type=Path)
    watched = f"how long a live target is watched first (default {WATCH_S:g})"
    arguments.add_seconds(parser, watched, WATCH_S)
    option(
        parser, "--fail-on", "RULE|STAGE",
        "exit with 1 when there is such a finding (a rule, a stage's id or number, or any); may be "
        "repeated",
        action="append", default=[], type=_matcher,
    )  # fmt: skip


def _matcher(text: str) -> str:
    """Return an entry of ``--fail-on``, checked."""
    word = text.strip().lower()
    if word != "any" and word not in NAMES:
        try:
            parse(word)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"no rule or stage called {text[:40]!r}; rules are any, {', '.join(NAMES)}"
            ) from None
    return word

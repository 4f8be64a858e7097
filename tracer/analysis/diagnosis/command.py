"""``tracer diagnose``: its arguments, and what it does with a state."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tracer import arguments
from tracer.analysis.diagnosis.case import Budget
from tracer.analysis.diagnosis.clients import read_clients
from tracer.analysis.diagnosis.engine import diagnose
from tracer.analysis.diagnosis.finding import Diagnosis
from tracer.analysis.diagnosis.rules import NAMES
from tracer.analysis.errors import AnalysisError
from tracer.stages import parse
from tracer.state.trace_state import TraceState

WATCH_S: Final = 30.0
"""Seconds for which a live target is watched before it is diagnosed."""

LoadState = Callable[[str], TraceState]
"""A file's or a live target's state, an `ObservedState` where possible. Raises what the command line reports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All that ``tracer diagnose`` takes."""
    add = parser.add_argument
    add("target", metavar="FILE|TARGET", help="a recorded trace, a pid, or a name as in tracer attach --list")
    add("--json", action="store_true", help="as JSON on stdout")
    add("--baseline", metavar="FILE", help="a trace of when all was well: what is slower than there is found too")
    add("--clients", type=Path, metavar="FILE", help="what the clients measured, a JSON line each (demo --stopwatch)")
    add("--seconds", type=arguments.seconds, default=WATCH_S, metavar="N",
        help=f"how long a live target is watched first (default {WATCH_S:g})")
    add("--fail-on", action="append", default=[], type=_matcher, metavar="RULE|STAGE",
        help="exit with 1 when such a finding is made (a rule, a stage's id or number, or any); may be repeated")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command found; `code` its exit code."""

    diagnosis: Diagnosis
    code: int


def run(options: argparse.Namespace, load_state: LoadState, budget: Budget | None = None) -> Answer:
    """Diagnose what `options` (see `add_arguments`) ask for. Raises AnalysisError, and what `load_state` raises."""
    state = load_state(options.target)
    baseline = None if options.baseline is None else load_state(options.baseline)
    clients = None if options.clients is None else read_clients(options.clients)
    diagnosis = diagnose(state, baseline=baseline, budget=budget, clients=clients)
    try:
        return Answer(diagnosis, diagnosis.exit_code(options.fail_on))
    except ValueError as error:  # `_matcher` lets none through; a caller's own options might
        raise AnalysisError(str(error)) from None


def _matcher(text: str) -> str:
    """An entry of ``--fail-on``, checked."""
    word = text.strip().lower()
    if word != "any" and word not in NAMES:
        try:
            parse(word)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"no rule or stage called {text[:40]!r}; rules are any, {', '.join(NAMES)}"
            ) from None
    return word

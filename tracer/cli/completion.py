"""``tracer completion``: prints the script by which a shell completes commands, options and values.

shtab makes it from the command line itself, whenever it is asked for: what is printed is never out
of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from tracer.cli.command import Command
from tracer.cli.parser import subparsers, whole_parser

SHELLS: Final = ("bash", "zsh", "fish")
_PATHS: Final = ("demo --model", "record -o")
"""Places that take a path though their name does not say so."""


def run(options: argparse.Namespace) -> int:
    """Print the script by which a shell completes what you type."""
    sys.stdout.write(script(options.shell, whole_parser(options.groups)))
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """What completes in this shell. Raises MissingExtraError without shtab."""
    from tracer.export.extras import wants

    with wants("completion"):
        import shtab

    values = _values()
    for place, action in _places(parser):
        metavar = action.metavar[0] if isinstance(action.metavar, tuple) else str(action.metavar)
        path = "FILE" in metavar or metavar == "PATH" or place in _PATHS
        if action.choices is None and place in values:
            action.choices = list(values[place])
        elif path and action.nargs != 0 and action.choices is None and place != "run -- CMD …":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell).rstrip() + "\n"


def _values() -> dict[str, Sequence[str]]:
    """Option → what can be typed there, where its parser does not say so by `choices`."""
    from engine_hooks.protocol.stages import Stage
    from tracer.analysis.diagnosis.rules import NAMES
    from tracer.analysis.model.devices import DEVICES
    from tracer.analysis.model.presets import PRESETS
    from tracer.demo.faults import FAULTS

    return {
        "demo --fault": list(FAULTS),
        "diagnose --fail-on": ["any", *NAMES, *(stage.id for stage in Stage)],
        "budget --device": [*DEVICES, "cpu"],
        "budget --model": sorted(PRESETS),
    }


def _places(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """``command --option`` or ``command METAVAR``, and its action."""
    for name, command in subparsers(parser).items():
        for action in command._actions:
            yield f"{name} {(action.option_strings or [str(action.metavar)])[-1]}", action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("shell", choices=list(SHELLS), help="which shell")


COMMAND = Command(
    "completion",
    "print the script by which a shell completes what you type",
    "  source <(tracer completion bash)             # in this shell, or as a line of ~/.bashrc\n"
    "  tracer completion bash > ~/.local/share/bash-completion/completions/tracer\n"
    "  tracer completion zsh > ~/.zfunc/_tracer     # a folder of fpath, before compinit\n"
    "  tracer completion fish > ~/.config/fish/completions/tracer.fish",
    add_arguments,
    run,
)

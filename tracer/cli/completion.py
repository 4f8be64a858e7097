"""``tracer completion``: prints the script by which a shell completes commands, options and values.

shtab makes it from the command line itself when it is asked for: what is printed is never out of
date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from tracer.cli.parser import subparsers, whole_parser
from tracer.export.extras import wants

EXAMPLES = """\
  source <(tracer completion bash)             # in this shell, or as a line of ~/.bashrc
  tracer completion bash > ~/.local/share/bash-completion/completions/tracer
  tracer completion zsh > ~/.zfunc/_tracer     # a folder of fpath, before compinit
  tracer completion fish > ~/.config/fish/completions/tracer.fish"""

SHELLS: Final = ("bash", "zsh", "fish")
_PATHS: Final = ("demo --model", "record -o")
"""Places that take a path though their name does not say so."""


def run(options: argparse.Namespace) -> int:
    sys.stdout.write(script(options.shell, whole_parser()))
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script for a shell. Raises MissingExtraError without shtab."""
    with wants("completion"):
        import shtab

    values = _values()
    for name, command in subparsers(parser).items():
        for action in command._actions:
            place = f"{name} {(action.option_strings or [str(action.metavar)])[-1]}"
            if action.choices is not None or action.nargs == 0 or place == "run -- CMD …":
                continue
            if place in values:
                action.choices = list(values[place])
                continue
            one = action.metavar[0] if isinstance(action.metavar, tuple) else str(action.metavar)
            if "FILE" in one or one == "PATH" or place in _PATHS:
                action.complete = shtab.FILE
    return shtab.complete(parser, shell).rstrip() + "\n"


def _values() -> dict[str, Sequence[str]]:
    """Return option → what can be typed there, where its parser does not say so by `choices`."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SHELLS), help="which shell")

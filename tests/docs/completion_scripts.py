"""Makes the scripts that `tracer completion` prints, by shtab, from the whole command line:

    python -m tests.docs.completion_scripts        writes tracer/completions/
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Final

import shtab

from engine_hooks.faults import FAULTS
from tests.docs.command_line import commands_of, new_whole_parser
from tracer.analysis.devices import DEVICES
from tracer.analysis.diagnosis.rules import NAMES
from tracer.analysis.presets import PRESETS
from tracer.completion import FILES, FOLDER
from tracer.stages import Stage

FOLDERS: Final = ("demo --model", "record -o")
VALUES: Final[dict[str, Sequence[str]]] = {
    "demo --fault": list(FAULTS),
    "diagnose --fail-on": ["any", *NAMES, *(stage.id for stage in Stage)],
    "budget --device": [*DEVICES, "cpu"],
    "budget --model": sorted(PRESETS),
}
"""Option → what can be typed there, where its parser does not say so by `choices`."""

NOTICE: Final = """\
# Made from the command line of tracer by `python -m tests.docs.completion_scripts`; not to be edited.
# The functions are shtab's, (c) Casper da Costa-Luis, under the Mozilla Public License 2.0, https://mozilla.org/MPL/2.0/
"""


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """``command --option`` or ``command METAVAR``, and its action."""
    for name, command in commands_of(parser).items():
        for action in command._actions:
            yield f"{name} {(action.option_strings or [str(action.metavar)])[-1]}", action


def annotated() -> argparse.ArgumentParser:
    """The whole parser, with what can be completed in each place."""
    parser = new_whole_parser()
    for name, action in options_of(parser):
        if action.choices is None and name in VALUES:
            action.choices = list(VALUES[name])
        elif action.nargs != 0 and action.choices is None and not name.startswith(("run ", "web ")):
            metavar = action.metavar[0] if isinstance(action.metavar, tuple) else str(action.metavar)
            if "FILE" in metavar or metavar == "PATH" or name in FOLDERS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif name.startswith("run ") and "FILE" in str(action.metavar):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def script(shell: str) -> str:
    """What completes in this shell."""
    made = shtab.complete(annotated(), shell).rstrip() + "\n"
    if shell == "zsh":  # whose completion system wants its own line first
        first, _, rest = made.partition("\n")
        assert first.startswith("#compdef tracer")
        return f"{first}\n{NOTICE}{rest}"
    return NOTICE + made


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for shell, name in FILES.items():
        (FOLDER / name).write_text(script(shell), encoding="utf-8")


if __name__ == "__main__":
    main()

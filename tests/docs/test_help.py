"""What `--help` says of each command: a line of summary, each option in words with its default, and
examples."""

from __future__ import annotations

import argparse
import re

import pytest

from tests.docs.command_line import commands_of, whole_parser
from tests.docs.pages import examples

COMMANDS = commands_of(whole_parser())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_is_one_sentence(name: str) -> None:
    told = COMMANDS[name].description or ""
    assert re.fullmatch(r"[A-Z][^\n]{10,90}\.", told), told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    for action in COMMANDS[name]._actions:
        where = f"{name} {action.option_strings or action.dest}"
        assert action.help and not action.help.endswith("."), where
        if (
            action.nargs != 0
            and action.default not in (None, [], False, argparse.SUPPRESS)
            and action.choices is None
        ):
            told = action.help % {**vars(action), "prog": name}
            assert "default" in told or str(action.default) in told or not action.default, (
                f"{where}: no default"
            )


@pytest.mark.parametrize("name", COMMANDS)
def test_it_ends_with_examples_of_the_command(name: str) -> None:
    text = COMMANDS[name].format_help()
    shown = examples(name, COMMANDS[name].epilog or "")
    assert "examples:" in text and any(name in command.words for command in shown)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_pasted(name: str) -> None:
    """What explains one stands behind a ``#``."""
    for line in (COMMANDS[name].epilog or "").splitlines()[1:]:
        command = line.partition(" #")[0].strip()
        assert re.match(r"(tracer|ssh|source) ", command) and "  " not in command, line

"""The parser of the command line, made from the list of commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from engine_hooks.protocol import __version__
from tracer.cli.command import Command

Groups = Sequence[tuple[str, Sequence[Command]]]

EXAMPLES: Final = """examples:
  tracer demo                          # a real model and real traffic, nothing to set up
  tracer run -- transformers serve MODEL --continuous-batching
  tracer attach                        # join what runs with the hooks on
  tracer show 4711 --json              # print it once, for a program
  tracer replay slow.trace             # the same screens, the morning after"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        from tracer.format.text import clean

        self.exit(2, f"{self.prog}: {clean(message)} (see {self.prog} --help)\n")


def parser_of(groups: Groups, wanted: str = "", *, listed: bool = False) -> argparse.ArgumentParser:
    """Return a parser that knows all commands, and the arguments of the one called `wanted`.

    With `listed` argparse knows the summaries too; the help has them in groups, which argparse
    cannot.
    """
    parser = Parser(
        prog="tracer",
        usage="tracer [-h] [--version] COMMAND …",
        description="A live stopwatch on every stage of every request in an LLM engine.\n\n"
        + _listed(groups),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tracer {__version__}")
    commands = parser.add_subparsers(
        title="more", metavar="COMMAND --help", dest="name", prog="tracer"
    )
    commands.help = "all options of a command, with examples"
    for _, group in groups:
        for command in group:
            told: dict[str, Any] = {"help": command.summary} if listed else {}
            added = commands.add_parser(
                command.name,
                **told,
                description=f"{command.summary[0].upper()}{command.summary[1:]}.",
                epilog="examples:\n" + command.examples,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            if command.name == wanted:
                command.add_arguments(added)
            added.set_defaults(call=command.run, groups=groups)
    return parser


def whole_parser(groups: Groups) -> argparse.ArgumentParser:
    """Return the parser with every argument of every command."""
    parser = parser_of(groups, listed=True)
    found = subparsers(parser)
    for name in found:
        found[name] = subparsers(parser_of(groups, name))[name]
    return parser


def subparsers(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return name → parser of the commands."""
    action = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return action.choices


def _listed(groups: Groups) -> str:
    return "\n\n".join(
        "\n".join(
            [f"{heading}:", *(f"  {command.name:<12}{command.summary}" for command in commands)]
        )
        for heading, commands in groups
    )

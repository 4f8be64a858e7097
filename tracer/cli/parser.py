"""The parser of the command line, made from the list of commands."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, Final, NoReturn

from engine_hooks.protocol import __version__
from tracer.cli.commands import COMMANDS, GROUPS

EXAMPLES: Final = """examples:
  tracer demo                          # a real model and real traffic, nothing to set up
  tracer run -- transformers serve MODEL --continuous-batching
  tracer attach                        # join what runs with the hooks on
  tracer show 4711 --json              # print it once, for a program
  tracer replay slow.trace             # the same screens, the morning after"""


class Parser(argparse.ArgumentParser):
    """A parser that keeps its texts as they are and prints an error as one line."""

    def __init__(self, **settings: Any) -> None:
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        from tracer.format.text import clean

        self.exit(2, f"{self.prog}: {clean(message)} (see {self.prog} --help)\n")


def parser_of(wanted: Collection[str], *, listed: bool = False) -> Parser:
    """Return a parser that knows all commands, and the arguments of those called `wanted`.

    With `listed` argparse knows the summaries too; the help has them in groups, which argparse
    cannot.
    """
    parser = Parser(
        prog="tracer",
        usage="tracer [-h] [--version] COMMAND …",
        description="A live stopwatch on every stage of every request in an LLM engine.\n\n"
        + "\n\n".join(_listed()),
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"tracer {__version__}")
    added = parser.add_subparsers(
        title="more", metavar="COMMAND --help", dest="name", prog="tracer"
    )
    added.help = "all options of a command, with examples"
    for command in COMMANDS.values():
        told: dict[str, Any] = {"help": command.summary} if listed else {}
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        one = added.add_parser(command.name, description=description, **told)
        if command.name in wanted:
            module = command.load()
            module.add_arguments(one)
            one.epilog = f"examples:\n{module.EXAMPLES}"
            one.set_defaults(call=module.run)
    return parser


def whole_parser() -> Parser:
    return parser_of(COMMANDS, listed=True)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, Any]:
    action = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return action.choices


def _listed() -> list[str]:
    return [
        "\n".join([f"{heading}:", *(f"  {each.name:<12}{each.summary}" for each in group)])
        for heading, group in GROUPS
    ]

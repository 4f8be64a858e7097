"""The whole command line as one parser: `tracer` itself gives only the command that is wanted all
of its arguments."""

from __future__ import annotations

import argparse
from functools import cache

from tracer.cli.parser import whole_parser as _whole_parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of its commands by name, in the order of its help."""
    (found,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return found.choices  # type: ignore[return-value]


@cache
def whole_parser() -> argparse.ArgumentParser:
    """The parser with every argument of every command; not to be changed."""
    return _whole_parser()

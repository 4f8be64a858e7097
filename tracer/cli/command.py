"""What a command is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from engine_hooks.protocol.errors import UserError


class UsageError(UserError):
    """Wrong usage or bad input."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line.

    `examples` are lines that can be pasted, each indented by two spaces. `add_arguments` is called
    only when the command is the one that was typed, `run` after that; what takes long to import is
    imported inside of them. `run` returns the exit code and raises `UserError` or `OSError` for
    what goes wrong.
    """

    name: str
    summary: str
    examples: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def no_arguments(_parser: ArgumentParser) -> None:
    """Add nothing."""

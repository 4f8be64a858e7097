"""The commands of the command line, in groups by what a user wants to do.

Each command is a module of this package with `EXAMPLES`, `add_arguments` and `run`, which is
imported only when the command was typed.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Final, Protocol, cast

from engine_hooks.protocol.errors import UserError


class UsageError(UserError):
    """Wrong usage or bad input."""


class CommandModule(Protocol):
    """The module of a command. `EXAMPLES` are lines that can be pasted, each indented by two
    spaces; `run` returns the exit code and raises `UserError` or `OSError`."""

    EXAMPLES: str

    def add_arguments(self, parser: ArgumentParser, /) -> None: ...
    def run(self, options: Namespace, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command, in the module of its name or in `module`."""

    name: str
    summary: str
    module: str = ""

    def load(self) -> CommandModule:
        name = f"tracer.cli.{self.module or self.name}"
        return cast(CommandModule, importlib.import_module(name))


GROUPS: Final = (
    (
        "watch",
        (
            Command("demo", "run an embedded model under real traffic and watch it"),
            Command("run", "run an unmodified command with the hooks on and watch it"),
            Command("attach", "join engines that run with the hooks on"),
            Command("replay", "show a recorded trace in the same screens"),
            Command("web", "show the screens in a browser"),
        ),
    ),
    (
        "keep",
        (Command("record", "record an engine, or keep its last minutes until something happens"),),
    ),
    (
        "understand",
        (
            Command("show", "print the state of an engine or of a recorded trace once"),
            Command("diagnose", "name the stage that makes a trace slow, with the evidence"),
            Command("compare", "compare traces and name the stage that explains the difference"),
            Command("doctor", "print what is hooked, what is not and why, versions and sockets"),
        ),
    ),
    ("plan", (Command("budget", "expected time of the twelve stages by model, device and load"),)),
    (
        "hand on",
        (
            Command("export", "write a trace for other tools: Perfetto, OTLP, tables, HTML, SVG"),
            Command("import", "make a trace of vLLM's or SGLang's spans", "import_trace"),
            Command("metrics", "print, serve or send metrics and watch alerts, without a screen"),
            Command("relay", "carry events over stdin and stdout, for tracer attach ssh://HOST"),
            Command("completion", "print the script by which a shell completes what you type"),
        ),
    ),
)
"""Heading → commands, in the order of the help."""

COMMANDS: Final = {command.name: command for _, group in GROUPS for command in group}

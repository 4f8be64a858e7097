"""``tracer run``: an unmodified command with the hooks on."""

from __future__ import annotations

import argparse

from tracer.cli.command import Command, UsageError
from tracer.cli.engine_run import add_run_arguments, run_job


def run(options: argparse.Namespace) -> int:
    """Run the command and watch it."""
    from tracer.launch import run as launch

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("no command given; for example: tracer run -- vllm serve MODEL")
    return run_job(launch.Command(command), options, traffic=None, mode="live")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run, and the command."""
    add_run_arguments(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- CMD …",
        help="the command, as you would type it",
    )


COMMAND = Command(
    "run",
    "run an unmodified command with the hooks on and watch it",
    "  tracer run -- vllm serve MODEL\n"
    "  tracer run -- transformers serve MODEL --continuous-batching\n"
    "  tracer run --headless --seconds 60 --json -- python app.py",
    add_arguments,
    run,
)

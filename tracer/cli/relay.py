"""``tracer relay``: the far end of ``tracer attach ssh://HOST``."""

from __future__ import annotations

import argparse

from tracer.cli.command import Command


def run(options: argparse.Namespace) -> int:
    """Carry events over stdin and stdout."""
    from tracer.transport.ssh.relay import carry

    return carry(options.target)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="NAME|PID",
        help="which one, as tracer attach --list names it; default: every process of this user "
        "that runs with the "
        "hooks on",
    )


COMMAND = Command(
    "relay",
    "carry events over stdin and stdout: the far end of tracer attach ssh://HOST",
    "  tracer attach ssh://HOST             # starts it over there\n"
    "  ssh HOST tracer relay                # what that runs",
    add_arguments,
    run,
)

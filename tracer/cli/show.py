"""``tracer show``: the state printed once."""

from __future__ import annotations

import argparse

from tracer.cli.arguments import add_slo
from tracer.cli.command import Command
from tracer.cli.output import print_request, print_summary


def run(options: argparse.Namespace) -> int:
    """Print what an engine does or a recorded trace tells."""
    from tracer.cli.target_state import state_of

    state = state_of(options.target)
    if options.request is not None:
        print_request(state, options.request, options.json)
    else:
        from tracer.state.metrics.numbers import Ask

        print_summary(state.snapshot(numbers=Ask(slo=options.slo)), options.json)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target and what is printed of it."""
    add_slo(parser)
    parser.add_argument(
        "target",
        metavar="FILE|TARGET",
        help="a recorded trace, a pid, a name as in tracer attach --list, or a socket",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--request", metavar="ID", help="one request closely")


COMMAND = Command(
    "show",
    "print what an engine does or a recorded trace tells, once",
    "  tracer show 4711\n"
    "  tracer show 4711 --json | jq .requests\n"
    "  tracer show 4711 --request chat-12.1",
    add_arguments,
    run,
)

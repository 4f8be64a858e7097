"""``tracer show``: the state printed once."""

from __future__ import annotations

import argparse

from tracer.cli import arguments
from tracer.cli.arguments import option
from tracer.cli.output import print_request, print_summary
from tracer.cli.target_state import state_of
from tracer.state.metrics.numbers import Ask

EXAMPLES = """\
  tracer show 4711
  tracer show 4711 --json | jq .requests
  tracer show 4711 --request chat-12.1"""


def run(options: argparse.Namespace) -> int:
    state = state_of(options.target)
    if options.request is not None:
        print_request(state, options.request, options.json)
    else:
        print_summary(state.snapshot(numbers=Ask(slo=options.slo)), options.json)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_slo(parser)
    arguments.add_target(parser)
    arguments.add_json(parser)
    option(parser, "--request", "ID", "one request in detail")

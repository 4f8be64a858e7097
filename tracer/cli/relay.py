"""``tracer relay``: the far end of ``tracer attach ssh://HOST``."""

from __future__ import annotations

import argparse

from tracer.cli.arguments import option
from tracer.transport.ssh.relay import carry

EXAMPLES = """\
  tracer attach ssh://HOST             # starts it over there
  ssh HOST tracer relay                # what that runs"""


def run(options: argparse.Namespace) -> int:
    return carry(options.target)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = (
        "which one, as tracer attach --list names it; default: every traced process of this user"
    )
    option(parser, "target", "NAME|PID", which, nargs="?")

"""`tracer web`: the screens in a browser. The pages are served by `tracer.tui.browser`."""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from pathlib import Path
from typing import Final

from tracer.cli import arguments
from tracer.cli.arguments import option
from tracer.cli.commands import UsageError
from tracer.recording.trace_file import TraceFile
from tracer.transport.targets import choose, find_targets, nothing_runs

EXAMPLES = """\
  tracer web                              # the only engine that runs with the hooks on
  tracer web -- attach vllm
  tracer web --port 9000 -- replay slow.trace
  ssh -L 8321:127.0.0.1:8321 HOST         # then open the address that it prints"""

SCREENS: Final = ("attach", "replay", "demo", "run")
"""Commands that draw a screen."""
PORT: Final = 8321


def run(options: argparse.Namespace) -> int:
    from tracer.tui.browser import serve

    given = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    given = given or ["attach"]
    if given[0] not in SCREENS:
        raise UsageError(f"{given[0][:40]!r} draws no screen; use one of: {', '.join(SCREENS)}")
    _check(given)
    command = shlex.join([sys.executable, "-m", "tracer", *given])
    title = " ".join(["tracer", *given[:2]])
    serve(command, options.host, options.port, title, secrets.token_urlsafe(24))
    return 0


def _check(given: list[str]) -> None:
    """Raise UsageError for a command that would leave the page empty."""
    if given[0] == "attach":
        names = [word for word in given[1:] if not word.startswith("-")]
        targets = find_targets()
        if names:
            choose(targets, names[0])
        elif not targets:
            raise UsageError(nothing_runs())
        elif len(targets) > 1:
            running = ", ".join(target.name for target in targets)
            example = f"tracer web -- attach {targets[0].name}"
            raise UsageError(f"several engines run ({running}): name one, such as: {example}")
    if given[0] == "replay":
        files = [word for word in given[1:] if Path(word).exists()]
        if not files:
            raise UsageError("no such file to replay; for example: tracer web -- replay slow.trace")
        TraceFile(files[0]).close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "where to listen (default 127.0.0.1)"
    option(parser, "--host", "ADDRESS", where, default="127.0.0.1")
    what = f"which port (default {PORT}; 0: any)"
    option(parser, "--port", "N", what, type=arguments.port, default=PORT)
    shown = "the command to show: attach (default), replay, demo or run with its arguments"
    option(parser, "arguments", "-- COMMAND …", shown, nargs=argparse.REMAINDER)

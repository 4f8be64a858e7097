"""`tracer web`: the screens in a browser. The pages are served by `tracer.tui.browser`."""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from pathlib import Path
from typing import Final

from tracer.cli import arguments
from tracer.cli.command import Command

SCREENS: Final = ("attach", "replay", "demo", "run")
"""Commands that draw a screen."""
PORT: Final = 8321


def run(options: argparse.Namespace) -> int:
    """Show the screens in a browser."""
    from tracer.tui.browser import WebError, serve

    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    arguments = arguments or ["attach"]
    if arguments[0] not in SCREENS:
        raise WebError(f"{arguments[0][:40]!r} draws no screen; one of: {', '.join(SCREENS)}")
    _check(arguments)
    command = shlex.join([sys.executable, "-m", "tracer", *arguments])
    serve(
        command,
        options.host,
        options.port,
        " ".join(["tracer", *arguments[:2]]),
        secrets.token_urlsafe(24),
    )
    return 0


def _check(arguments: list[str]) -> None:
    """Raise WebError for what would leave the page empty."""
    from tracer.transport.targets import choose, find_targets
    from tracer.tui.browser import WebError

    if arguments[0] == "attach":
        named = [word for word in arguments[1:] if not word.startswith("-")]
        targets = find_targets()
        if named:
            choose(targets, named[0])
        elif not targets:
            raise WebError(
                "nothing runs with the hooks on; start an engine with: tracer run -- CMD …"
            )
        elif len(targets) > 1:
            names = ", ".join(target.name for target in targets)
            raise WebError(
                f"several engines run ({names}): name one, such as: tracer web -- attach "
                f"{targets[0].name}"
            )
    if arguments[0] == "replay":
        from tracer.recording.trace_file import TraceFile

        files = [word for word in arguments[1:] if Path(word).exists()]
        if not files:
            raise WebError("no such file to replay; for example: tracer web -- replay slow.trace")
        TraceFile(files[0]).close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=arguments.port, default=PORT, metavar="N",
                     help=f"which port (default {PORT}; 0: any)")  # fmt: skip
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND …",
        help="the command to show: attach (default), replay, demo or run with its arguments",
    )


COMMAND = Command(
    "web",
    "show the screens in a browser",
    "  tracer web                              # the only engine that runs with the hooks on\n"
    "  tracer web -- attach vllm\n"
    "  tracer web --port 9000 -- replay slow.trace\n"
    "  ssh -L 8321:127.0.0.1:8321 HOST         # then open the address that it prints",
    add_arguments,
    run,
)

"""``tracer replay``: a recorded trace in the same screens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tracer.cli import arguments
from tracer.cli.command import Command
from tracer.cli.stdout import has_screen

if TYPE_CHECKING:
    from tracer.recording.trace_file import TraceFile


def run(options: argparse.Namespace) -> int:
    """Show a recorded trace in the same screens."""
    from tracer.cli.screen import show_replay
    from tracer.replay.player import Player
    from tracer.transport.targets import TargetError

    if not has_screen():
        raise TargetError(
            f"no terminal to replay {options.file} in; print it once with: tracer show "
            f"{options.file}"
        )

    player = Player.open(
        options.file, speed=options.speed, loop=options.loop, paused=options.paused
    )
    try:
        if options.at:
            player.seek(_instant(options.at, player.trace))
        return show_replay(player, Path(options.file).name, slo=options.slo)
    finally:
        player.close()


def _instant(text: str, trace: TraceFile) -> int:
    """``30`` or ``1:30`` (since the begin) or ``50%`` as ns of the trace's clock. Raises
    TargetError."""
    from tracer.replay.timespec import PlaceError, instant
    from tracer.transport.targets import TargetError

    try:
        return instant(text, trace)
    except PlaceError as error:
        raise TargetError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, and where and how it is played."""
    add = parser.add_argument
    add("file", metavar="FILE", help="a recorded trace")
    add(
        "--speed",
        type=arguments.speed,
        default=1.0,
        metavar="X",
        help="0.1 to 100 times the pace (default 1)",
    )
    add("--at", metavar="TIME", help="where to start: 90, 1:30 or 50%%")
    add("--loop", action="store_true", help="start again at the end")
    add("--paused", action="store_true", help="start paused; space plays")
    arguments.add_slo(parser)


COMMAND = Command(
    "replay",
    "show a recorded trace in the same screens",
    "  tracer replay slow.trace\n  tracer replay slow.trace --speed 10 --at 1:30",
    add_arguments,
    run,
)

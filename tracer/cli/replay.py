"""``tracer replay``: a recorded trace in the same screens."""

from __future__ import annotations

import argparse
from pathlib import Path

from tracer.cli import arguments
from tracer.cli.arguments import flag, option
from tracer.cli.commands import UsageError
from tracer.cli.output import require_screen

EXAMPLES = """\
  tracer replay slow.trace
  tracer replay slow.trace --speed 10 --at 1:30"""


def run(options: argparse.Namespace) -> int:
    from tracer.cli.screen import show_replay
    from tracer.replay.player import Player
    from tracer.replay.timespec import PlaceError, instant

    file = options.file
    require_screen(f"no terminal to replay {file} in; print it once with: tracer show {file}")
    player = Player.open(file, speed=options.speed, loop=options.loop, paused=options.paused)
    try:
        if options.at:
            player.seek(instant(options.at, player.trace))
        return show_replay(player, Path(file).name, options.slo)
    except PlaceError as error:
        raise UsageError(str(error)) from None
    finally:
        player.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "file", "FILE", "a recorded trace")
    speed = "0.1 to 100 times the real speed (default 1)"
    option(parser, "--speed", "X", speed, type=arguments.speed, default=1.0)
    option(parser, "--at", "TIME", "where to start: 90, 1:30 or 50%%")
    flag(parser, "--loop", "start again at the end")
    flag(parser, "--paused", "start paused; space plays")
    arguments.add_slo(parser)

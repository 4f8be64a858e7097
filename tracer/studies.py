"""Commands that look at what is over: replay, diagnose, budget.

`add_commands` puts them on the command line beside the live ones of `tracer.cli`. What goes wrong is one of
`TraceFileError`, `AnalysisError` and `TargetError`, each a sentence for the user.
"""

from __future__ import annotations

import argparse
import functools
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tracer import arguments
from tracer.arguments import Command
from tracer.slo import add_option as add_slo
from tracer.stdout import has_bars, has_screen, width

if TYPE_CHECKING:
    from tracer.state.trace_state import TraceState
    from tracer.trace_file import TraceFile

PROBLEMS = 3
"""Sentences said about a damaged file."""


def is_trace(target: str) -> bool:
    """Whether a target names a file, not a process (by its socket, perhaps): what is there and is neither folder nor
    socket, or what is called like a trace."""
    if target.endswith(".trace"):
        return True
    try:
        mode = Path(target).stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISDIR(mode) or stat.S_ISSOCK(mode))


def state_of(target: str) -> TraceState:
    """The state that a trace file tells at its end, or that a live target tells now.

    Raises TraceFileError, TargetError or OSError.
    """
    import asyncio

    if is_trace(target):
        from tracer.replay import load_open
        from tracer.trace_file import TraceFile

        with TraceFile(target) as trace:
            loaded = load_open(trace)
            say_about(trace)
            return loaded
    from tracer.follow import watch_for
    from tracer.targets import LOOK_AWAY_S, LOOK_S, Target, TargetError, find_target

    found = find_target(target)
    look = LOOK_S if isinstance(found, Target) else LOOK_AWAY_S
    state = asyncio.run(watch_for(found.sources(), look))
    if not state.sources:
        raise TargetError(f"{target} did not tell anything within {look:g} s")
    return state


def observed(target: str, seconds: float = 30.0) -> TraceState:
    """As `state_of`, with what a diagnosis wants to know over time kept as well, and more requests and steps. A live
    target is watched for so many seconds.

    Raises what `state_of` raises.
    """
    from tracer.analysis.diagnosis.series import ObservedState

    if not is_trace(target):
        import asyncio

        from tracer.follow import watch_for
        from tracer.targets import TargetError, find_target
        from tracer.text import clean

        chosen = find_target(target)
        print(f"tracer: watching {clean(chosen.name)} for {seconds:g} s", file=sys.stderr)
        watched = ObservedState()
        watched.quotes = False
        asyncio.run(watch_for(chosen.sources(), seconds, watched))
        if not watched.sources:
            raise TargetError(f"{target} did not tell anything within {seconds:g} s")
        return watched
    from tracer.trace_file import TraceFile

    state = ObservedState(keep_finished=20_000, keep_steps=200_000, keep_streams=12_000)
    with TraceFile(target) as trace:
        for delivery in trace.deliveries():
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            for event in delivery.events:
                state.apply(delivery.source, event)
        say_about(trace)
    return state


def say_about(trace: TraceFile) -> None:
    """Say on stderr what is wrong with a file that was read, and whether it holds what people wrote."""
    from tracer.text import clean

    name = clean(trace.path.name)
    for problem in trace.problems[:PROBLEMS]:
        print(f"tracer: {name} {clean(problem)}", file=sys.stderr)
    if len(trace.problems) > PROBLEMS:
        print(f"tracer: {name}: {len(trace.problems) - PROBLEMS} more places are damaged", file=sys.stderr)
    if trace.with_text:
        print(f"tracer: {name} holds prompts and outputs: it was recorded --with-text", file=sys.stderr)


def replay(options: argparse.Namespace) -> int:
    """Show a recorded trace in the same screens."""
    from tracer.player import Player
    from tracer.screen import show_replay
    from tracer.targets import TargetError

    if not has_screen():
        raise TargetError(f"no terminal to replay {options.file} in; print it once with: tracer show {options.file}")

    player = Player.open(options.file, speed=options.speed, loop=options.loop, paused=options.paused)
    try:
        if options.at:
            player.seek(_instant(options.at, player.trace))
        return show_replay(player, Path(options.file).name, slo=options.slo)
    finally:
        player.close()


def diagnose(options: argparse.Namespace) -> int:
    """Name the stage that makes a trace slow, with the evidence."""
    import json

    from tracer.analysis.diagnosis import command
    from tracer.export.diagnosis_text import diagnosis_text

    answer = command.run(options, functools.partial(observed, seconds=options.seconds))
    if options.json:
        print(json.dumps(answer.diagnosis.to_document(), indent=2))
    else:
        print(diagnosis_text(answer.diagnosis, width=width(), unicode=has_bars()).rstrip("\n"))
    return answer.code


def budget(options: argparse.Namespace) -> int:
    """What the twelve stages must take, by model, device and load."""
    from tracer.budget_command import run

    return run(options)


def _instant(text: str, trace: TraceFile) -> int:
    """``30`` or ``1:30`` (since the begin) or ``50%`` as ns of the trace's clock. Raises TargetError."""
    from tracer.places import PlaceError, instant
    from tracer.targets import TargetError

    try:
        return instant(text, trace)
    except PlaceError as error:
        raise TargetError(str(error)) from None


def add_commands(command: Command, wanted: str) -> None:
    """Put the commands of this module on the command line; only `wanted` one gets all its arguments, since those of the
    analyses need numpy to be told."""
    one = command("replay", replay,
        "  tracer replay slow.trace\n"
        "  tracer replay slow.trace --speed 10 --at 1:30")  # fmt: skip
    one.add_argument("file", metavar="FILE", help="a recorded trace")
    one.add_argument("--speed", type=arguments.speed, default=1.0, metavar="X",
                     help="0.1 to 100 times the pace (default 1)")  # fmt: skip
    one.add_argument("--at", metavar="TIME", help="where to begin: 90, 1:30 or 50%%")
    one.add_argument("--loop", action="store_true", help="begin again at the end")
    one.add_argument("--paused", action="store_true", help="begin paused; space plays")
    add_slo(one)

    one = command("diagnose", diagnose,
        "  tracer diagnose slow.trace\n"
        "  tracer diagnose slow.trace --baseline good.trace --fail-on admission\n"
        "  tracer diagnose 4711 --seconds 60")  # fmt: skip
    if wanted == "diagnose":
        from tracer.analysis.diagnosis.command import add_arguments

        add_arguments(one)

    one = command("budget", budget,
        "  tracer budget --model llama-3.1-8b --device h100-sxm --prompt 2000 --output 300\n"
        "  tracer budget --model ./my-model --device cpu --batch 8 --json\n"
        "  tracer budget --screen            sliders; also what a terminal gets without any flag\n"
        "  tracer budget --journey           one request, stage by stage, for an audience\n"
        "  tracer budget --fit slow.trace    which shares of the device the engine reached\n"
        "  tracer budget --what-if slow.trace prefix-cache=on max-num-seqs=64")  # fmt: skip
    if wanted == "budget":
        from tracer.analysis.options import add_arguments as add_budget_arguments

        add_budget_arguments(one)
        one.add_argument("--json", action="store_true", help="as JSON on stdout")

"""The state of what a user names: a recorded trace, or an engine that runs."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracer.recording.trace_file import TraceFile
    from tracer.state.trace_state import TraceState

PROBLEMS = 3
"""Sentences said about a damaged file."""


def is_trace(target: str) -> bool:
    """Whether a target names a file, not a process (by its socket, perhaps): what is there and is
    neither folder nor socket, or what is called like a trace."""
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
        from tracer.recording.trace_file import TraceFile
        from tracer.replay.cursor import load_open

        with TraceFile(target) as trace:
            loaded = load_open(trace)
            say_about(trace)
            return loaded
    from tracer.transport.follow import watch_for
    from tracer.transport.targets import LOOK_AWAY_S, LOOK_S, Target, TargetError, find_target

    found = find_target(target)
    look = LOOK_S if isinstance(found, Target) else LOOK_AWAY_S
    state = asyncio.run(watch_for(found.sources(), look))
    if not state.sources:
        raise TargetError(f"{target} did not tell anything within {look:g} s")
    return state


def observed(target: str, seconds: float = 30.0) -> TraceState:
    """As `state_of`, with what a diagnosis wants to know over time kept as well, and more requests
    and steps. A live target is watched for so many seconds.

    Raises what `state_of` raises.
    """
    from tracer.analysis.diagnosis.series import ObservedState

    if not is_trace(target):
        import asyncio

        from tracer.format.text import clean
        from tracer.transport.follow import watch_for
        from tracer.transport.targets import TargetError, find_target

        chosen = find_target(target)
        print(f"tracer: watching {clean(chosen.name)} for {seconds:g} s", file=sys.stderr)
        watched = ObservedState()
        watched.quotes = False
        asyncio.run(watch_for(chosen.sources(), seconds, watched))
        if not watched.sources:
            raise TargetError(f"{target} did not tell anything within {seconds:g} s")
        return watched
    from tracer.recording.trace_file import TraceFile

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
    """Say on stderr what is wrong with a file that was read, and whether it holds what people
    wrote."""
    from tracer.format.text import clean

    name = clean(trace.path.name)
    for problem in trace.problems[:PROBLEMS]:
        print(f"tracer: {name} {clean(problem)}", file=sys.stderr)
    if len(trace.problems) > PROBLEMS:
        print(
            f"tracer: {name}: {len(trace.problems) - PROBLEMS} more places are damaged",
            file=sys.stderr,
        )
    if trace.with_text:
        print(
            f"tracer: {name} holds prompts and outputs: it was recorded --with-text",
            file=sys.stderr,
        )

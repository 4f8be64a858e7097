"""The state of what a user names: a recorded trace, or a live engine."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Final

from tracer.analysis.diagnosis.series import ObservedState
from tracer.cli.status_line import report
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import load_open
from tracer.state.trace_state import TraceState
from tracer.transport.follow import watch_for
from tracer.transport.ssh.remote import RemoteTarget
from tracer.transport.targets import WATCH_REMOTE_S, WATCH_S, Target, TargetError, find_target

PROBLEMS: Final = 3
"""Lines about a damaged file."""


def is_trace(target: str) -> bool:
    """Return True when a target names a file, not a process (by its socket, perhaps): a path that
    is neither folder nor socket, or a name that ends like a trace's."""
    if target.endswith(".trace"):
        return True
    try:
        mode = Path(target).stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISDIR(mode) or stat.S_ISSOCK(mode))


def state_of(target: str) -> TraceState:
    """Return the state at the end of a trace file, or of a live target now.

    Raises TraceFileError, TargetError or OSError.
    """
    if is_trace(target):
        with TraceFile(target) as trace:
            loaded = load_open(trace)
            report_problems(trace)
            return loaded
    found = find_target(target)
    seconds = WATCH_S if isinstance(found, Target) else WATCH_REMOTE_S
    return _watched(found, seconds, TraceState())


def observed(target: str, seconds: float = 30.0) -> TraceState:
    """Return the state as `state_of` does, with the history that a diagnosis needs, and more
    requests and steps. A live target is watched for so many seconds.

    Raises what `state_of` raises.
    """
    if is_trace(target):
        state = ObservedState(keep_finished=20_000, keep_steps=200_000, keep_streams=12_000)
        with TraceFile(target) as trace:
            for delivery in trace.deliveries():
                state.feed(delivery)
            report_problems(trace)
        return state
    found = find_target(target)
    report(f"watching {found.name} for {seconds:g} s")
    state = ObservedState()
    state.quotes = False
    return _watched(found, seconds, state)


def _watched(target: Target | RemoteTarget, seconds: float, state: TraceState) -> TraceState:
    asyncio.run(watch_for(target.sources(), seconds, state))
    if not state.sources:
        raise TargetError(f"{target.name} sent nothing within {seconds:g} s")
    return state


def report_problems(trace: TraceFile) -> None:
    """Report what is wrong with a file that was read, and that it holds what people wrote."""
    name = trace.path.name
    for problem in trace.problems[:PROBLEMS]:
        report(f"{name} {problem}")
    if len(trace.problems) > PROBLEMS:
        report(f"{name}: {len(trace.problems) - PROBLEMS} more places are damaged")
    if trace.with_text:
        report(f"{name} holds prompts and outputs: it was recorded --with-text")

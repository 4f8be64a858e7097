"""Options by which commands record, or keep the last minutes ready until something happens."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tracer.cli import arguments

if TYPE_CHECKING:
    from engine_hooks.protocol.recorder import Recorder
    from tracer.recording.flight import FlightRecorder

Say = Callable[[str], None]


def new_recorder(path: Path, with_text: bool) -> Recorder:
    """A recorder that says on stderr when it can write no more. Raises TraceFileError."""
    from engine_hooks.protocol.recorder import Recorder
    from tracer.recording.keyframes.keyframer import Keyframer

    return Recorder(path, with_text=with_text, keyframes=Keyframer(), on_error=say)


def new_flight(options: argparse.Namespace, path: Path | None, say: Say) -> FlightRecorder | None:
    """The flight recorder that the options ask for, None when they ask for none. `path`: folder or
    file name that it writes to, default the working folder.

    Raises TargetError in one line for rules that are none and for a folder that cannot be written
    to.
    """
    from tracer.monitor.live_findings import live_findings
    from tracer.recording.triggers import RuleError, parse
    from tracer.transport.targets import TargetError

    if options.flight_recorder is None:
        if options.on:
            raise TargetError(
                f"--on {options.on[0]} says when a flight recorder writes: add --flight-recorder 5m"
            )
        return None
    try:
        rules = [parse(text, live_findings()) for text in options.on]
    except RuleError as error:
        raise TargetError(f"--on {error}") from None
    place = Path() if path is None else path
    folder = place if place.is_dir() or not place.suffix else place.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(f"cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise TargetError(f"cannot record into {folder}: permission denied")
    from tracer.recording.flight import FlightRecorder

    return FlightRecorder(
        place, options.flight_recorder, rules, with_text=options.with_text, on_error=say,
        on_written=lambda written, why: say(f"flight recording {written}: {why}"),
    )  # fmt: skip


def say(sentence: str) -> None:
    """Say one line on stderr."""
    from tracer.cli.status_line import Voice

    Voice().say(sentence)


def add_flight_arguments(parser: argparse.ArgumentParser) -> None:
    """The flight recorder's options."""
    parser.add_argument(
        "--flight-recorder",
        type=arguments.minutes,
        metavar="5m",
        help="keep the last minutes in memory, and write them only when a rule of --on fires, on "
        "SIGUSR1, or on the key R",
    )
    parser.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="RULE",
        help="when: ttft_p95>2s, itl_p99@10s>80ms, waiting>20, kv>95%%, preemption, stall, dead, "
        "gap, "
        "failed, finding; may be given several times",
    )

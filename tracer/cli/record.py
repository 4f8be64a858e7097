"""``tracer record``: a recording of an engine."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.recorder import Recorder
from tracer.cli import arguments
from tracer.cli.arguments import flag, option
from tracer.cli.commands import UsageError
from tracer.cli.status_line import report
from tracer.launch.headless import SIGNALS
from tracer.monitor.live_findings import live_findings
from tracer.recording import event_columns
from tracer.recording.flight import FlightRecorder
from tracer.recording.triggers import RuleError, parse
from tracer.transport.bus import Bus
from tracer.transport.targets import find_target

EXAMPLES = """\
  tracer record 4711 -o slow.trace
  tracer record vllm -o slow.trace --seconds 300 --with-text
  tracer record vllm -o flights/ --flight-recorder 5m --on 'ttft_p95>2s' --on finding"""


def run(options: argparse.Namespace) -> int:
    flight = new_flight(options, options.output, report)
    target = find_target(options.target)
    bus = Bus()
    for source in target.sources():
        bus.add(source)
    if flight is not None:
        minutes = options.flight_recorder
        kept = f"{minutes * 60:g} s" if minutes < 1 else f"{minutes:g} min"
        when = f"when {' or '.join(options.on)}" if options.on else "when asked"
        report(
            f"keeping the last {kept} of {target.name}; written {when}, or on: kill -USR1 "
            f"{os.getpid()}; Ctrl-C ends it"
        )

        async def fly() -> None:
            flight.watch_signal()
            await flight.run(bus.subscribe())

        asyncio.run(_until_asked(fly, bus, options.seconds))
        return 2 if flight.error else 0
    recorder = new_recorder(options.output, options.with_text)
    report(f"recording {target.name} to {options.output}; Ctrl-C ends it")
    asyncio.run(_until_asked(lambda: recorder.run(bus.subscribe()), bus, options.seconds))
    left_out = f"; {recorder.missed:,} events were left out" if recorder.missed else ""
    report(f"{recorder.events:,} events, {recorder.size:,} bytes in {options.output}{left_out}")
    return 2 if recorder.error else 0


async def _until_asked(
    record: Callable[[], Coroutine[Any, Any, None]], bus: Bus, seconds: float | None
) -> None:
    """Record what the bus carries until a signal comes, the time is over, or either has ended."""
    asked = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(record())]
    tasks += [asyncio.create_task(bus.run()), asyncio.create_task(asked.wait())]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_recorder(path: Path, with_text: bool) -> Recorder:
    """Return a recorder that reports when it can write no more. Raises TraceFileError."""
    return Recorder(path, with_text=with_text, encode=event_columns.encode, on_error=report)


def new_flight(
    options: argparse.Namespace, path: Path | None, report: Callable[[str], None]
) -> FlightRecorder | None:
    """Return the flight recorder that the options ask for, None when they ask for none. `path`:
    folder or file name that it writes to, default the working folder.

    Raises UsageError for wrong rules and for a folder that cannot be written to.
    """
    if options.flight_recorder is None:
        if options.on:
            rule = options.on[0]
            raise UsageError(
                f"--on {rule} is for a flight recorder: add for example --flight-recorder 5m"
            )
        return None
    try:
        rules = [parse(text, live_findings()) for text in options.on]
    except RuleError as error:
        raise UsageError(f"--on {error}") from None
    place = Path() if path is None else path
    folder = place if place.is_dir() or not place.suffix else place.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {why(error)}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot record into {folder}: permission denied")
    return FlightRecorder(
        place, options.flight_recorder, rules, with_text=options.with_text, on_error=report,
        on_written=lambda written, why: report(f"flight recording {written}: {why}"),
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "target", "TARGET", "a pid, a name as in tracer attach --list, or a socket")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE",
        help="the file to write; with --flight-recorder a folder, or a name to which the time is "
        "added",
    )  # fmt: skip
    arguments.add_seconds(parser, "end after N seconds")
    flag(parser, "--with-text", "record prompts and outputs too")
    arguments.add_flight_recorder(parser)

"""``tracer record``: what an engine does, in a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tracer.cli import arguments
from tracer.cli.command import Command
from tracer.cli.recording_options import add_flight_arguments, new_flight, new_recorder, say

if TYPE_CHECKING:
    from engine_hooks.protocol.recorder import Recorder
    from tracer.recording.flight import FlightRecorder
    from tracer.transport.bus import Bus


def run(options: argparse.Namespace) -> int:
    """Record what an engine does, or keep its last minutes ready until something happens."""
    import asyncio

    from tracer.transport.bus import Bus
    from tracer.transport.targets import find_target

    flight = new_flight(options, options.output, say)
    target = find_target(options.target)
    bus = Bus()
    for source in target.sources():
        bus.add(source)
    if flight is not None:
        say(
            f"the last {_length(options.flight_recorder)} of {target.name} are kept; written "
            f"{_when(options.on)}, "
            f"or on: kill -USR1 {os.getpid()}; Ctrl-C ends it"
        )
        asyncio.run(_fly(flight, bus, options.seconds))
        return 2 if flight.error else 0
    recorder = new_recorder(options.output, options.with_text)
    say(f"recording {target.name} to {options.output}; Ctrl-C ends it")
    asyncio.run(_record(recorder, bus, options.seconds))
    left_out = f"; {recorder.missed:,} events were left out" if recorder.missed else ""
    say(f"{recorder.events:,} events, {recorder.size:,} bytes in {options.output}{left_out}")
    return 2 if recorder.error else 0


async def _record(recorder: Recorder, bus: Bus, seconds: float | None) -> None:
    import asyncio

    await _until_asked(asyncio.create_task(recorder.run(bus.subscribe())), bus, seconds)


async def _fly(flight: FlightRecorder, bus: Bus, seconds: float | None) -> None:
    import asyncio

    flight.watch_signal()
    await _until_asked(asyncio.create_task(flight.run(bus.subscribe())), bus, seconds)


async def _until_asked(writing: object, bus: Bus, seconds: float | None) -> None:
    """Carry events until a signal comes, the time is over, or there is nothing more to carry or to
    write."""
    import asyncio

    from tracer.launch.headless import SIGNALS

    assert isinstance(writing, asyncio.Task)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, asked.set)
    tasks = {writing, asyncio.create_task(bus.run()), asyncio.create_task(asked.wait())}
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _length(minutes: float) -> str:
    return f"{minutes * 60:g} s" if minutes < 1 else f"{minutes:g} min"


def _when(rules: list[str]) -> str:
    return "when " + " or ".join(rules) if rules else "when asked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, the file, and when to write it."""
    add = parser.add_argument
    add("target", metavar="TARGET", help="a pid, a name as in tracer attach --list, or a socket")
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=(
            "the file to write; with --flight-recorder a folder, or a name to which the time is "
            "added"
        ),
    )
    add("--seconds", type=arguments.seconds, metavar="N", help="end after N seconds")
    add("--with-text", action="store_true", help="record prompts and outputs too")
    add_flight_arguments(parser)


COMMAND = Command(
    "record",
    "record what an engine does, or keep its last minutes ready until something happens",
    "  tracer record 4711 -o slow.trace\n"
    "  tracer record vllm -o slow.trace --seconds 300 --with-text\n"
    "  tracer record vllm -o flights/ --flight-recorder 5m --on 'ttft_p95>2s' --on finding",
    add_arguments,
    run,
)

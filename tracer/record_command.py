"""Recording from the command line: `tracer record`, and the flight recorder's options of `tracer run` and `demo`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tracer import arguments
from tracer.arguments import Command

if TYPE_CHECKING:
    from tracer.bus import Bus
    from tracer.flight import FlightRecorder
    from tracer.recording import Recorder
    from tracer.state.trace_state import TraceState

Say = Callable[[str], None]


def new_recorder(path: Path, with_text: bool) -> Recorder:
    """A recorder that says on stderr when it can write no more. Raises TraceFileError."""
    from tracer.keyframes.keyframer import Keyframer
    from tracer.recording import Recorder

    return Recorder(path, with_text=with_text, keyframes=Keyframer(), on_error=_say)


def new_flight(options: argparse.Namespace, path: Path | None, say: Say) -> FlightRecorder | None:
    """The flight recorder that the options ask for, None when they ask for none. `path`: folder or file name that it
    writes to, default the working folder.

    Raises TargetError in one line for rules that are none and for a folder that cannot be written to.
    """
    from tracer.targets import TargetError
    from tracer.triggers import RuleError, parse

    if options.flight_recorder is None:
        if options.on:
            raise TargetError(f"--on {options.on[0]} says when a flight recorder writes: add --flight-recorder 5m")
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
    from tracer.flight import FlightRecorder

    return FlightRecorder(
        place, options.flight_recorder, rules, with_text=options.with_text, on_error=say,
        on_written=lambda written, why: say(f"flight recording {written}: {why}"),
    )  # fmt: skip


def live_findings() -> Callable[[TraceState], Iterable[str]]:
    """What the rule ``finding`` asks: a diagnosis that goes on. It tells each finding once."""
    from tracer.analysis.diagnosis.live import LiveDiagnosis

    live = LiveDiagnosis()
    return lambda state: [finding.statement for finding in live.update(state)]


def record(options: argparse.Namespace) -> int:
    """Record what an engine does, or keep its last minutes ready until something happens."""
    import asyncio

    from tracer.bus import Bus
    from tracer.targets import find_target

    flight = new_flight(options, options.output, _say)
    target = find_target(options.target)
    bus = Bus()
    for source in target.sources():
        bus.add(source)
    if flight is not None:
        _say(f"the last {_length(options.flight_recorder)} of {target.name} are kept; written {_when(options.on)}, "
             f"or on: kill -USR1 {os.getpid()}; Ctrl-C ends it")  # fmt: skip
        asyncio.run(_fly(flight, bus, options.seconds))
        return 2 if flight.error else 0
    recorder = new_recorder(options.output, options.with_text)
    _say(f"recording {target.name} to {options.output}; Ctrl-C ends it")
    asyncio.run(_record(recorder, bus, options.seconds))
    left_out = f"; {recorder.missed:,} events were left out" if recorder.missed else ""
    _say(f"{recorder.events:,} events, {recorder.size:,} bytes in {options.output}{left_out}")
    return 2 if recorder.error else 0


async def _record(recorder: Recorder, bus: Bus, seconds: float | None) -> None:
    import asyncio

    await _until_asked(asyncio.create_task(recorder.run(bus.subscribe())), bus, seconds)


async def _fly(flight: FlightRecorder, bus: Bus, seconds: float | None) -> None:
    import asyncio

    flight.watch_signal()
    await _until_asked(asyncio.create_task(flight.run(bus.subscribe())), bus, seconds)


async def _until_asked(writing: object, bus: Bus, seconds: float | None) -> None:
    """Carry events until a signal comes, the time is over, or there is nothing more to carry or to write."""
    import asyncio

    from tracer.headless import SIGNALS

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


def _say(sentence: str) -> None:
    from tracer.voice import Voice

    Voice().say(sentence)


# --- arguments --------------------------------------------------------------------------------------------------------


def add_flight_arguments(parser: argparse.ArgumentParser) -> None:
    """The flight recorder's options."""
    parser.add_argument("--flight-recorder", type=arguments.minutes, metavar="5m",
                        help="keep the last minutes in memory, and write them only when a rule of --on fires, on "
                             "SIGUSR1, or on the key R")  # fmt: skip
    parser.add_argument("--on", action="append", default=[], metavar="RULE",
                        help="when: ttft_p95>2s, itl_p99@10s>80ms, waiting>20, kv>95%%, preemption, stall, dead, gap, "
                             "failed, finding; may be given several times")  # fmt: skip


def add_commands(command: Command, wanted: str) -> None:
    """Put `tracer record` on the command line."""
    one = command("record", record,
        "  tracer record 4711 -o slow.trace\n"
        "  tracer record vllm -o slow.trace --seconds 300 --with-text\n"
        "  tracer record vllm -o flights/ --flight-recorder 5m --on 'ttft_p95>2s' --on finding")  # fmt: skip
    one.add_argument("target", metavar="TARGET", help="a pid, a name as in tracer attach --list, or a socket")
    one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE",
                     help="the file to write; with --flight-recorder a folder, or a name to which the time is "
                          "added")  # fmt: skip
    one.add_argument("--seconds", type=arguments.seconds, metavar="N", help="end after N seconds")
    one.add_argument("--with-text", action="store_true", help="record prompts and outputs too")
    add_flight_arguments(one)

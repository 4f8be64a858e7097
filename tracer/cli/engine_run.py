"""A run with or without a screen: what `tracer run` and `tracer demo` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracer.cli import arguments
from tracer.cli.command import UsageError
from tracer.cli.monitor_options import add_monitor_arguments
from tracer.cli.output import print_summary, print_text
from tracer.cli.recording_options import add_flight_arguments, new_flight, new_recorder
from tracer.cli.stdout import has_screen

if TYPE_CHECKING:
    from tracer.launch.run import Job


def run_job(job: Job, options: argparse.Namespace, *, traffic: Any, mode: str) -> int:
    """Run a job, with or without a screen, and return the exit code."""
    from engine_hooks.protocol.environment import traced_environment
    from tracer.cli.status_line import Voice
    from tracer.launch.run import Run, RunError
    from tracer.monitor.outlets import Outlets

    voice = Voice()
    headless = options.headless or options.json or options.seconds is not None
    if not headless and not has_screen():
        voice.say("no terminal here: running as with --headless")
        headless = True
    outlets = Outlets.open(options, voice.say)
    try:
        flight = new_flight(options, options.record, voice.say)
        whole = options.record is not None and flight is None
        recorder = new_recorder(options.record, options.with_text) if whole else None
        this = Run(
            job,
            traced_environment,
            voice.say,
            log=options.log,
            on_line=voice.line if headless else None,
            recorder=recorder,
            flight=flight,
        )
    except OSError as error:
        place = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UsageError(f"cannot start a run: {place}") from error
    this.outlets = outlets
    try:
        if headless:
            return _headless(this, options)
        from tracer.cli.screen import show_run

        return show_run(
            this, voice, traffic=traffic, mode=mode, with_text=options.with_text, slo=options.slo
        )
    except RunError as error:
        for line in () if headless else this.tail():
            voice.line(line)
        voice.say(str(error))
        return error.code
    finally:
        outlets.close()
        this.close()


def _headless(this: Any, options: argparse.Namespace) -> int:
    import asyncio

    from tracer.launch.headless import attend

    outcome = asyncio.run(attend(this, options.seconds, options.slo, with_text=options.with_text))
    if not this.traced:
        this.say(this.untraced)
    facts = {"name": this.name, "command": this.job.title, "exit_code": outcome.exit_code,
             "seconds": round(this.seconds, 3), "log": this.log.path}  # fmt: skip
    more = {
        "run": facts,
        "diagnosis": outcome.diagnosis.summary(),
        **this.job.extra(outcome.snapshot),
        **this.outlets.extra(outcome.snapshot.began),
    }
    print_summary(outcome.snapshot, options.json, more)
    if not options.json:
        from tracer.format.text import clean

        print_text(f"\ndiagnosis: {clean(outcome.diagnosis.verdict)}")
    return outcome.exit_code or this.outlets.exit_code


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a run can be told beside what it runs."""
    add = parser.add_argument
    add(
        "--headless",
        action="store_true",
        help="no screen: the engine's output on stderr, a summary at the end",
    )
    add(
        "--seconds",
        type=arguments.seconds,
        metavar="N",
        help="end after N seconds of service (implies --headless)",
    )
    add("--json", action="store_true", help="the summary as JSON on stdout (implies --headless)")
    add("--record", type=Path, metavar="FILE", help="record what happens to FILE, to be replayed")
    add("--with-text", action="store_true", help="record prompts and outputs too")
    add_flight_arguments(parser)
    add_monitor_arguments(parser)
    add(
        "--log",
        type=Path,
        metavar="FILE",
        help="append the engine's output to FILE, not to one in the log folder",
    )
    arguments.add_slo(parser)

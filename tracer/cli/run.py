"""``tracer run``: an unmodified command with the hooks on, with or without a screen."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from engine_hooks.protocol.block_file import why
from tracer.cli import arguments
from tracer.cli.arguments import flag, option
from tracer.cli.commands import UsageError
from tracer.cli.output import has_screen, print_summary, print_text
from tracer.cli.record import new_flight, new_recorder
from tracer.cli.status_line import StatusLine
from tracer.format.text import clean
from tracer.launch.run import Command, Job, Run, RunError
from tracer.monitor.monitor import Monitor

if TYPE_CHECKING:
    from tracer.demo.traffic import Traffic

EXAMPLES = """\
  tracer run -- vllm serve MODEL
  tracer run -- transformers serve MODEL --continuous-batching
  tracer run --headless --seconds 60 --json -- python app.py"""


def run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("no command given; for example: tracer run -- vllm serve MODEL")
    return run_job(Command(command), options, mode="live")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    what = "the command, as you would type it"
    option(parser, "command", "-- CMD …", what, nargs=argparse.REMAINDER)


def run_job(
    job: Job, options: argparse.Namespace, *, mode: str, traffic: Traffic | None = None
) -> int:
    """Run a job, with or without a screen, and return the exit code."""
    status = StatusLine()
    headless = options.headless or options.json or options.seconds is not None
    if not headless and not has_screen():
        status.report("no terminal here: running as with --headless")
        headless = True
    monitor = Monitor.open(options, status.report)
    this: Run | None = None
    try:
        this = _new_run(job, options, status, headless)
        this.monitor = monitor
        if headless:
            return _headless(this, monitor, options)
        from tracer.cli.screen import show_run

        return show_run(this, status, monitor, options, traffic=traffic, mode=mode)
    except RunError as error:
        if this is not None and not headless:
            for line in this.tail():
                status.pass_on(line)
        status.report(str(error))
        return error.code
    finally:
        monitor.close()
        if this is not None:
            this.close()


def _new_run(job: Job, options: argparse.Namespace, status: StatusLine, headless: bool) -> Run:
    """Return the run that the options ask for. Raises UsageError."""
    try:
        flight = new_flight(options, options.record, status.report)
        whole = options.record is not None and flight is None
        return Run(
            job,
            status.report,
            log=options.log,
            on_line=status.pass_on if headless else lambda _: None,
            recorder=new_recorder(options.record, options.with_text) if whole else None,
            flight=flight,
        )
    except OSError as error:
        place = f"{error.filename}: {why(error)}" if error.filename else str(error)
        raise UsageError(f"cannot start a run: {place}") from error


def _headless(run: Run, monitor: Monitor, options: argparse.Namespace) -> int:
    from tracer.launch.headless import attend

    outcome = asyncio.run(attend(run, options.seconds, options.slo, with_text=options.with_text))
    if not run.traced:
        run.report(run.untraced)
    snapshot, diagnosis = outcome.snapshot, outcome.diagnosis
    facts = {"name": run.name, "command": run.job.title, "exit_code": outcome.exit_code,
             "seconds": round(run.seconds, 3), "log": run.log.path}  # fmt: skip
    more = {
        "run": facts,
        "diagnosis": diagnosis.summary(),
        **run.job.extra(snapshot),
        **monitor.extra(snapshot.began),
    }
    print_summary(snapshot, options.json, more)
    if not options.json:
        print_text(f"\ndiagnosis: {clean(diagnosis.verdict)}")
    return outcome.exit_code or monitor.exit_code


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--headless", "no screen: the engine's output on stderr, a summary at the end")
    arguments.add_seconds(parser, "end after N seconds of service (implies --headless)")
    flag(parser, "--json", "the summary as JSON on stdout (implies --headless)")
    option(parser, "--record", "FILE", "record to FILE, to be replayed", type=Path)
    flag(parser, "--with-text", "record prompts and outputs too")
    arguments.add_flight_recorder(parser)
    arguments.add_monitor(parser)
    log = "append the engine's output to FILE, not to one in the log folder"
    option(parser, "--log", "FILE", log, type=Path)
    arguments.add_slo(parser)

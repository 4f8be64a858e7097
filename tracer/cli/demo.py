"""``tracer demo``: a real model under real traffic."""

from __future__ import annotations

import argparse
from pathlib import Path

from tracer.cli import arguments
from tracer.cli.arguments import option
from tracer.cli.run import add_run_arguments, run_job
from tracer.demo.demo import Demo
from tracer.demo.faults import FAULTS, Fault, FaultError, fault
from tracer.demo.launch import LAUNCHERS

EXAMPLES = """\
  tracer demo
  tracer demo --rate 2 --seed 7
  tracer demo --model ./my-model
  tracer demo --fault slow-sampler@20    # goes wrong 20 s after the first request
  tracer demo --headless --seconds 30 --json > demo.json"""


def run(options: argparse.Namespace) -> int:
    job = Demo(
        options.engine,
        options.model,
        options.rate,
        options.seed,
        stopwatch=options.stopwatch,
        fault=options.fault,
    )
    return run_job(job, options, mode="demo", traffic=job.traffic)


def _fault(text: str) -> Fault:
    try:
        return fault(text)
    except FaultError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines = list(LAUNCHERS)
    parser.add_argument(
        "--engine", choices=engines, default=engines[0], help="which engine to start"
    )
    option(parser, "--model", "FOLDER|ID", "which model (default: a 135M chat model, fetched once)")
    rate = "requests a second (default 0.5, or what --fault needs)"
    option(parser, "--rate", "R", rate, type=arguments.rate)
    seed = "seed of the traffic (default 0)"
    option(parser, "--seed", "N", seed, type=arguments.whole_number, default=0)
    stopwatch = "write what each client measured, one JSON object per line"
    option(parser, "--stopwatch", "FILE", stopwatch, type=Path)
    option(
        parser, "--fault", "NAME",
        f"a real fault, for the diagnosis to find: {', '.join(FAULTS)}; NAME@20 starts after 20 s, "
        "NAME+NAME has two at once",
        type=_fault,
    )  # fmt: skip
    add_run_arguments(parser)

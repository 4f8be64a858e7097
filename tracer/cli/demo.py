"""``tracer demo``: a real model under real traffic."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tracer.cli import arguments
from tracer.cli.command import Command
from tracer.cli.engine_run import add_run_arguments, run_job

ENGINES: Final = ("transformers", "vllm")
"""What can be started: the keys of `tracer.demo.demo.LAUNCHERS`, here so that --help need not load
them."""


def run(options: argparse.Namespace) -> int:
    """Run an embedded model under real traffic and watch it."""
    from tracer.demo.demo import Demo

    job = Demo(
        options.engine,
        options.model,
        options.rate,
        options.seed,
        stopwatch=options.stopwatch,
        fault=options.fault,
    )
    return run_job(job, options, traffic=job.traffic, mode="demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine, the model, its traffic and its faults, and the options of a run."""
    from tracer.demo.faults import FAULTS, FaultError, fault

    def chosen(text: str) -> object:
        try:
            return fault(text)
        except FaultError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    add = parser.add_argument
    add("--engine", choices=ENGINES, default=ENGINES[0], help="which engine to start")
    add(
        "--model",
        metavar="FOLDER|ID",
        help="which model (default: a 135M chat model, fetched once)",
    )
    add(
        "--rate",
        type=arguments.rate,
        metavar="R",
        help="arrivals a second (default 0.5, or what --fault needs)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the traffic (default 0)")
    add(
        "--stopwatch",
        type=Path,
        metavar="FILE",
        help="write what each client measured, one JSON object per line",
    )
    add(
        "--fault",
        type=chosen,
        metavar="NAME",
        help=f"a real fault, for the diagnosis to find: {', '.join(FAULTS)}; NAME@20 starts it "
        "after 20 s, NAME+NAME "
        "has two at once",
    )
    add_run_arguments(parser)


COMMAND = Command(
    "demo",
    "run an embedded model under real traffic and watch it",
    "  tracer demo\n"
    "  tracer demo --rate 2 --seed 7\n"
    "  tracer demo --model ./my-model\n"
    "  tracer demo --fault slow-sampler@20    # goes wrong 20 s after the first request\n"
    "  tracer demo --headless --seconds 30 --json > demo.json",
    add_arguments,
    run,
)

"""``tracer doctor``: what is hooked, and what is not and why."""

from __future__ import annotations

import argparse

from tracer.cli.command import Command, no_arguments
from tracer.cli.output import print_text


def run(_options: argparse.Namespace) -> int:
    """Print the report."""
    from tracer.cli.doctor_report import report

    print_text("\n".join(report()))
    return 0


COMMAND = Command(
    "doctor",
    "say what is hooked, what is not and why, versions and sockets",
    "  tracer doctor",
    no_arguments,
    run,
)

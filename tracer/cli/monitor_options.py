"""Options by which commands serve metrics, send them, and watch alerts."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_monitor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tracer.monitor.outlets.Outlets.open` reads."""
    add = parser.add_argument
    add(
        "--metrics",
        metavar="ADDR",
        help="serve OpenMetrics at ADDR: 9464, 127.0.0.1:9464; port 0 takes any",
    )
    add(
        "--otlp-metrics",
        metavar="URL",
        help="send metrics to an OpenTelemetry collector: http://127.0.0.1:4318",
    )
    add("--alerts", type=Path, metavar="FILE", help="watch the alerts of a TOML file")

"""Arguments that several commands take, and how their values are read."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tracer.state.metrics.slo import NO_TARGETS, Slo, SloError, parse

MOST_SECONDS: Final = 1e7
MOST_MINUTES: Final = 240.0
_UNITS: Final = {"s": 1 / 60, "m": 1.0, "min": 1.0, "h": 60.0}
_LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h)")

# --- values ---------------------------------------------------------------------------------------


def _number(least: float, most: float, what: str) -> Callable[[str], float]:
    """Return a reader of numbers from `least` to `most`, which raises ArgumentTypeError."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # within no bounds
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be {what}")
        return value

    return read


seconds = _number(math.ulp(0.0), MOST_SECONDS, "a number of seconds above 0")
rate = _number(0.0, 1000.0, "0 to 1000 requests a second")
speed = _number(0.1, 100.0, "0.1 to 100")


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be a whole number") from None


def minutes(text: str) -> float:
    """Read ``5m``, ``90s``, ``1h`` as minutes."""
    match = _LENGTH.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value <= MOST_MINUTES:
        what = f"a duration such as 90s, 5m or 1h, at most {MOST_MINUTES:g}m"
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be {what}")
    return value


def port(text: str) -> int:
    """Read a TCP port; 0 for any that is free."""
    if not (text.isascii() and text.isdigit()) or int(text) >= 65_536:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: must be a port from 0 to 65535")
    return int(text)


def _slo(text: str) -> Slo:
    try:
        return parse(text)
    except SloError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- arguments ------------------------------------------------------------------------------------


def option(
    parser: argparse.ArgumentParser, name: str, metavar: str, help: str, **more: Any
) -> None:
    parser.add_argument(name, metavar=metavar, help=help, **more)


def flag(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    parser.add_argument(name, action="store_true", help=help)


def add_target(parser: argparse.ArgumentParser) -> None:
    what = "a recorded trace, a pid, a name as in tracer attach --list, or a socket"
    option(parser, "target", "FILE|TARGET", what)


def add_json(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--json", "as JSON on stdout")


def add_seconds(parser: argparse.ArgumentParser, help: str, default: float | None = None) -> None:
    option(parser, "--seconds", "N", help, type=seconds, default=default)


def add_slo(parser: argparse.ArgumentParser) -> None:
    """Add ``--slo``; its value is a `Slo`."""
    what = "latency targets, as ttft=500ms,itl=50ms"
    option(parser, "--slo", "TARGETS", what, type=_slo, default=NO_TARGETS)


def add_monitor(parser: argparse.ArgumentParser) -> None:
    """Add what `tracer.monitor.monitor.Monitor.open` reads."""
    addresses = "9464, 127.0.0.1:9464; port 0 takes any"
    option(parser, "--metrics", "ADDR", f"serve OpenMetrics at ADDR: {addresses}")
    collector = "send metrics to an OpenTelemetry collector: http://127.0.0.1:4318"
    option(parser, "--otlp-metrics", "URL", collector)
    option(parser, "--alerts", "FILE", "watch the alerts of a TOML file", type=Path)


def add_flight_recorder(parser: argparse.ArgumentParser) -> None:
    """Add what `tracer.cli.record.new_flight` reads."""
    option(
        parser, "--flight-recorder", "5m",
        "keep the last minutes in memory, and write them only when a rule of --on fires, on "
        "SIGUSR1, or on the key R",
        type=minutes,
    )  # fmt: skip
    option(
        parser, "--on", "RULE",
        "when the flight recorder writes: ttft_p95>2s, itl_p99@10s>80ms, waiting>20, kv>95%%, "
        "preemption, stall, dead, gap, failed, finding; may be given several times",
        action="append", default=[],
    )  # fmt: skip

"""Amounts and targets as they are typed on the command line."""

from __future__ import annotations

import argparse
import math
import re
from typing import Final

from tracer.state.metrics.slo import NO_TARGETS, Slo, SloError, parse

MOST_SECONDS: Final = 1e7
MOST_MINUTES: Final = 240.0
_UNITS: Final = {"s": 1 / 60, "m": 1.0, "min": 1.0, "h": 60.0}
_LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h)")


def seconds(text: str) -> float:
    """A number of seconds above 0. Raises ArgumentTypeError, as the others do."""
    value = _number(text)
    if not 0 < value < MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds above 0")
    return value


def minutes(text: str) -> float:
    """``5m``, ``90s``, ``1h`` in minutes."""
    match = _LENGTH.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no length such as 90s, 5m or 1h (at most {MOST_MINUTES:g}m)"
        )
    return value


def rate(text: str) -> float:
    """Arrivals a second, none included."""
    value = _number(text)
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no rate between 0 and 1000 a second")
    return value


def speed(text: str) -> float:
    """A factor of the real pace."""
    value = _number(text)
    if not 0.1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no speed between 0.1 and 100")
    return value


def port(text: str) -> int:
    """A TCP port; 0 for any that is free."""
    if not (text.isascii() and text.isdigit()) or int(text) >= 65_536:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no port")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # within no bounds


def add_slo(parser: argparse.ArgumentParser) -> None:
    """Put ``--slo`` on a command; its value is a `Slo`."""
    parser.add_argument("--slo", type=_argument, default=NO_TARGETS, metavar="TARGETS",
                        help="latency targets, as ttft=500ms,itl=50ms")  # fmt: skip


def _argument(text: str) -> Slo:
    try:
        return parse(text)
    except SloError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

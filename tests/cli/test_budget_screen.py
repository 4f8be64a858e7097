"""``tracer budget`` on a terminal: without flags it is a screen, and leaves the terminal as it
was."""

from __future__ import annotations

import os
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("flags", "first", "key", "then"),
    [
        ([], "299 steps of 6.10 ms", "\x1b[C", "2,200"),
        (["--screen", "--output", "100"], "99 steps of ", "p", "299 steps of "),
        (["--journey"], "one request", "\x1b[C", "1  receive"),
    ],
)
def test_sliders_and_journey_need_no_engine(
    flags: list[str], first: str, key: str, then: str, tmp_path: Path
) -> None:
    env = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    env.pop("NO_COLOR", None)
    shown = Terminal([sys.executable, "-m", "tracer", "budget", *flags], env)
    try:
        shown.wait_for_text(first)
        shown.type(key)
        shown.wait_for_text(then)
        shown.type("q")
        assert shown.wait_for_end() == 0
        assert termios.tcgetattr(shown.slave) == shown.before
    finally:
        shown.close()

"""What can be printed or drawn where our output goes."""

from __future__ import annotations

import os
import shutil
import sys


def width() -> int:
    """Cells of a line: the terminal's, or 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def has_bars() -> bool:
    """Whether stdout can hold the glyphs of bars."""
    try:
        "▏█░…·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def has_screen() -> bool:
    """Whether there is a terminal that can be drawn on, or a browser behind textual-serve."""
    if os.environ.get("TEXTUAL_DRIVER", "").endswith(":WebDriver"):
        return True
    return sys.stdin.isatty() and sys.stderr.isatty() and sys.stdout.isatty() and knows_sequences()


def knows_sequences() -> bool:
    """Whether the terminal says that it can be steered: it names itself, and not as a dumb one."""
    return os.environ.get("TERM", "dumb") != "dumb"

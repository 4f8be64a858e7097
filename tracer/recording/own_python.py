"""Runs one of our own functions in a Python process of its own.

The child finds this very copy of the package, however it was found here (installed, or a checkout
on the path), and nothing else of the caller's folder: a file called ``http.py`` where the user
stands must not be imported by mistake.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

PACKAGES: Final = Path(__file__).resolve().parents[2]
"""The folder that holds the packages `engine_hooks` and `tracer`."""

_BOOT: Final = (
    "import sys; sys.path.append(sys.argv[1]); from {module} import {function}; "
    "sys.exit({function}(sys.argv[2:]))"
)


def own_python(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command that calls ``module.function([arguments])`` and exits with its result."""
    boot = _BOOT.format(module=module, function=function)
    return [sys.executable, "-P", "-c", boot, str(PACKAGES), *arguments]

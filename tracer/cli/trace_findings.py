"""What the diagnosis finds in a trace file, asked of a process of its own: a screen that plays it
goes on drawing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Final

from tracer.analysis.diagnosis.finding import Diagnosis
from tracer.format.text import clean

PACKAGES: Final = Path(__file__).resolve().parents[2]
_BOOT: Final = (
    "import os, sys; sys.path.append(sys.argv.pop(1)); os.nice(5); "
    "from tracer.cli.main import main; sys.exit(main())"
)
"""Finds this very copy of the package, whatever lies in the user's folder, and gives way to the
screen."""


async def diagnosis_of(path: Path, began: int) -> Diagnosis:
    """The diagnosis of a trace file that begins at `began` (ns). Raises OSError, with the reason in
    words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-c",
        _BOOT,
        str(PACKAGES),
        "diagnose",
        str(path.absolute()),
        "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        raise OSError(
            clean(lines[-1]) if lines else f"the diagnosis ended with code {process.returncode}"
        )
    try:
        return Diagnosis.from_document(json.loads(out), began)
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from None

"""Where files go that nobody named a place for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_MOST_FILES: Final = 1_000
"""Files of one name."""


def cache_folder() -> Path:
    """Return ``TRACER_CACHE``, else the user's cache folder. It may not be there yet."""
    if given := os.environ.get("TRACER_CACHE"):
        return Path(given).expanduser()
    from platformdirs import user_cache_path  # not needed where the variable is set

    return user_cache_path("tracer", appauthor=False)


def output_folder() -> Path | None:
    """Return the working folder, or the cache folder where that may not be written to (or is gone);
    None when neither may."""
    for place in (Path.cwd, cache_folder):
        with contextlib.suppress(OSError):
            folder = place()
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


def unused(path: Path) -> Path:
    """Return `path`, or a numbered sibling that does not exist yet."""
    candidate, number = path, 1
    while candidate.exists() and number < _MOST_FILES:
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate

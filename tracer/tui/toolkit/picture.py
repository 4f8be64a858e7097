"""Screenshots as files."""

from __future__ import annotations

import contextlib
from pathlib import Path

from platformdirs import user_cache_path


def write_picture(svg: str, name: str, folder: Path | None = None) -> Path | None:
    """Write `svg` under an unused name into `folder`, by default the working directory or else the
    cache folder. Return the file, or None if no folder could be written to."""
    for place in [folder] if folder is not None else [Path.cwd(), user_cache_path("tracer")]:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            target = _unused(place / name)
            target.write_text(svg, encoding="utf-8")
            return target
    return None


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate

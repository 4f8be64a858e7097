"""Screenshots as files."""

from __future__ import annotations

import contextlib
from pathlib import Path

from platformdirs import user_cache_path


def write_picture(svg: str, name: str, folder: Path | None = None) -> Path | None:
    """Write `svg` under a name that is not taken yet: into `folder`, or else the working directory,
    or where that may not be written to the cache folder. The file, or None when no folder could be
    written to."""
    for place in [folder] if folder is not None else [Path.cwd(), user_cache_path("tracer")]:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            target = _unused(place / name)
            target.write_text(svg, encoding="utf-8")
            return target
    return None


def _unused(path: Path) -> Path:
    """`path`, or a numbered sibling that does not exist yet."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate

"""Folders in which the processes of one `tracer run` put their sockets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine_hooks.protocol.sockets import search_directories

RUN_PREFIX: Final = "run-"
"""Folders of runs below the socket directory are called so."""


def run_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Socket folders of runs of this user that are there now."""
    return [
        folder
        for place in search_directories(environment)
        for folder in sorted(place.glob(f"{RUN_PREFIX}*"))
        if folder.is_dir()
    ]

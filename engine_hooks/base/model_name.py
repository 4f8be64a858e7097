"""What a model is called in a trace: a trace is handed on, and where a model lies on a disk is no
part of it."""

from __future__ import annotations

from typing import Final

LIMIT: Final = 200
"""Characters of a name at most."""
_REVISIONS: Final = "snapshots"
"""Folder of the hub's cache whose entries are named by their commit: the model's name stands above
it."""


def model_name(given: object) -> str:
    """The name of a model that was given by hub id (as it is), or by path (its folder's name)."""
    name = str(given or "")
    if not name.startswith(("/", "~", ".")):
        return name[:LIMIT]
    parts = [part for part in name.split("/") if part not in ("", ".", "..", "~")]
    if len(parts) >= 3 and parts[-2] == _REVISIONS:
        return parts[-3].removeprefix("models--").replace("--", "/")[:LIMIT]
    return parts[-1][:LIMIT] if parts else ""

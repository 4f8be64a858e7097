"""Libraries that only some commands need: how to say that one is not installed, and how to get
it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine_hooks.protocol.errors import UserError

DISTRIBUTION = "llm-request-tracer"
"""The name of this distribution. No index has it yet, and another project's has the name of the
package: what is offered to a user is the place that this copy came from."""


class MissingExtraError(UserError):
    """A library is not installed. The message is one line that says how to get it."""


@contextlib.contextmanager
def wants(extra: str) -> Iterator[None]:
    """Guard the import of what the optional dependencies `extra` bring. Raises
    MissingExtraError."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{error.name or 'a library'} is not installed: {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs the optional dependencies `extra`: with the checkout or the
    wheel that this copy was installed from, where that is still there, else by name."""
    place = _origin()
    if place is not None:
        editable = "-e " if place.is_dir() else ""
        return f"pip install {editable}{shlex.quote(f'{place}[{extra}]')}"
    return " ".join(["pip install", *map(shlex.quote, _requirements(extra))])


def _origin() -> Path | None:
    """The folder or file that this copy came from, None where that is not known or gone."""
    beside = Path(__file__).resolve().parents[2]
    if (beside / "pyproject.toml").is_file():
        return beside
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError, KeyError, OSError):
        told = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(json.loads(told or "{}")["url"])
        place = Path(unquote(url.path))
        if url.scheme == "file" and place.exists():
            return place
    return None


def _requirements(extra: str) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires(DISTRIBUTION) or []:
            need, _, marker = line.partition(";")
            if f"extra == '{extra}'" in marker.replace('"', "'"):
                found.append(need.strip())
    return found or [f"(what {DISTRIBUTION} names as {extra})"]

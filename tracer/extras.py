"""Libraries that only some commands need: how to say that one is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MissingExtraError(Exception):
    """A library is not installed. The message is one line that says how to get it."""


@contextlib.contextmanager
def wants(extra: str) -> Iterator[None]:
    """Around the import of what the optional dependencies `extra` bring. Raises MissingExtraError."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{error.name or 'a library'} is not installed: pip install 'tracer-llm[{extra}]'"
        ) from error

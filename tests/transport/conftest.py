"""Fixtures of the transport tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a path short enough for a unix address."""
    with tempfile.TemporaryDirectory(prefix="tracer-test-") as name:
        yield Path(name)

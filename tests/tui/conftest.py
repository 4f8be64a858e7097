"""Fixtures of the TUI's tests."""

from __future__ import annotations

import pytest

from tests.tui.timeline import Timeline


@pytest.fixture(scope="session")
def busy() -> Timeline:
    """Nine requests a second on an engine that keeps up: queues, chunks and cache hits."""
    return Timeline(140, rate=9.0)

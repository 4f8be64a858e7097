"""Fixtures of the TUI's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.timeline import Timeline


@pytest.fixture(scope="session")
def busy() -> Timeline:
    """Nine requests a second on an engine that keeps up: queues, chunks and cache hits."""
    return Timeline(140, rate=9.0)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the tests' own: what is kept on this machine must not change what a screen
    shows."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder

"""Fixtures of the command line's tests: every command runs as its own process, in folders of its
own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import Commands


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[Commands]:
    """Runs `tracer` commands. Fails the test when one of them leaves a process or a socket
    behind."""
    with tempfile.TemporaryDirectory(prefix="tracer-test-") as sockets:
        commands = Commands(Path(sockets), tmp_path / "logs")
        yield commands
        commands.finish()

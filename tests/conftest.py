"""Fixtures that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import effort

# How long an example takes on a loaded machine says nothing about what it shows.
PROFILE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def pytest_configure(config: pytest.Config) -> None:
    """The fast part of the tests tries fewer examples."""
    effort.chosen(config.getoption("markexpr"))
    settings.register_profile("tracer", max_examples=effort.examples(100), **PROFILE)
    settings.load_profile("tracer")


# Hundreds of programs are started here: where no byte code is kept, each of them would compile the
# whole tree again, and every run of the tests the tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The folder of the embedded model: real weights, fetched and converted the first time (half a
    minute)."""
    done = subprocess.run(
        [sys.executable, "-m", "tracer.demo.model"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())

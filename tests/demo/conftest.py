"""Fixtures of the demo's tests: commands as a user runs them, in folders of their own."""

from __future__ import annotations

from tests.cli.conftest import tracer

__all__ = ["tracer"]

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.export.trace_processor import TraceProcessor


@pytest.fixture(scope="session")
def processor() -> Iterator[TraceProcessor]:
    """Perfetto's trace_processor."""
    with TraceProcessor() as started:
        yield started

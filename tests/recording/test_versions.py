"""Recordings of every schema version there has been are read, and give the figures that they gave then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracer.blocks import Mark
from tracer.events import SCHEMA_VERSION
from tracer.player import Player
from tracer.replay import load
from tracer.trace_file import TraceFile

FIXTURES = Path(__file__).parent / "fixtures"
S = 1_000_000_000

REQUESTS = {
    1: [
        ("req-1", 52, 5, "length", 10.806, 38.914),
        ("req-2", 353, 7, "length", 51.50261, 95.69661),
        ("req-3", 219, 7, "length", 38.848282, 69.502282),
        ("req-4", 29, 5, "length", 13.841809, 33.383809),
        ("req-5", 72, 6, "length", 21.257, 48.572),
    ],
}
"""By schema: id, prompt and output tokens, finish reason, TTFT and E2E in ms."""


def test_there_is_a_recording_of_every_version() -> None:
    assert sorted(REQUESTS) == list(range(1, SCHEMA_VERSION + 1))
    assert {path.name for path in FIXTURES.glob("*.trace")} == {f"schema-{version}.trace" for version in REQUESTS}


@pytest.mark.parametrize("version", REQUESTS)
def test_an_old_recording_gives_the_figures_that_it_gave_then(version: int) -> None:
    path = FIXTURES / f"schema-{version}.trace"
    with TraceFile(path) as trace:
        assert trace.verify() == [] and trace.with_text
        assert {header.schema for header in trace.sources.values()} == {version}
        assert len(trace.blocks) > 5 and len(trace.keyframes) > 1
        assert trace.marks() == [Mark(1_000 * S, "the first request")]
    for keyframes in (True, False):
        state = load(path, keyframes=keyframes)
        assert state.unknown == 0
        found = [
            (v.id, v.prompt_tokens, v.output_tokens, v.finish_reason, v.ttft_ms, v.e2e_ms)
            for v in state.snapshot().requests
        ]  # fmt: skip
        assert found == [pytest.approx(row) if isinstance(row, float) else row for row in REQUESTS[version]]
        detail = state.detail("req-1")
        assert detail is not None and (detail.prompt_text, detail.output_text) == ("x" * 20, "abc" * 5)


@pytest.mark.parametrize("version", REQUESTS)
def test_an_old_recording_is_played_whatever_made_its_keyframes(version: int) -> None:
    player = Player.open(FIXTURES / f"schema-{version}.trace", now=lambda: 0, paused=True)
    player.seek_fraction(1.0)
    while player.status.startswith("seeking"):
        player.tick()
    assert player.state.digest() == load(player.trace.path, keyframes=False).digest()
    player.close()

"""Recordings of every version of the file and of the events are read, and give the figures that
they gave then."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_hooks.protocol.blocks import FORMAT, Mark
from engine_hooks.protocol.events import SCHEMA_VERSION
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import load
from tracer.replay.player import Player

FIXTURES = Path(__file__).parent / "fixtures"
S = 1_000_000_000

REQUESTS = [
    ("req-1", 52, 5, "length", 10.806, 38.914),
    ("req-2", 353, 7, "length", 51.50261, 95.69661),
    ("req-3", 219, 7, "length", 38.848282, 69.502282),
    ("req-4", 29, 5, "length", 13.841809, 33.383809),
    ("req-5", 72, 6, "length", 21.257, 48.572),
]
"""Id, prompt and output tokens, finish reason, TTFT and E2E in ms."""
VERSIONS = {(1, 1): REQUESTS, (2, 1): REQUESTS, (3, 1): REQUESTS}
"""By version of the file and of the events."""


def path_of(version: tuple[int, int]) -> Path:
    return FIXTURES / "format-{}-schema-{}.trace".format(*version)


def test_there_is_a_recording_of_every_version() -> None:
    assert {form for form, _ in VERSIONS} == set(range(1, FORMAT + 1))
    assert {schema for _, schema in VERSIONS} == set(range(1, SCHEMA_VERSION + 1))
    assert set(FIXTURES.glob("*.trace")) == set(map(path_of, VERSIONS))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_recording_gives_the_figures_that_it_gave_then(version: tuple[int, int]) -> None:
    path = path_of(version)
    with TraceFile(path) as trace:
        assert trace.verify() == [] and trace.with_text
        assert {header.schema for header in trace.sources.values()} == {version[1]}
        assert len(trace.blocks) > 5
        assert trace.marks() == [Mark(1_000 * S, "the first request")]
    state = load(path)
    assert state.unknown == 0
    views = state.snapshot().requests
    assert [(v.id, v.prompt_tokens, v.output_tokens, v.finish_reason) for v in views] == [
        row[:4] for row in VERSIONS[version]
    ]
    assert [(v.ttft_ms, v.e2e_ms) for v in views] == [
        pytest.approx(row[4:]) for row in VERSIONS[version]
    ]
    detail = state.detail("req-1")
    assert detail is not None
    assert (detail.prompt_text, detail.output_text) == ("x" * 20, "abc" * 5)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_recording_is_played(version: tuple[int, int]) -> None:
    player = Player.open(path_of(version), now=lambda: 0, paused=True)
    player.seek_fraction(1.0)
    while player.status.startswith("seeking"):
        player.tick()
    assert player.state.digest() == load(player.trace.path).digest()
    player.close()

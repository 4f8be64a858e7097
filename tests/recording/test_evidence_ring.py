"""The evidence of a live finding: the last minutes, written when a key asks for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import some
from tracer.recording.evidence_ring import EvidenceRing
from tracer.recording.excerpt import around
from tracer.recording.flight import FlightRecorder
from tracer.recording.folders import output_folder, unused
from tracer.replay.cursor import load
from tracer.transport.bus import Bus


async def told(deliveries: list[Delivery], more: asyncio.Event) -> AsyncIterator[Delivery]:
    """What a source tells, and then nothing until it may end."""
    for delivery in deliveries:
        yield delivery
    await more.wait()


async def test_what_was_shown_is_written_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bus, end, notes = Bus(), asyncio.Event(), list[str]()
    bus.retain()
    deliveries = some()
    bus.add(told(deliveries, end))
    ring = EvidenceRing(bus, on_note=notes.append)
    tasks = [asyncio.create_task(ring.run()), asyncio.create_task(bus.run())]
    await asyncio.sleep(0.2)
    assert await ring.write("sampler", 0, None) == "writing the last two minutes …"
    for _ in range(100):
        await asyncio.sleep(0.1)
        if notes:
            break
    end.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    written = list(tmp_path.glob("sampler-*.trace"))
    assert len(written) == 1 and notes == [f"evidence: {written[0]}"]
    assert load(written[0]).request_ids()


async def test_a_flight_recorder_that_runs_anyway_is_asked_instead(tmp_path: Path) -> None:
    flight = FlightRecorder(tmp_path, 1)
    ring = EvidenceRing(Bus(), flight=flight)
    assert "flight recorder" in await ring.write("sampler", 0, None)
    assert list(flight._asked) == ["finding sampler"]


def test_an_excerpt_begins_before_what_it_shows_and_is_no_longer_than_two_minutes() -> None:
    second = 1_000_000_000
    assert around(100 * second, 110 * second, 500 * second) == (95 * second, 112 * second)
    assert around(100 * second, None, 104 * second) == (95 * second, 106 * second)
    begin, end = around(100 * second, None, 5000 * second)
    assert end - begin <= 125 * second


def test_evidence_goes_where_it_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_folder() == tmp_path
    (tmp_path / "a.trace").touch()
    assert unused(tmp_path / "a.trace") == tmp_path / "a-2.trace"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert output_folder() is None

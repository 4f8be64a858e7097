"""Four pictures that tell the story; `pytest --snapshot-update` accepts new ones after they were
looked at."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from textual.pilot import Pilot

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tests.tui.stage import app_at, flushed
from tests.tui.timeline import ENGINE, START, Timeline

AT = START + 9_500 * NS_PER_MS
Compare = Callable[..., bool]


async def rest(pilot: Pilot[int]) -> None:
    """Let everything be drawn."""
    await flushed(pilot)
    await flushed(pilot)


async def open_one(pilot: Pilot[int]) -> None:
    """Select a request that runs and open it."""
    await flushed(pilot)
    await pilot.press(*["up"] * 8, "enter")
    await rest(pilot)


def test_live_at_80_by_24(busy: Timeline, snap_compare: Compare) -> None:
    assert snap_compare(app_at(busy, AT), terminal_size=(80, 24), run_before=rest)


def test_live_at_200_by_60_under_memory_pressure(snap_compare: Compare) -> None:
    engine = msgspec.structs.replace(ENGINE, num_blocks=90)
    tight = Timeline(100, rate=9.0, mean_output=140, engine=engine)
    assert snap_compare(
        app_at(tight, START + 6 * NS_PER_S), terminal_size=(200, 60), run_before=rest
    )


def test_request_at_80_by_24(busy: Timeline, snap_compare: Compare) -> None:
    assert snap_compare(app_at(busy, AT), terminal_size=(80, 24), run_before=open_one)


def test_request_at_120_by_40(busy: Timeline, snap_compare: Compare) -> None:
    assert snap_compare(app_at(busy, AT), terminal_size=(120, 40), run_before=open_one)

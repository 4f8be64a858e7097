"""The device in one row of the Live screen, and alerts over it and in the event log."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tests.tui.stage import FixedFeed, app_at, app_on, rows_of, settle, text_of
from tests.tui.timeline import START, Timeline
from tracer.analysis.beside.achieved import Achieved
from tracer.analysis.model.devices import DEVICES
from tracer.launch.engine_log import EventLog
from tracer.monitor.alerts import Alert, Alerts
from tracer.monitor.hardware.cgroup import Throttling
from tracer.monitor.hardware.gauge import HardwareGauge, Reading
from tracer.monitor.hardware.nvml import Gpu
from tracer.monitor.monitor import Monitor
from tracer.recording.triggers import parse
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.screens.live.device_strip import magnitude
from tracer.tui.toolkit.theme import ASCII, DARK, MONO, Look

AT = START + 9_500 * NS_PER_MS
GIB = 1024**3
H200 = Reading(
    "cuda:0",
    (
        Gpu(0, "NVIDIA H200", 0.93, 120 * GIB, 141 * GIB, 1_755, 1_980, 612.0, 700.0, 61),
        Gpu(
            1,
            "NVIDIA H200",
            0.91,
            118 * GIB,
            141 * GIB,
            1_980,
            1_980,
            580.0,
            700.0,
            58,
            ("power cap",),
        ),
    ),
    1.42,
    6 * GIB,
    None,
    Achieved(213e12, 3.6e12, 0.97, 500),
    DEVICES["h200"],
)
CPU = Reading(
    "cpu", (), 1.03, 879 * 1024**2, Throttling(2.0, 0.18, 4.0), Achieved(41.2e9, 9.8e9, 0.93, 60)
)


class Fixed(HardwareGauge):
    """Always says the same."""

    def __init__(self, reading: Reading | None) -> None:
        super().__init__()
        self.told = reading

    def reading(self, state: TraceState, now: int) -> Reading | None:
        return self.told


def app_with(timeline: Timeline, reading: Reading | None, **options: object) -> TracerApp:
    """An app on a machine that says this."""
    app = app_at(timeline, AT, **options)
    app.monitor = Monitor(app.report)
    app.monitor.hardware = Fixed(reading)
    return app


async def device_row(app: TracerApp, pilot: Pilot[int]) -> str:
    """The row of the device."""
    await settle(pilot)
    await settle(pilot)
    region = app.live.device.region
    return rows_of(app)[region.y] if region.height else ""


async def test_a_gpu_beside_what_it_could_do(busy: Timeline) -> None:
    app = app_with(busy, H200)
    async with app.run_test(size=(200, 60)) as pilot:
        row = await device_row(app, pilot)
    for words in (
        "slowed by power cap",
        "NVIDIA H200 ×2",
        "busy 97 %",
        "compute 213 TFLOP/s",
        "22 % of peak",
        "memory 3.60 TB/s",
        "75 % of peak",
        "kernels 92 %",
        "HBM 238 GiB of 282 GiB",
    ):
        assert words in row, (words, row)


async def test_a_cpu_with_its_cores_and_what_holds_it_back(busy: Timeline) -> None:
    app = app_with(busy, CPU)
    async with app.run_test(size=(160, 40)) as pilot:
        row = await device_row(app, pilot)
    for words in (
        "cpu",
        "throttled 18 %",
        "cores 1.03 of 2.0",
        "RSS 879 MiB",
        "compute 41.2 GFLOP/s",
        "busy 93 %",
    ):
        assert words in row, (words, row)
    assert "of peak" not in row, "nobody knows its peak here"


@pytest.mark.parametrize(("width", "height"), [(80, 30), (20, 30), (200, 60)])
async def test_items_without_room_are_left_out_whole(
    busy: Timeline, width: int, height: int
) -> None:
    app = app_with(busy, H200)
    async with app.run_test(size=(width, height)) as pilot:
        row = await device_row(app, pilot)
    assert len(row) == width and row.strip()
    assert row.rstrip()[-1] not in "/·" and "  of" not in row


@pytest.mark.parametrize("size", [(80, 24), (120, 29)])
async def test_a_low_screen_has_no_row_for_it(busy: Timeline, size: tuple[int, int]) -> None:
    app = app_with(busy, H200)
    async with app.run_test(size=size) as pilot:
        assert await device_row(app, pilot) == ""


async def test_nothing_known_takes_no_row(busy: Timeline) -> None:
    app = app_with(busy, None)
    async with app.run_test(size=(120, 40)) as pilot:
        assert await device_row(app, pilot) == ""
        app.monitor.hardware.told = CPU  # type: ignore[union-attr]
        assert "cores 1.03" in await device_row(app, pilot)


async def test_without_colour_and_in_ascii_it_says_the_same(busy: Timeline) -> None:
    app = app_with(busy, H200, look=Look(MONO, ASCII))
    async with app.run_test(size=(160, 40)) as pilot:
        row = await device_row(app, pilot)
    assert row.isascii() and "NVIDIA H200 x2" in row and "22 % of peak" in row


async def test_what_the_engine_told_is_shown_wherever_it_ran(busy: Timeline) -> None:
    """The real gauge on a trace of another host: nothing of this machine is mixed in."""
    app = app_at(busy, AT)
    app.monitor = Monitor(app.report)
    app.monitor.watch_hardware()
    async with app.run_test(size=(160, 40)) as pilot:
        row = await device_row(app, pilot)
    assert "cpu" in row and "busy" in row and "FLOP/s" in row
    assert "of peak" not in row and "throttled" not in row


async def test_an_alert_stands_in_the_banner_while_it_fires_and_in_the_log_for_good(
    busy: Timeline,
) -> None:
    feed = FixedFeed(busy.events, AT)
    log = EventLog()
    app = app_on(feed, log=log, look=Look(DARK))
    app.monitor = Monitor(app.report)
    app.monitor.on_news = app.report_alert
    app.monitor.alerts = Alerts(
        [Alert("many [red]live[/]\x1b", parse("live>0"), severity="critical")]
    )
    async with app.run_test(size=(120, 40)) as pilot:
        app.monitor.check(feed.state, AT)
        await pilot.press("l")
        await settle(pilot)
        text = text_of(app)
        live = feed.state.snapshot(now=AT, limit=0).live
        assert f"alert: many [red]live[/]\\x1b: live {live}, rule live>0" in text
        assert "events" in text and "0:09 alert: critical: many" in text
        feed.advance(START + 3600 * NS_PER_S)
        app.monitor.check(feed.state, feed.now())
        await settle(pilot)
        assert "resolved after" in text_of(app)
        assert not [
            notice
            for notice in app.notices(feed.state.snapshot())
            if notice.text.startswith("alert")
        ]
    assert len(log.lines) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 "),
        (812, "812 "),
        (12_300, "12.3 k"),
        (9.8e9, "9.80 G"),
        (989e12, "989 T"),
        (1e21, "1,000 E"),
    ],
)
def test_magnitudes_have_three_digits(value: float, text: str) -> None:
    assert magnitude(value) == text

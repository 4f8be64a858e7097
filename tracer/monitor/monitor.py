"""Background outputs of a viewer, beside its screen or its summary: metrics endpoint, OTLP push,
alerts.

`Monitor.open` makes what the options ask for, so that a port that is taken or a file that is wrong
is known before an engine is started; `run` works beside whatever folds events into the state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import ClockAnchor
from tracer.state.trace_state import TraceState

if TYPE_CHECKING:
    from tracer.export.metrics import Family
    from tracer.monitor.alerts import Alerts, News
    from tracer.monitor.endpoint import Endpoint
    from tracer.monitor.hardware.gauge import HardwareGauge
    from tracer.monitor.push import Pusher

CHECK_S: Final = 1.0
"""Seconds between two checks of the alerts."""


class Monitor:
    """See the module. `report` gets one line of what goes on; replace it once a screen is there."""

    def __init__(self, report: Callable[[str], None] = lambda _: None) -> None:
        self.report = report
        self.alerts: Alerts | None = None
        self.endpoint: Endpoint | None = None
        self.pusher: Pusher | None = None
        self.hardware: HardwareGauge | None = None
        self.on_news: Callable[[News], None] = lambda news: self.report(f"alert: {news.text}")

    @classmethod
    def open(cls, options: argparse.Namespace, report: Callable[[str], None]) -> Monitor:
        """Make what the options ask for. Raises MetricsError, MissingExtraError, AlertsError."""
        made = cls(report)
        if options.alerts is not None:
            from tracer.monitor.alerts import Alerts
            from tracer.monitor.live_findings import live_findings

            made.alerts = Alerts.load(options.alerts, live_findings())
        if options.otlp_metrics is not None:
            from tracer.monitor.push import Pusher

            made.pusher = Pusher(options.otlp_metrics, lambda text: made.report(text))
        if options.metrics is not None:
            from tracer.monitor.endpoint import Endpoint

            made.endpoint = Endpoint(options.metrics)
            report(f"metrics at {made.endpoint.url}")
        if made.endpoint is not None or made.pusher is not None:
            made.watch_hardware()
        return made

    def watch_hardware(self) -> None:
        """Ask the machine too, from the next `run` on."""
        if self.hardware is None:
            from tracer.monitor.hardware.gauge import HardwareGauge

            self.hardware = HardwareGauge()

    @property
    def wanted(self) -> bool:
        """True when the options ask for anything."""
        return bool(self.alerts or self.endpoint or self.pusher)

    def families(self, state: TraceState, now: int | None = None) -> Sequence[Family]:
        """Return all metrics of the state at `now` (ns; None: at its end), those of the machine and
        of the alerts included."""
        from tracer.export.metrics import families

        found = families(state, now)
        if self.hardware is not None:
            found += self.hardware.families(state, state.now if now is None else now)
        if self.alerts is not None:
            found += self.alerts.families()
        return found

    async def run(self, state: TraceState, now: Callable[[], int] = clock.now) -> None:
        """Serve, send and watch `state`, whose time is `now` (ns), until cancelled."""

        def families() -> Sequence[Family]:
            return self.families(state, now())

        tasks = []
        if self.endpoint is not None:
            self.endpoint.answer_from(families, asyncio.get_running_loop())
        if self.pusher is not None:
            pushing = self.pusher.run(lambda: (families(), _start(state)))
            tasks.append(asyncio.create_task(pushing))
        if self.hardware is not None:
            tasks.append(asyncio.create_task(self.hardware.run(state)))
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                self.check(state, now())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def check(self, state: TraceState, now: int) -> None:
        if self.alerts is not None and state.sources:
            for news in self.alerts.check(state, state.snapshot(now=now, limit=0)):
                self.on_news(news)

    @property
    def exit_code(self) -> int:
        """1 when an alert with ``exit`` has fired, else 0."""
        return 1 if self.alerts is not None and self.alerts.failed else 0

    def extra(self, began: int) -> dict[str, object]:
        return {} if self.alerts is None else {"alerts": self.alerts.to_document(began)}

    def close(self) -> None:
        if self.endpoint is not None:
            with contextlib.suppress(OSError):
                self.endpoint.close()


def _start(state: TraceState) -> int:
    """Return the start of the trace in ns since the epoch."""
    anchors = (
        source.header.anchor for source in state.sources.values() if source.header is not None
    )
    return next(anchors, ClockAnchor.read()).to_wall(state.began or clock.now())

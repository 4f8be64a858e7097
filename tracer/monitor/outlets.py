"""What leaves a viewer beside its screen or its summary: a metrics endpoint, metrics that are sent,
alerts.

`Outlets.open` makes what the options ask for, so that a port that is taken or a file that is wrong
is known before an engine is started; `run` lets it work beside whatever folds events into the
state.
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

LOOK_S: Final = 1.0
"""Seconds between two looks at the alerts."""


class Outlets:
    """See the module. `say` gets one line of what goes on; replace it once a screen is there."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.alerts: Alerts | None = None
        self.endpoint: Endpoint | None = None
        self.pusher: Pusher | None = None
        self.hardware: HardwareGauge | None = None
        """What the machine says, if somebody asks it."""
        self.on_news: Callable[[News], None] | None = None
        """Is told of alerts instead of `say`."""

    @classmethod
    def open(cls, options: argparse.Namespace, say: Callable[[str], None]) -> Outlets:
        """What the options ask for. Raises MetricsError, MissingExtraError, AlertsError."""
        made = cls(say)
        if options.alerts is not None:
            from tracer.monitor.alerts import Alerts
            from tracer.monitor.live_findings import live_findings

            made.alerts = Alerts.load(options.alerts, live_findings())
        if options.otlp_metrics is not None:
            from tracer.monitor.push import Pusher

            made.pusher = Pusher(options.otlp_metrics, lambda text: made.say(text))
        if options.metrics is not None:
            from tracer.monitor.endpoint import Endpoint

            made.endpoint = Endpoint(options.metrics)
            say(f"metrics at {made.endpoint.url}")
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
        """Whether there is anything to do."""
        return bool(self.alerts or self.endpoint or self.pusher)

    def families(self, state: TraceState, now: int | None = None) -> Sequence[Family]:
        """All metrics of the state at `now` (ns; None: at its end), those of the machine and of the
        alerts included."""
        from tracer.export.metrics import families

        found = families(state, now)
        if self.hardware is not None:
            found += self.hardware.families(state, state.now if now is None else now)
        if self.alerts is not None:
            found += self.alerts.families()
        return found

    async def run(self, state: TraceState, now: Callable[[], int] = clock.now) -> None:
        """Serve, send and watch `state`, whose time is `now` (ns), until cancelled."""
        if self.endpoint is not None:
            self.endpoint.answer_from(
                lambda: self.families(state, now()), asyncio.get_running_loop()
            )
        tasks = []
        if self.pusher is not None:
            tasks.append(
                asyncio.create_task(
                    self.pusher.run(lambda: (self.families(state, now()), _began(state)))
                )
            )
        if self.hardware is not None:
            tasks.append(asyncio.create_task(self.hardware.run(state)))
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self.look(state, now())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self, state: TraceState, now: int) -> None:
        """Ask the alerts."""
        if self.alerts is None or not state.sources:
            return
        for news in self.alerts.check(state, state.snapshot(now=now, limit=0)):
            if self.on_news is not None:
                self.on_news(news)
            else:
                self.say(f"alert: {news.text}")

    @property
    def exit_code(self) -> int:
        """1 when an alert with ``exit`` has fired, else 0."""
        return 1 if self.alerts is not None and self.alerts.failed else 0

    def extra(self, began: int) -> dict[str, object]:
        """What to add to a JSON summary."""
        return {} if self.alerts is None else {"alerts": self.alerts.to_document(began)}

    def close(self) -> None:
        """Serve no more."""
        if self.endpoint is not None:
            with contextlib.suppress(OSError):
                self.endpoint.close()


def _began(state: TraceState) -> int:
    """Begin of the trace in ns since the epoch."""
    anchors = (
        source.header.anchor for source in state.sources.values() if source.header is not None
    )
    return next(anchors, None or ClockAnchor.take()).to_wall(state.began or clock.now())

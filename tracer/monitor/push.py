"""Sends the metrics to an OpenTelemetry collector, again and again: OTLP over HTTP, encoded as
protobuf."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import platform
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.clock import ClockAnchor
from tracer.export.extras import wants
from tracer.export.metrics import Family
from tracer.monitor.endpoint import MetricsError

PERIOD_S: Final = 10.0
"""Seconds between two sendings; ``OTEL_METRIC_EXPORT_INTERVAL`` (ms) says otherwise."""
PATIENCE_S: Final = 5.0
"""How long a collector may take to answer."""
LAST_S: Final = 2.0
"""How long the last sending may take, when we are on the way out."""
PATH: Final = "/v1/metrics"
"""Where metrics go when the address has no path."""

Read = Callable[[], tuple[Sequence[Family], int]]
"""Gives the families now, and the begin of the trace in ns since the epoch."""


def target_of(text: str) -> str:
    """The whole address of ``http://HOST:PORT`` or one with a path. Raises MetricsError."""
    try:
        parts = urllib.parse.urlsplit(text.strip())
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not text.isprintable():
        raise MetricsError(
            f"{text!r} is no address to send metrics to; for example http://127.0.0.1:4318"
        )
    return urllib.parse.urlunsplit(
        parts._replace(path=parts.path if parts.path not in ("", "/") else PATH)
    )


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What ``OTEL_EXPORTER_OTLP_METRICS_HEADERS`` or ``OTEL_EXPORTER_OTLP_HEADERS`` (``k=v,k=v``)
    adds."""
    given = environment.get("OTEL_EXPORTER_OTLP_METRICS_HEADERS") or environment.get(
        "OTEL_EXPORTER_OTLP_HEADERS", ""
    )
    pairs = [pair.partition("=") for pair in given.split(",") if "=" in pair]
    return {
        name.strip(): urllib.parse.unquote(value.strip())
        for name, _, value in pairs
        if name.strip()
    }


class Pusher:
    """Sends to `url` every `period_s` while it runs, and once more at the end. `say` gets a
    sentence when a sending fails for the first time, and when one succeeds again; nothing else
    comes of it.

    Raises MetricsError for no address, MissingExtraError without opentelemetry-proto.
    """

    def __init__(
        self, url: str, say: Callable[[str], None], *, period_s: float | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        with wants("otlp"):
            from tracer.export.otlp_metrics import request as request
        self.url = target_of(url)
        self.sent = 0
        """Sendings that were taken."""
        self._encode = request
        self._say = say
        self._failing = False
        self._period_s = _period(environment) if period_s is None else period_s
        self._headers = {
            **headers_of(environment),
            "Content-Type": "application/x-protobuf",
            "User-Agent": f"tracer/{__version__}",
        }
        self._resource = {
            "service.name": environment.get("OTEL_SERVICE_NAME", "tracer"),
            "host.name": platform.node(),
            "service.instance.id": f"{platform.node()}:{os.getpid()}",
            "service.version": __version__,
        }

    async def run(self, read: Read) -> None:
        """Send what `read` gives until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._period_s)
                await self._send(read, PATIENCE_S)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await self._send(read, LAST_S)

    async def _send(self, read: Read, patience_s: float) -> None:
        try:
            families, start = read()
            body = self._encode(families, start, ClockAnchor.take().wall, self._resource)
            await asyncio.to_thread(self._post, body, patience_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._failing:
                self._say(f"cannot send metrics to {self.url}: {_reason(error)}; trying on")
            self._failing = True
            return
        self.sent += 1
        if self._failing:
            self._failing = False
            self._say(f"metrics go to {self.url} again")

    def _post(self, body: bytes, patience_s: float) -> None:
        # http or https, by `target_of`
        request = urllib.request.Request(self.url, body, self._headers, method="POST")
        with urllib.request.urlopen(request, timeout=patience_s) as answer:
            answer.read(65_536)


def _period(environment: Mapping[str, str]) -> float:
    try:
        period_s = float(environment.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1e3
    except ValueError:
        return PERIOD_S
    return period_s if 0.1 <= period_s <= 86_400 else PERIOD_S


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner or type(error).__name__)

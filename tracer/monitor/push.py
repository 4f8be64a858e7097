"""Periodic push of the metrics to an OpenTelemetry collector: OTLP over HTTP, as protobuf."""

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
from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.clock import ClockAnchor
from tracer.export.extras import wants
from tracer.export.metrics import Family
from tracer.monitor.endpoint import MetricsError

PERIOD_S: Final = 10.0
"""Seconds between two pushes; ``OTEL_METRIC_EXPORT_INTERVAL`` (ms) says otherwise."""
PATIENCE_S: Final = 5.0
"""Limit of the wait for a collector's answer."""
LAST_S: Final = 2.0
"""Limit of the wait for the last push, when we are on the way out."""
PATH: Final = "/v1/metrics"
"""Path of an address without one."""

Read = Callable[[], tuple[Sequence[Family], int]]
"""Returns the families now, and the start of the trace in ns since the epoch."""


def target_of(text: str) -> str:
    """Return the whole address of ``http://HOST:PORT`` or one with a path. Raises MetricsError."""
    try:
        parts = urllib.parse.urlsplit(text.strip())
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not text.isprintable():
        raise MetricsError(
            f"cannot send metrics to {text!r}: use an address such as http://127.0.0.1:4318"
        )
    path = PATH if parts.path in ("", "/") else parts.path
    return urllib.parse.urlunsplit(parts._replace(path=path))


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers (``k=v,k=v``) of ``OTEL_EXPORTER_OTLP_METRICS_HEADERS``, else of
    ``OTEL_EXPORTER_OTLP_HEADERS``."""
    names = ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    given = next(filter(None, map(environment.get, names)), "")
    pairs = [map(str.strip, pair.split("=", 1)) for pair in given.split(",") if "=" in pair]
    return {name: urllib.parse.unquote(value) for name, value in pairs if name}


class Pusher:
    """Sends to `url` periodically while it runs, and once more at the end. `report` gets a sentence
    when a push fails for the first time, and when one succeeds again.

    Raises MetricsError for no address, MissingExtraError without opentelemetry-proto.
    """

    def __init__(
        self, url: str, report: Callable[[str], None], *, period_s: float | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        with wants("otlp"):
            from tracer.export.otlp_metrics import request as request
        self.url = target_of(url)
        self.sent = 0
        """Pushes that succeeded."""
        self._encode = request
        self._report = report
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
            body = self._encode(families, start, ClockAnchor.read().wall, self._resource)
            await asyncio.to_thread(self._post, body, patience_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._failing:
                self._report(f"cannot send metrics to {self.url}: {_reason(error)}; retrying")
            self._failing = True
            return
        self.sent += 1
        if self._failing:
            self._failing = False
            self._report(f"sending metrics to {self.url} again")

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
        return f"the answer was {error.code}"
    inner = getattr(error, "reason", error)  # a URLError wraps the error of the system
    return why(inner) if isinstance(inner, OSError) else str(inner) or type(error).__name__

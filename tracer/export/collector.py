"""Spans to an OpenTelemetry collector: OTLP over HTTP, in protobuf, as the protocol's specification
says.

A refusal that is not final (429, 502, 503, 504, no connection) is tried again a few times; a
redirect is not followed, since it would turn the spans into a request for a page.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from email.message import Message
from typing import IO, Any, Final

from tracer.export.otlp import Document, otlp_message
from tracer.export.output import ExportError

TRIES: Final = 4
TIMEOUT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 30.0
_LATER: Final = frozenset({429, 502, 503, 504})
_REPLY: Final = 1 << 20
"""Bytes of a reply that are read."""


def send(
    documents: Iterable[Document], endpoint: str, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Send documents one by one; the number of spans taken. Raises ExportError, and ImportError
    without the `opentelemetry-proto` package."""
    url = _url(endpoint)
    headers = {"Content-Type": "application/x-protobuf", "User-Agent": "tracer", **_own_headers()}
    count = 0
    for document in documents:
        message = otlp_message(document)
        count += sum(
            len(scope.spans)
            for resource in message.resource_spans
            for scope in resource.scope_spans
        )
        count -= _post(url, message.SerializeToString(), headers, sleep)
    return count


def _post(url: str, body: bytes, headers: dict[str, str], sleep: Callable[[float], None]) -> int:
    """How many spans the collector did not take."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    opener = urllib.request.build_opener(_NoRedirects)
    for left in range(TRIES - 1, -1, -1):
        wait = float(2 ** (TRIES - 1 - left)) / 2
        try:
            with opener.open(
                urllib.request.Request(url, body, headers, method="POST"), timeout=TIMEOUT_S
            ) as reply:
                data = reply.read(_REPLY)
            answer = ExportTraceServiceResponse()
            try:
                answer.ParseFromString(data)
            except Exception:  # 200 is the answer; some say it in words
                return 0
            refused = answer.partial_success
            if refused.rejected_spans:
                raise ExportError(
                    f"{url} refused {refused.rejected_spans:,} spans: {refused.error_message}"
                )
            return 0
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if error.code not in _LATER:
                raise ExportError(f"{url} does not take the spans: {reason}") from None
            told = error.headers.get("Retry-After", "")
            wait = min(float(told), _LONGEST_WAIT_S) if told.isdigit() else wait
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if left:
            sleep(wait)
    raise ExportError(f"{url} does not take the spans: {reason}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> Any:
        return None


def _url(endpoint: str) -> str:
    """A collector's address with the path for traces, unless it names another."""
    try:
        parts = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not endpoint.isprintable():
        raise ExportError(
            f"{endpoint} is no address of a collector; for example: http://localhost:4318"
        )
    return urllib.parse.urlunsplit(
        parts._replace(path=parts.path if parts.path.strip("/") else "/v1/traces")
    )


def _own_headers() -> dict[str, str]:
    """Headers that the user wants sent, as every OpenTelemetry exporter takes them: name=value,
    separated by commas."""
    told = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
        or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS")
        or ""
    )
    pairs = [part.partition("=") for part in told.split(",") if "=" in part]
    return {
        name.strip(): urllib.parse.unquote(value.strip())
        for name, _, value in pairs
        if name.strip()
    }

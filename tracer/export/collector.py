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
from typing import Any, Final

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
    """Send documents one by one; return the number of spans taken.

    Raises:
        ExportError: The collector is not there or refuses them.
        ImportError: The `opentelemetry-proto` package is missing.
    """
    url = _url(endpoint)
    headers = {"Content-Type": "application/x-protobuf", "User-Agent": "tracer", **_own_headers()}
    count = 0
    for document in documents:
        message = otlp_message(document)
        scopes = (scope for resource in message.resource_spans for scope in resource.scope_spans)
        count += sum(len(scope.spans) for scope in scopes)
        request = urllib.request.Request(url, message.SerializeToString(), headers, method="POST")
        _post(request, sleep)
    return count


def _post(request: urllib.request.Request, sleep: Callable[[float], None]) -> None:
    opener = urllib.request.build_opener(_NoRedirects)
    for attempt in range(TRIES):
        wait = 2.0**attempt / 2
        try:
            with opener.open(request, timeout=TIMEOUT_S) as reply:
                data = reply.read(_REPLY)
            return _check_answer(request.full_url, data)
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if error.code not in _LATER:
                break
            told = error.headers.get("Retry-After", "")
            wait = min(float(told), _LONGEST_WAIT_S) if told.isdigit() else wait
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if attempt < TRIES - 1:
            sleep(wait)
    raise ExportError(f"{request.full_url} does not take the spans: {reason}")


def _check_answer(url: str, data: bytes) -> None:
    """Raise ExportError when the collector took the request and not all of its spans."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    answer = ExportTraceServiceResponse()
    try:
        answer.ParseFromString(data)
    except Exception:  # 200 is the answer; some say it in words
        return
    refused = answer.partial_success
    if refused.rejected_spans:
        count = f"{refused.rejected_spans:,}"
        raise ExportError(f"{url} refused {count} spans: {refused.error_message}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
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
    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return urllib.parse.urlunsplit(parts._replace(path=path))


def _own_headers() -> dict[str, str]:
    """Headers that the user wants sent, as every OpenTelemetry exporter takes them: name=value,
    separated by commas."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    told = next(filter(None, map(os.environ.get, names)), "")
    pairs = (part.partition("=") for part in told.split(","))
    return {
        name.strip(): urllib.parse.unquote(value.strip())
        for name, equals, value in pairs
        if equals and name.strip()
    }

"""The endpoint that a Prometheus server scrapes: ``/metrics`` over HTTP, in its text format or
OpenMetrics'.

Listens on this host alone unless another address is given. Requests are answered by threads of
their own; the metrics are read in the thread that owns the state (`Endpoint.answer_from`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.errors import UserError
from tracer.export.extras import wants
from tracer.export.metrics import Family

LOCAL: Final = "127.0.0.1"
PATIENCE_S: Final = 5.0
"""Limit of the wait for an answer, and for a client that sends nothing."""
POLL_S: Final = 0.1
"""Seconds between two checks for the server's end: leaving may take as long."""
MOST_AT_ONCE: Final = 8
"""Requests that are answered at once; further ones wait to be accepted."""

Read = Callable[[], Sequence[Family]]


class MetricsError(UserError):
    """No endpoint, or no address to send to. The message is one line fit for a user."""


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of ``PORT``, ``:PORT``, ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises MetricsError.
    """
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else ""
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise MetricsError(f"cannot listen on {text!r}: use an address such as 127.0.0.1:9464")
    return host or LOCAL, int(port)


class Endpoint:
    """Listens from the start on, answers once `answer_from` has said where from. `close` when done.

    Raises MetricsError for an address that cannot be had, or when prometheus_client is not
    installed.
    """

    def __init__(self, listen_on: str) -> None:
        with wants("metrics"):
            import prometheus_client as prometheus_client
        host, port = address_of(listen_on)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(family, address)
        except OSError as error:
            raise MetricsError(f"cannot listen on {_shown(host)}:{port}: {why(error)}") from error
        self._server.set_app(self._answer)
        self._read: Read | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()
        self.url = f"http://{_shown(self._server.server_name)}:{self._server.server_port}/metrics"

    def answer_from(self, read: Read, loop: asyncio.AbstractEventLoop) -> None:
        """Serve what `read` returns when it is called in `loop`, from now on."""
        self._read, self._loop = read, loop

    def close(self) -> None:
        self._read = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        from prometheus_client.exposition import make_wsgi_app

        from tracer.export.openmetrics import registry

        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _plain(start, "405 Method Not Allowed", "only GET\n")
        if environ.get("PATH_INFO") == "/":
            return _plain(start, "200 OK", "tracer: the metrics are at /metrics\n")
        if environ.get("PATH_INFO") != "/metrics":
            return _plain(start, "404 Not Found", "the metrics are at /metrics\n")
        try:
            families = self._families()
        except (TimeoutError, RuntimeError, concurrent.futures.CancelledError):
            return _plain(start, "503 Service Unavailable", "not ready\n")
        answer: Iterable[bytes] = make_wsgi_app(registry(lambda: families))(environ, start)
        return answer

    def _families(self) -> Sequence[Family]:
        """The families, read in the loop that owns the state. Raises TimeoutError or
        RuntimeError."""
        read, loop = self._read, self._loop
        if read is None or loop is None:
            raise RuntimeError("nothing to read from")
        done: concurrent.futures.Future[Sequence[Family]] = concurrent.futures.Future()

        def fetch() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(read())
            except Exception as error:  # it is the scraper's answer that fails, not the viewer
                done.set_exception(RuntimeError(str(error)))

        loop.call_soon_threadsafe(fetch)
        return done.result(PATIENCE_S)


class _Handler(WSGIRequestHandler):
    """A quiet handler that gives up on a client that sends nothing."""

    timeout = PATIENCE_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the viewer."""

    def address_string(self) -> str:
        """Return the address, without a look-up of its name."""
        return str(self.client_address[0])


class _Server(WSGIServer):
    """A server with a thread for each request, `MOST_AT_ONCE` at most."""

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        super().__init__(address, _Handler)
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)

    def server_bind(self) -> None:
        """Bind without a look-up of our name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(timeout=PATIENCE_S):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._process, args=(request, client_address), daemon=True).start()

    def _process(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # a client that sends nonsense, or goes
            pass
        finally:
            self.shutdown_request(request)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing."""


def _plain(start: Callable[..., Any], status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode()]


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host

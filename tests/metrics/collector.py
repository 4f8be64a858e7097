"""An OpenTelemetry collector's HTTP door: takes what is posted and remembers it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


class Collector:
    """Listens on any port; answers `status`."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.taken: list[tuple[str, dict[str, str], ExportMetricsServiceRequest]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.status == 200:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    outer.taken.append(
                        (self.path, headers, ExportMetricsServiceRequest.FromString(body))
                    )
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def metrics(self) -> dict[str, Metric]:
        """Metrics of the last request by their names."""
        (told,) = self.taken[-1][2].resource_metrics
        (scope,) = told.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

"""Metrics that are sent: the same figures as `/metrics`, to a collector that may not be there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from tests.metrics.collector import Collector
from tests.metrics.exposed import scraped
from tests.metrics.test_total_counters import folded
from tests.state.traces import simulate
from tracer.export.metrics import families
from tracer.monitor.endpoint import MetricsError
from tracer.monitor.push import Pusher, headers_of, target_of

WALL = 1_700_000_000_000_000_000


async def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "url"),
    [("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/metrics"), ("https://host/", "https://host/v1/metrics"),
     ("http://host:1/otlp/v1/metrics", "http://host:1/otlp/v1/metrics")],
)  # fmt: skip
def test_a_bare_address_gets_the_usual_path(text: str, url: str) -> None:
    assert target_of(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:4318",
        "ftp://host",
        "file:///etc/passwd",
        "http://",
        "http://h:x",
        "http://h\r\nX: y",
    ],
)
def test_what_is_no_address_is_told_in_one_line(text: str) -> None:
    with pytest.raises(MetricsError, match="cannot send metrics to") as caught:
        target_of(text)
    assert "\n" not in str(caught.value)


def test_headers_come_from_the_usual_variables() -> None:
    given = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, x = y,broken,=z"}
    assert headers_of(given) == {"api-key": "a b", "x": "y"}
    assert headers_of({**given, "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "only=this"}) == {
        "only": "this"
    }


async def test_a_collector_gets_what_a_scraper_gets() -> None:
    state = folded(simulate(5, requests=14, split=True))
    said: list[str] = []
    with Collector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
            "OTEL_SERVICE_NAME": "my-llm",
        }
        pusher = Pusher(collector.url, said.append, period_s=0.02, environment=environment)
        sending = asyncio.create_task(pusher.run(lambda: (families(state), WALL)))
        await until(lambda: len(collector.taken) > 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        path, headers, request = collector.taken[0]
        assert path == "/v1/metrics" and headers["api-key"] == "secret"
        assert headers["content-type"] == "application/x-protobuf"
        resource = {
            each.key: each.value.string_value
            for each in request.resource_metrics[0].resource.attributes
        }
        assert resource["service.name"] == "my-llm"
        metrics = collector.metrics()
    assert said == []
    exposed = scraped(families(state))
    ttft = metrics["gen_ai.server.time_to_first_token"]
    assert (
        ttft.unit == "s"
        and ttft.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    )
    name = "gen_ai_server_time_to_first_token_seconds"
    points = ttft.histogram.data_points
    assert sum(point.count for point in points) == exposed.sum(f"{name}_count") > 0
    assert sum(point.sum for point in points) == pytest.approx(exposed.sum(f"{name}_sum"))
    for point in points:
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
        assert sum(point.bucket_counts) == point.count and point.start_time_unix_nano == WALL
        labels = {each.key: each.value.string_value for each in point.attributes}
        assert {"gen_ai.operation.name", "gen_ai.provider.name"} <= set(labels)
    received = metrics["tracer.requests.received"].sum
    assert received.is_monotonic and received.data_points[0].as_int == exposed.one(
        "tracer_requests_received_total"
    )
    waiting = metrics["tracer.requests.live"].gauge.data_points[0]
    assert waiting.as_int == exposed.one("tracer_requests_live")


async def test_a_collector_that_fails_is_complained_about_once_and_tried_again() -> None:
    state = folded(simulate(5, requests=4))
    said: list[str] = []
    with Collector(status=503) as collector:
        pusher = Pusher(collector.url, said.append, period_s=0.01, environment={})
        sending = asyncio.create_task(pusher.run(lambda: (families(state), WALL)))
        await until(lambda: said)
        await asyncio.sleep(0.1)
        assert said == [
            f"cannot send metrics to {collector.url}/v1/metrics: the answer was 503; retrying"
        ]
        collector.status = 200
        await until(lambda: pusher.sent)
        assert said[1:] == [f"sending metrics to {collector.url}/v1/metrics again"]
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_nobody_there_costs_nothing_but_a_sentence() -> None:
    said: list[str] = []
    pusher = Pusher("http://127.0.0.1:1", said.append, period_s=0.01, environment={})
    sending = asyncio.create_task(pusher.run(lambda: ([], WALL)))
    await until(lambda: said)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert said == [
        "cannot send metrics to http://127.0.0.1:1/v1/metrics: connection refused; retrying"
    ]
    assert pusher.sent == 0


async def test_what_happened_last_is_sent_on_the_way_out() -> None:
    with Collector() as collector:
        pusher = Pusher(collector.url, print, period_s=1000, environment={})
        state = folded(simulate(5, requests=4))
        sending = asyncio.create_task(pusher.run(lambda: (families(state), WALL)))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert collector.metrics()["tracer.requests.received"].sum.data_points[0].as_int == 4

"""Metrics as OTLP has them: one ``ExportMetricsServiceRequest``, made of opentelemetry-proto's
messages (the extra ``otlp``).

The SDK is not used: it would aggregate once more what the state has aggregated, and has no way to
take a histogram as it is. Temporality is cumulative, from the begin of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from engine_hooks.protocol import __version__
from tracer.export.metrics import COUNTER, HISTOGRAM, Buckets, Family


def request(families: Iterable[Family], start: int, now: int, resource: Mapping[str, str]) -> bytes:
    """The encoded request: `start` and `now` in ns since the epoch, `resource` what is told about
    us."""
    metrics = [_metric(family, start, now) for family in families if family.samples]
    scope = ScopeMetrics(
        scope=InstrumentationScope(name="tracer", version=__version__), metrics=metrics
    )
    told = ResourceMetrics(
        resource=Resource(attributes=_attributes(resource)), scope_metrics=[scope]
    )
    return bytes(ExportMetricsServiceRequest(resource_metrics=[told]).SerializeToString())


def _metric(family: Family, start: int, now: int) -> Metric:
    made = Metric(name=family.name, unit=family.unit, description=family.help)
    if family.kind == HISTOGRAM:
        points = [
            HistogramDataPoint(
                attributes=_attributes(labels),
                start_time_unix_nano=start,
                time_unix_nano=now,
                count=value.count,
                sum=value.total,
                bucket_counts=value.counts,
                explicit_bounds=value.bounds,
            )
            for labels, value in family.samples
            if isinstance(value, Buckets)
        ]
        temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        made.histogram.CopyFrom(Histogram(data_points=points, aggregation_temporality=temporality))
        return made
    numbers = [
        _number(value, labels, start, now)
        for labels, value in family.samples
        if not isinstance(value, Buckets)
    ]
    if family.kind == COUNTER:
        temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        made.sum.CopyFrom(
            Sum(data_points=numbers, aggregation_temporality=temporality, is_monotonic=True)
        )
    else:
        made.gauge.CopyFrom(Gauge(data_points=numbers))
    return made


def _number(value: float, labels: Mapping[str, str], start: int, now: int) -> NumberDataPoint:
    made = NumberDataPoint(
        attributes=_attributes(labels), start_time_unix_nano=start, time_unix_nano=now
    )
    if isinstance(value, int):
        made.as_int = value
    else:
        made.as_double = value
    return made


def _attributes(labels: Mapping[str, str]) -> list[KeyValue]:
    return [
        KeyValue(key=name, value=AnyValue(string_value=text))
        for name, text in labels.items()
        if text
    ]

"""Metrics as OTLP has them: one ``ExportMetricsServiceRequest``, made of opentelemetry-proto's
messages (the extra ``otlp``).

The SDK is not used: it would aggregate once more what the state has aggregated, and has no way to
take a histogram as it is. Temporality is cumulative, from the start of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Histogram,
    Metric,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from engine_hooks.protocol import __version__
from tracer.export.metrics import COUNTER, HISTOGRAM, Buckets, Family


def request(families: Iterable[Family], start: int, now: int, resource: Mapping[str, str]) -> bytes:
    """Return the encoded request: `start` and `now` in ns since the epoch, `resource` what is told
    about us."""
    scope = ScopeMetrics(
        scope=InstrumentationScope(name="tracer", version=__version__),
        metrics=[_metric(family, start, now) for family in families if family.samples],
    )
    about = Resource(attributes=_attributes(resource))
    told = ResourceMetrics(resource=about, scope_metrics=[scope])
    return bytes(ExportMetricsServiceRequest(resource_metrics=[told]).SerializeToString())


def _metric(family: Family, start: int, now: int) -> Metric:
    made = Metric(name=family.name, unit=family.unit, description=family.help)
    data: Histogram | Sum | Gauge = made.gauge
    if family.kind == HISTOGRAM:
        data = made.histogram
        data.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
    elif family.kind == COUNTER:
        data = made.sum
        data.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        data.is_monotonic = True
    for labels, value in family.samples:
        point: Any = data.data_points.add(
            attributes=_attributes(labels), start_time_unix_nano=start, time_unix_nano=now
        )
        if isinstance(value, Buckets):
            point.count, point.sum = value.count, value.total
            point.bucket_counts.extend(value.counts)
            point.explicit_bounds.extend(value.bounds)
        elif isinstance(value, int):
            point.as_int = value
        else:
            point.as_double = value
    return made


def _attributes(labels: Mapping[str, str]) -> list[KeyValue]:
    told = ((name, AnyValue(string_value=text)) for name, text in labels.items() if text)
    return [KeyValue(key=name, value=value) for name, value in told]

"""Metrics as Prometheus and OpenMetrics have them, through prometheus_client (the extra
``metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from tracer.export.metrics import COUNTER, HISTOGRAM, Buckets, Family

_SUFFIXES: Final = {
    "s": "seconds",
    "By": "bytes",
    "1": "",
    "1/s": "per_second",
    "By/s": "bytes_per_second",
    "MHz": "megahertz",
    "W": "watts",
    "Cel": "celsius",
}
"""By unit; one in braces (``{token}``) is an annotation and has none."""


def name_of(family: Family) -> str:
    """The name of a family in Prometheus: dots are underscores, the unit is the last word. Counters
    have ``_total`` after that in their samples."""
    plain = family.name.replace(".", "_")
    suffix = _SUFFIXES.get(family.unit, "")
    return f"{plain}_{suffix}" if suffix and not plain.endswith(f"_{suffix}") else plain


class StateCollector(Collector):
    """Asks `read` for all families whenever it is scraped."""

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Families in prometheus_client's terms."""
        for family in self._read():
            if family.samples:
                yield _metric(family)

    def describe(self) -> list[Metric]:
        """Nothing in advance: what there is depends on the engine."""
        return []


def registry(read: Callable[[], Iterable[Family]]) -> CollectorRegistry:
    """A registry of these families alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(StateCollector(read))
    return made


def text(families: Iterable[Family]) -> str:
    """The families in the OpenMetrics text format."""
    kept = list(families)
    told: bytes = generate_latest(registry(lambda: kept))  # type: ignore[no-untyped-call]
    return told.decode("utf-8")


def _metric(family: Family) -> Metric:
    names: dict[str, None] = {}
    for labels, _ in family.samples:
        names.update(dict.fromkeys(labels))
    keys = [name.replace(".", "_") for name in names]
    name, help_ = name_of(family), family.help
    made: Metric
    if family.kind == HISTOGRAM:
        made = histogram = HistogramMetricFamily(name, help_, labels=keys)
        for labels, value in family.samples:
            if isinstance(value, Buckets):
                told = [labels.get(name, "") for name in names]
                histogram.add_metric(told, buckets=_cumulative(value), sum_value=value.total)
        return made
    numbers = (
        CounterMetricFamily(name, help_, labels=keys)
        if family.kind == COUNTER
        else GaugeMetricFamily(name, help_, labels=keys)
    )
    for labels, value in family.samples:
        if not isinstance(value, Buckets):
            numbers.add_metric([labels.get(name, "") for name in names], value)
    return numbers


def _cumulative(value: Buckets) -> list[tuple[str, float]]:
    """Upper bounds as labels, with how many values lie at or below each."""
    reached, buckets = 0, []
    for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
        reached += count
        buckets.append((_bound(bound), float(reached)))
    return buckets


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:.12g}" if value % 1 else f"{value:.1f}"

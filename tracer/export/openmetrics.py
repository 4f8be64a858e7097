"""Metrics as Prometheus and OpenMetrics have them, through prometheus_client (the extra
``metrics``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from tracer.export.metrics import COUNTER, GAUGE, HISTOGRAM, Buckets, Family

_KINDS: Final[dict[str, Callable[..., object]]] = {
    HISTOGRAM: HistogramMetricFamily,
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
}
_SUFFIXES: Final = {
    "s": "seconds",
    "By": "bytes",
    "1/s": "per_second",
    "By/s": "bytes_per_second",
    "MHz": "megahertz",
    "W": "watts",
    "Cel": "celsius",
}
"""By unit; an annotation in braces (``{token}``) and a plain 1 have none."""


def name_of(family: Family) -> str:
    """Return the name of a family in Prometheus: dots are underscores, the unit is the last word.
    Counters have ``_total`` after that in their samples."""
    plain = family.name.replace(".", "_")
    suffix = _SUFFIXES.get(family.unit, "")
    return f"{plain}_{suffix}" if suffix and not plain.endswith(f"_{suffix}") else plain


class StateCollector(Collector):
    """Asks `read` for all families whenever it is scraped."""

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for family in self._read():
            if family.samples:
                yield _metric(family)

    def describe(self) -> list[Metric]:
        """Return nothing in advance: what there is depends on the engine."""
        return []


def registry(read: Callable[[], Iterable[Family]]) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(StateCollector(read))
    return made


def text(families: Iterable[Family]) -> str:
    kept = list(families)
    told: bytes = generate_latest(registry(lambda: kept))  # type: ignore[no-untyped-call]
    return told.decode("utf-8")


def _metric(family: Family) -> Metric:
    names = list(dict.fromkeys(name for labels, _ in family.samples for name in labels))
    keys = [name.replace(".", "_") for name in names]
    made: Any = _KINDS[family.kind](name_of(family), family.help, labels=keys)
    for labels, value in family.samples:
        told = [labels.get(name, "") for name in names]
        if isinstance(value, Buckets):
            made.add_metric(told, buckets=_cumulative(value), sum_value=value.total)
        else:
            made.add_metric(told, value)
    return cast(Metric, made)


def _cumulative(value: Buckets) -> list[tuple[str, float]]:
    """Upper bounds as labels, with how many values lie at or below each."""
    bounds = [*map(_bound, value.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(value.counts)), strict=True))


def _bound(value: float) -> str:
    return f"{value:.12g}" if value % 1 else f"{value:.1f}"

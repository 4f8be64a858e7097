"""What a scraper understands of our text: every sample by its name and labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tracer.export.metrics import Family
from tracer.export.openmetrics import text

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(families: Iterable[Family]) -> Exposed:
    """The families as a scraper has them."""
    return Exposed(text(families))


class Exposed:
    """Samples of an OpenMetrics text, which must be well-formed."""

    def __init__(self, told: str) -> None:
        self.samples: Samples = {}
        self.kinds: dict[str, str] = {}
        for family in text_string_to_metric_families(told):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} is told twice"
                self.samples[key] = sample.value

    def one(self, name: str, **labels: str) -> float:
        """The only sample of a name with these labels, whatever others it has."""
        found = self.all(name, **labels)
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def all(self, name: str, **labels: str) -> list[float]:
        """Every sample of a name with these labels."""
        wanted = set(labels.items())
        return [
            value for (known, has), value in self.samples.items() if known == name and wanted <= has
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(self.all(name, **labels))

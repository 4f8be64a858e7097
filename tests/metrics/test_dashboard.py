"""The Grafana dashboard asks for nothing that is not told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine_hooks.protocol.events import Closed, Received
from tests.metrics.exposed import Exposed, scraped
from tests.tui.timeline import HEADER, SOURCE, Timeline
from tracer.analysis.beside.achieved import Achieved
from tracer.analysis.model.devices import DEVICES
from tracer.export.jsondoc import main_engine
from tracer.export.metrics import families
from tracer.monitor.alerts import Alert, Alerts
from tracer.monitor.hardware.cgroup import Throttling
from tracer.monitor.hardware.gauge import Reading, families_of
from tracer.monitor.hardware.nvml import Gpu
from tracer.recording.triggers import parse
from tracer.state.trace_state import TraceState

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "tracer.json"
METRIC = re.compile(r"\b((?:gen_ai|tracer)_[a-z0-9_]+)(\{[^}]*\})?")
FUNCTIONS = {"sum", "rate", "max", "by", "histogram_quantile", "vector", "or", "label_values", "le"}
TARGETS = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel.get("targets", ())
]


@pytest.fixture(scope="module")
def exposed() -> Exposed:
    """All that can be told, of an engine that told everything."""
    state = TraceState()
    state.add_source(HEADER)
    for event in Timeline(40, rate=9.0).events:
        state.apply(SOURCE, event)
    state.apply(SOURCE, Received(state.now, 100_000, "broken", "/v1/completions"))
    state.apply(SOURCE, Closed(state.now, 100_000, 500))
    reading = Reading(
        "cuda", (Gpu(0, "GPU", 0.5, 1, 2, 3, 4, 5.0, 6.0, 7),), 1.0, 2, Throttling(1.0, 0.1, 3.0),
        Achieved(1.0, 2.0, 0.5, 3), DEVICES["h200"],
    )  # fmt: skip
    engine = main_engine(state.snapshot())
    assert engine is not None
    alerts = Alerts([Alert("some", parse("waiting>1"))])
    return scraped([*families(state), *families_of(reading, engine), *alerts.families()])


def test_it_is_a_dashboard() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert document["title"] and document["uid"] == "llm-request-tracer"
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids) and len(TARGETS) > 20
    for panel in document["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
    variables = {variable["name"] for variable in document["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(document["panels"]))) <= variables


@pytest.mark.parametrize(("title", "expression", "legend"), TARGETS, ids=lambda text: text[:40])
def test_every_expression_names_what_there_is(
    exposed: Exposed, title: str, expression: str, legend: str
) -> None:
    told = {name for name, _ in exposed.samples}
    asked = METRIC.findall(re.sub(r"by \([^)]*\)", "", expression))
    assert asked, expression
    has: set[str] = set()
    for name, matchers in asked:
        assert name in told, f"{title}: {name}"
        labels = {label for known, pairs in exposed.samples if known == name for label, _ in pairs}
        has |= labels
        for label in re.findall(r"([a-z_]+)\s*(?:=~|!=|=)", matchers):
            assert label in labels, f"{title}: {name} has no {label}"
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in labels.split(",")} <= has
    assert set(re.findall(r"\{\{\s*([a-z_]+)\s*\}\}", legend)) <= has

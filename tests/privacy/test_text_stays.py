"""A secret word of a prompt and of an output is on the screen, and without `--with-text` in nothing
that is written, sent or printed: recordings of every kind, exports, metrics, alerts, JSON, what the
program says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.recorder import Recorder
from tests.cli.commands import Commands
from tests.cli.conftest import tracer as tracer
from tests.hostile.doors import run
from tests.privacy.secrets import SECRET, deliveries
from tests.recording.story import Clock, fold
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.cli.export import FORMATS, export_state
from tracer.export import jsondoc, metrics, openmetrics, otlp_metrics, text
from tracer.export.diagnosis_text import diagnosis_text
from tracer.monitor.alerts import Alerts
from tracer.monitor.live_findings import LiveDiagnosis, live_findings
from tracer.recording import event_columns
from tracer.recording.flight import FlightRecorder
from tracer.recording.trace_file import TraceFile
from tracer.recording.triggers import parse
from tracer.state.trace_state import TraceState


@pytest.fixture(scope="module")
def state() -> TraceState:
    """What a viewer knows: all of it, the secret too."""
    folded = fold(deliveries(), ObservedState())
    assert any(SECRET in (request.prompt_text or "") for request in folded.requests.order)
    return folded


def contents(path: Path) -> bytes:
    """What a trace file holds, unpacked."""
    with TraceFile(path) as trace:
        blocks = [trace.content(block) or b"" for block in trace.blocks]
        return b"".join(blocks) + repr(trace.marks).encode() + path.read_bytes()


@pytest.mark.parametrize("with_text", [False, True])
def test_a_recording(with_text: bool, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace", with_text=with_text, encode=event_columns.encode)
    for delivery in deliveries():
        recorder.write(delivery)
        recorder.flush()
    recorder.close()
    assert (SECRET.encode() in contents(recorder.path)) is with_text
    assert (SECRET in run(["show", str(recorder.path), "--request", "engine-r3"]).out) is with_text
    assert (SECRET in run(["diagnose", str(recorder.path)]).out) is with_text


@pytest.mark.parametrize("with_text", [False, True])
def test_a_flight_recording_with_its_marks_and_why_it_was_written(
    with_text: bool, tmp_path: Path
) -> None:
    """The rule is a finding that would cite the prompt; without text nobody finds it, and a signal
    asks."""
    clock, reasons = Clock(0), list[str]()
    flight = FlightRecorder(
        tmp_path,
        5,
        [parse("finding", live_findings())],
        with_text=with_text,
        now=clock,
        after_s=0.5,
        on_written=lambda _, why: reasons.append(why),
    )
    for delivery in deliveries():
        clock.t = max([clock.t, *(event.t for event in delivery.events)])
        flight.feed(delivery)
        flight.tick()
    flight.trigger("asked")
    flight.close()
    assert flight.files and reasons
    assert any(SECRET.encode() in contents(path) for path in flight.files) is with_text
    assert (SECRET in " ".join(reasons)) is with_text


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export(kind: str, state: TraceState, tmp_path: Path) -> None:
    path = tmp_path / kind
    export_state(state, kind, path, name="t")
    for made in path.iterdir() if path.is_dir() else [path]:
        assert SECRET.encode() not in made.read_bytes(), made.name
    if kind == "parquet":
        import pyarrow.parquet as parquet

        assert all(
            SECRET not in str(parquet.read_table(made).to_pylist()) for made in path.iterdir()
        )


def test_metrics_in_both_formats(state: TraceState) -> None:
    assert SECRET not in openmetrics.text(metrics.families(state))
    assert SECRET.encode() not in otlp_metrics.request(metrics.families(state), 0, state.now, {})


def test_json_and_text_of_everything_but_one_request(state: TraceState) -> None:
    snapshot = state.snapshot()
    assert SECRET not in json.dumps(jsondoc.document(snapshot))
    assert SECRET not in text.report(snapshot, width=200, unicode=True)
    for view in snapshot.requests:
        detail = state.detail(view.id)
        assert detail is not None
        assert SECRET not in json.dumps(jsondoc.request(detail, snapshot))


def test_a_finding_cites_a_prompt_on_the_screen_and_only_its_place_elsewhere(
    state: TraceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> str:
        found = diagnose(state)
        live = LiveDiagnosis()
        again = [finding.statement for _ in range(3) for finding in live.update(state)]
        return json.dumps(found.to_document()) + diagnosis_text(found, width=200) + " ".join(again)

    assert f"{SECRET}19" in said()
    monkeypatch.setattr(state, "quotes", False)
    assert SECRET not in said() and "the system prompt, at token" in said()


def test_alerts_on_a_finding(
    state: TraceState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "quotes", False)
    path = tmp_path / "alerts.toml"
    path.write_text('[[alert]]\nrule = "finding"\n')
    alerts = Alerts.load(path, live_findings())
    news = []
    for second in range(4):
        news += alerts.check(state, state.snapshot(now=state.now + second * NS_PER_S))
    told = (
        json.dumps(alerts.to_document(0))
        + openmetrics.text(alerts.families())
        + " ".join(one.text for one in news)
    )
    assert SECRET not in told


@pytest.mark.slow
@pytest.mark.parametrize("with_text", [False, True])
def test_a_run_without_a_screen(with_text: bool, tracer: Commands, tmp_path: Path) -> None:
    """What it prints, its log, its recording and what `diagnose` prints of it while it runs."""
    alerts = tmp_path / "alerts.toml"
    alerts.write_text('[[alert]]\nrule = "finding"\n')
    done = tracer.run(
        "run",
        "--headless",
        "--json",
        "--record",
        str(tmp_path / "a.trace"),
        "--alerts",
        str(alerts),
        *(["--with-text"] if with_text else []),
        "--",
        sys.executable,
        "-m",
        "tests.privacy.secrets",
        "4",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"]
    assert (SECRET in done.stdout) is with_text
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert "said" in logs and SECRET not in logs
    assert (SECRET.encode() in contents(tmp_path / "a.trace")) is with_text
    assert with_text or SECRET not in done.stderr

"""`tracer metrics`, and `--metrics`, `--otlp-metrics` and `--alerts` of the commands that watch an
engine."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.cli.commands import Commands, traced, wait_until
from tests.metrics.collector import Collector
from tests.metrics.exposed import Exposed
from tracer.cli.main import main
from tracer.replay.cursor import load

pytestmark = pytest.mark.slow

RECORDING = Path(__file__).parents[2] / "recordings" / "transformers-mixed.trace"
ALERTS = '[[alert]]\nname = "queue"\nrule = "waiting>0"\nexit = {exit}\n[[alert]]\nrule = "dead"\n'


def test_a_recording_s_metrics_are_printed_and_its_alerts_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alerts = tmp_path / "alerts.toml"
    alerts.write_text('[[alert]]\nname = "slow"\nrule = "ttft_p95>2s"\nfor = "5s"\nexit = true\n')
    assert main(["metrics", str(RECORDING), "--alerts", str(alerts)]) == 1
    out, err = capsys.readouterr()
    exposed = Exposed(out)
    assert exposed.one("tracer_requests_received_total") == load(RECORDING).snapshot().total
    assert exposed.one("tracer_alert_fired_total", alert="slow") == 1
    assert re.fullmatch(
        r"tracer: alert: warning: slow: ttft p95 [0-9.]+ s, rule ttft_p95>2s\n", err
    )
    assert main(["metrics", str(RECORDING), "--metrics", "0"]) == 2
    (refused,) = capsys.readouterr().err.splitlines()
    assert "is a recording: its metrics are printed" in refused


@pytest.mark.slow
def test_a_run_serves_sends_and_watches(tracer: Commands, tmp_path: Path) -> None:
    """All at once, beside one engine; an alert with `exit` makes the exit code 1."""
    alerts = tmp_path / "alerts.toml"
    alerts.write_text(ALERTS.format(exit="true"))
    with Collector() as collector:
        process = tracer.start(
            "run",
            "--headless",
            "--seconds",
            "5",
            "--json",
            "--metrics",
            "0",
            "--otlp-metrics",
            collector.url,
            "--alerts",
            str(alerts),
            "--",
            *traced("eng", "for", "60"),
            OTEL_METRIC_EXPORT_INTERVAL="300",
        )
        assert process.stderr is not None
        url = process.stderr.readline().strip().rpartition(" ")[2]
        assert url.startswith("http://127.0.0.1:") and url.endswith("/metrics")
        bodies: list[str] = []

        def served() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    bodies.append(answer.read().decode())
            except OSError:
                return False
            return (
                "tracer_alert_firing{" in bodies[-1]
                and "tracer_requests_ended_total{" in bodies[-1]
            )

        wait_until(served, "the engine's metrics")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        document = json.loads(out)
        assert "alert: warning: queue: waiting 1, rule waiting>0" in err
        metrics = collector.metrics()
    queue, dead = document["alerts"]
    assert (queue["name"], queue["fired"], queue["firing"], dead["fired"]) == ("queue", 1, True, 0)
    assert document["counts"]["finished"] == 1
    assert 'finish_reason="stop"' in bodies[-1]
    assert metrics["tracer.requests.received"].sum.data_points[0].as_int == 2
    assert metrics["gen_ai.server.request.duration"].histogram.data_points[0].count == 1


@pytest.mark.slow
def test_an_engine_that_runs_already_is_watched_without_a_screen(
    tracer: Commands, tmp_path: Path
) -> None:
    """An alert without `exit` changes nothing but says so; without options the metrics are printed
    once."""
    alerts = tmp_path / "alerts.toml"
    alerts.write_text(ALERTS.format(exit="false"))
    process = tracer.start("run", "--headless", "--", *traced("eng", "for", "60"))
    wait_until(lambda: list(tracer.sockets.rglob("*.sock")), "the engine")
    pid = tracer.run("attach", "--list").stdout.splitlines()[1].split()[1]
    watching = tracer.run("metrics", pid, "--alerts", str(alerts), "--seconds", "2")
    assert watching.returncode == 0 and watching.stdout == ""
    assert "alert: warning: queue: waiting 1" in watching.stderr
    assert Exposed(tracer.run("metrics", pid).stdout).one("tracer_requests_waiting") == 1
    process.terminate()
    process.communicate(timeout=30)


def test_what_cannot_be_had_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_SOCKET_DIR", str(tmp_path / "sockets"))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[alert]]\nrule = "speed>3"\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, reason in (
            (
                ("--metrics", str(port)),
                f"cannot listen on 127.0.0.1:{port}: address already in use",
            ),
            (("--metrics", "nowhere"), "cannot listen on 'nowhere'"),
            (("--otlp-metrics", "localhost:4318"), "cannot send metrics to"),
            (("--alerts", str(tmp_path / "none.toml")), "no such file or directory"),
            (
                ("--alerts", str(wrong)),
                f"{wrong}: alert 1: rule: 'speed>3': no such figure as speed",
            ),
        ):
            assert main(["run", "--headless", *options, "--", *traced("eng", "for", "60")]) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.startswith("tracer run: ") and reason in err
            assert err.count("\n") == 1
    assert not (tmp_path / "sockets").exists()

"""`tracer demo`: the real engine, the real model, real clients, and what they measured beside what
the tracer says."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_hooks.protocol.stages import Stage
from tests.cli.commands import Commands, marked, wait_until
from tests.cli.terminal import Terminal
from tracer.export.extras import install_command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_dir")]

DEADLINE_S = 240.0


@dataclass(frozen=True)
class Watched:
    """What a demo told of itself at its end, and what its clients measured, by their ids."""

    document: dict[str, Any]
    watches: dict[str, Any]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Watched]:
    """Half a minute of everyday traffic."""
    with tempfile.TemporaryDirectory(prefix="tracer-test-") as sockets:
        tracer = Commands(Path(sockets), tmp_path_factory.mktemp("logs"))
        stopwatch = tmp_path_factory.mktemp("demo") / "stopwatch.jsonl"
        try:
            document = headless(
                tracer, "--seconds", "30", "--seed", "3", "--stopwatch", str(stopwatch)
            )
            told = map(json.loads, stopwatch.read_text().splitlines())
            yield Watched(document, {watch["client_id"]: watch for watch in told})
        finally:
            tracer.finish()


def headless(tracer: Commands, *arguments: str) -> dict[str, Any]:
    """Run a demo without a screen to its end; its JSON document."""
    process = tracer.start("demo", "--headless", "--json", *arguments)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "tracer: transformers is serving · " in err
    document: dict[str, Any] = json.loads(out)
    return document


def serving(tracer: Commands) -> subprocess.Popen[str]:
    """A demo that has answered some requests."""
    process = tracer.start("demo", "--headless", "--rate", "4")
    assert process.stderr is not None
    answered = 0
    for line in process.stderr:
        answered += "POST /v1/chat/completions" in line
        if answered == 5:
            break
    assert answered == 5
    return process


def test_the_tracer_agrees_with_the_clients_stopwatch(watched: Watched) -> None:
    """Two processes that know nothing of each other measured the same requests on the same
    clock."""
    document, watches = watched.document, watched.watches
    requests = {request["id"]: request for request in document["requests"]}
    assert len(requests) >= 5
    assert set(requests) <= set(watches), (
        "each request that was traced was sent by a client of ours"
    )
    assert document["losses"] == {
        "events": 0,
        "unknown": 0,
        "set_aside": 0,
        "incomplete_requests": 0,
        "hook_faults": [],
        "sources_gone": [],
    }

    both = [
        (request, watches[name])
        for name, request in requests.items()
        if request["ttft_ms"] is not None
        and watches[name]["first"] is not None
        and watches[name]["streaming"]
    ]
    assert both
    late = [(watch["first"] - watch["sent"]) / 1e6 - request["ttft_ms"] for request, watch in both]
    # A client starts its watch before it builds the request and stops it after the socket, never
    # the other way round.
    assert min(late) > -1
    assert statistics.median(late) < 150, late

    done = [
        (request, watch)
        for request, watch in both
        if request["phase"] == "done" and not watch["hung_up"] and watch["output_tokens"]
    ]
    assert done
    for request, watch in done:
        assert request["output_tokens"] == watch["output_tokens"], request["id"]
        assert request["prompt_tokens"] == watch["prompt_tokens"], request["id"]
        assert request["finish_reason"] == watch["finish_reason"], request["id"]
        whole = (watch["done"] - watch["sent"]) / 1e6
        assert abs(whole - request["e2e_ms"]) < max(150, whole / 10), request["id"]


def test_every_stage_of_a_finished_request_is_measured(watched: Watched) -> None:
    document = watched.document
    assert document["engine"]["name"] == "transformers"
    assert document["engine"]["model"].endswith("SmolLM2-135M-Instruct")
    assert document["engine"]["num_blocks"] == 160
    assert {stage: covered["status"] for stage, covered in document["coverage"].items()} == {
        stage.id: "measured" for stage in Stage
    }
    streamed = [
        request
        for request in document["requests"]
        if request["phase"] == "done" and request["streaming"] and not request["disconnected"]
    ]
    assert streamed
    for request in streamed:
        missing = [stage for stage, row in request["stages"].items() if row is None]
        assert missing == [], request["id"]


def test_a_burst_outgrows_the_cache_and_preempts(tracer: Commands) -> None:
    """Nothing but the burst that comes by itself after 15 to 20 seconds; over when it is seen what
    is asked for."""
    process = tracer.start(
        "demo", "--headless", "--json", "--seconds", "75", "--rate", "0", "--seed", "5"
    )

    def seen() -> bool:
        time.sleep(4)
        now = tracer.run("show", "demo", "--json")
        return process.poll() is not None or (
            now.returncode == 0
            and json.loads(now.stdout)["gauges"]["preemptions"] > 0
            and any(
                request["queue_ms"] and request["queue_ms"] > 100
                for request in json.loads(now.stdout)["requests"]
            )
        )

    wait_until(seen, "a preemption")
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    document = json.loads(out)
    assert "Traceback" not in "".join(
        line for line in err.splitlines() if line.startswith("tracer")
    )
    assert {request["id"].partition("-")[0] for request in document["requests"]} == {"burst"}
    assert len(document["requests"]) >= 10
    assert document["gauges"]["preemptions"] > 0
    assert any(request["preemptions"] for request in document["requests"])
    assert any(
        request["queue_ms"] and request["queue_ms"] > 100 for request in document["requests"]
    )


def test_an_interrupt_while_it_loads_ends_everything(tracer: Commands) -> None:
    process = tracer.start("demo", "--headless")
    wait_until(lambda: len(marked(tracer.mark)) >= 3, "the engine's process")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in "".join(
        line for line in err.splitlines() if line.startswith("tracer")
    )


def test_an_interrupt_while_it_serves_prints_the_summary_and_ends_everything(
    tracer: Commands,
) -> None:
    process = serving(tracer)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert "transformers" in out
    assert "SmolLM2-135M-Instruct" in out


def test_nothing_is_left_when_it_is_killed(tracer: Commands) -> None:
    """Engine and clients notice by themselves; the fixture looks for them."""
    process = serving(tracer)
    assert len(marked(tracer.mark)) >= 4, "tracer, guardian, engine, clients"
    process.kill()
    process.wait()


def test_on_a_terminal_it_shows_requests_and_obeys_keys(tracer: Commands) -> None:
    shown = Terminal(
        [sys.executable, "-m", "tracer", "demo", "--rate", "0.5"], tracer.environment()
    )
    try:
        shown.wait_for(lambda: "receive" in shown.text, "the first picture", 30)
        shown.wait_for(
            lambda: "decode" in shown.text and "tok/s" in shown.text,
            "a request that decodes",
            DEADLINE_S,
        )
        shown.type("b")
        shown.wait_for_text("burst-", DEADLINE_S)
        shown.type("q")
        assert shown.wait_for_end(DEADLINE_S) == 0
    finally:
        shown.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "/no/such/folder"), "there is no model folder /no/such/folder"),
        (("--model", "."), ". is no model folder: it holds no config.json"),
        (
            ("--stopwatch", "/no/such/folder/file"),
            "cannot write /no/such/folder/file: no such file or directory",
        ),
    ],
)
def test_what_cannot_work_is_told_in_one_line(
    tracer: Commands, arguments: tuple[str, ...], reason: str
) -> None:
    done = tracer.run("demo", "--headless", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tracer: {reason}\n"


def test_without_the_engine_it_says_what_to_install(
    tracer: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracer.demo.launch import DemoError, launch_transformers

    monkeypatch.setattr("sys.executable", "/no/such/python")
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(
        DemoError, match=r"transformers is not installed here: pip install "
    ) as told:
        launch_transformers("model", 1)
    assert str(told.value).endswith(install_command("transformers"))

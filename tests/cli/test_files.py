"""Commands on files, as a user types them; the traces are recorded from real sockets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Commands
from tests.cli.terminal import Terminal
from tests.cli.test_screen import Open, terminal, traced  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture
def trace(tracer: Commands, tmp_path: Path) -> Path:
    """A trace of a traced child that says a few things and ends."""
    path = tmp_path / "child.trace"
    done = tracer.run(
        "run", "--headless", "--record", str(path), "--", *traced("tinyengine", "exit", "0")
    )
    assert done.returncode == 0, done.stderr
    return path


def test_what_was_recorded_is_shown(tracer: Commands, trace: Path) -> None:
    shown = tracer.run("show", str(trace), "--json")
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert [request["id"] for request in document["requests"]]
    assert document["engine"]["name"] == "tinyengine"
    text = tracer.run("show", str(trace))
    assert text.returncode == 0
    assert "tinyengine" in text.stdout


def test_a_recording_is_diagnosed(tracer: Commands, trace: Path) -> None:
    done = tracer.run("diagnose", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    assert "verdict" in json.loads(done.stdout)


def test_a_recording_is_replayed_in_the_same_screens(tracer: Commands, trace: Path) -> None:
    import sys

    shown = Terminal(
        [sys.executable, "-m", "tracer", "replay", str(trace), "--at", "100%"], tracer.environment()
    )
    try:
        shown.wait_for_text("tinyengine")
        shown.wait_for_text("replay")
        shown.type("q")
        assert shown.wait_for_end() == 0
    finally:
        shown.close()


def test_without_a_terminal_a_replay_says_what_to_do_instead(tracer: Commands, trace: Path) -> None:
    done = tracer.run("replay", str(trace))
    assert done.returncode == 2
    assert done.stderr.startswith("tracer replay: no terminal to replay")


def test_the_reference_budget_comes_out(tracer: Commands) -> None:
    done = tracer.run(
        "budget", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--prompt", "2000", "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["stages"]["prefill"]["ms"] == pytest.approx(86.5, rel=0.01)
    assert document["kv_bytes"] == pytest.approx(2000 * 131_072, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("show", "{empty}"), "is empty"),
        (("show", "missing.trace"), "cannot read missing.trace"),
        (("diagnose", "{text}"), "is not a trace file"),
        (("replay", "{text}"), "no terminal"),
        (("budget", "--model", "no-such-model"), "no-such-model"),
        (("record", "999999", "-o", "out.trace"), "999999"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    tracer: Commands, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    empty, text = tmp_path / "empty.trace", tmp_path / "text.trace"
    empty.write_bytes(b"")
    text.write_text("not a trace\n" * 50)
    done = tracer.run(*(argument.format(empty=empty, text=text) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_wrong_with_a_file_is_said_beside_what_it_tells(
    tracer: Commands, trace: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.trace"
    cut.write_bytes(trace.read_bytes()[:-60])
    for command in (("show", str(cut), "--json"), ("diagnose", str(cut), "--json")):
        done = tracer.run(*command)
        assert done.returncode == 0 and json.loads(done.stdout)
        assert done.stderr.startswith("tracer: cut.trace was cut at byte ")
        assert len(done.stderr.splitlines()) == 1


def test_a_file_with_prompts_says_so(tracer: Commands, tmp_path: Path) -> None:
    path = tmp_path / "text.trace"
    done = tracer.run(
        "run",
        "--headless",
        "--with-text",
        "--record",
        str(path),
        "--",
        *traced("tiny", "exit", "0"),
    )
    assert done.returncode == 0, done.stderr
    assert "holds prompts and outputs" in tracer.run("show", str(path)).stderr

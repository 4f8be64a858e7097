"""One stray stamp in a recording: every command reads it in little memory and time, and says of the
rest what it says without the stray."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from engine_hooks.protocol.stamps import set_aside_line
from tests.cli.terminal import Terminal
from tests.diagnosis.scenario import START
from tests.hostile import strays
from tests.hostile.strays import (
    MOST_MB,
    Measured,
    S,
    believed_by_its_writer,
    commands,
    plain,
    run,
    strewn,
    write,
)
from tests.state.test_stamps import MAKERS, moved
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import load
from tracer.replay.player import Player

KINDS: Final = ("Received", "Heartbeat", "Step", "Closed", "Sent")
STAMPS: Final = {
    "wall clock": 1_790_000_000 * S,
    "zero": 0,
    "negative": -5,
    "a billion seconds": 10**18,
    "the last instant": (1 << 62) - 1,
    "64 bits": (1 << 63) - 1,
    "in five hours": START + 5 * 3_600 * S,
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("clean") / "clean.trace", plain())


def stray(path: Path, kind: str, t: int, places: tuple[float, ...] = (0.5,)) -> Path:
    return write(path, strewn(plain(), [MAKERS[kind]], t, places))


def document(done: Measured) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.out)
    return found


def check(done: Measured, arguments: list[str]) -> None:
    said = f"{arguments}: exit {done.code}, {done.peak_mb} MB\n{done.err[-2000:]}"
    assert done.code == 0, said
    assert "Traceback" not in done.out + done.err, said
    assert done.peak_mb <= MOST_MB, said


@pytest.mark.parametrize("kind", ["Received", pytest.param("Heartbeat", marks=pytest.mark.slow)])
def test_the_wall_clock_among_monotonic_stamps_is_set_aside(
    kind: str, clean: Path, tmp_path: Path
) -> None:
    odd = stray(tmp_path / "odd.trace", kind, STAMPS["wall clock"])
    arguments = ["diagnose", str(odd), "--json"]
    done = run(arguments, tmp_path)
    check(done, arguments)
    found = document(done)
    [said] = [entry for entry in found["cannot_tell"] if entry["question"] == "stamps"]
    assert said["reason"] == set_aside_line(1)
    found["cannot_tell"].remove(said)
    assert found == document(run(["diagnose", str(clean), "--json"], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stamp", "kind", "places"),
    [(stamp, KINDS[at % len(KINDS)], ((0.0,), (0.5,), (1.0,), (0.2, 0.4, 0.6))[at % 4])
     for at, stamp in enumerate(STAMPS)],
)  # fmt: skip
def test_every_command_holds(
    stamp: str, kind: str, places: tuple[float, ...], clean: Path, tmp_path: Path
) -> None:
    odd = stray(tmp_path / "odd.trace", kind, STAMPS[stamp], places)
    answers = {}
    for arguments in commands(odd, clean, tmp_path):
        done = run(arguments, tmp_path)
        check(done, arguments)
        answers[" ".join(arguments[:1] + arguments[2:])] = done
    shown = document(answers["show --json"])
    assert shown["losses"].pop("set_aside") == len(places)
    expected = document(run(["show", str(clean), "--json"], tmp_path))
    assert expected["losses"].pop("set_aside") == 0
    assert shown == expected
    assert set_aside_line(len(places)) in answers["show"].out


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [3 * 3_600, 3_000 * 86_400])
def test_a_trace_of_days_takes_no_more(pause_s: int, clean: Path, tmp_path: Path) -> None:
    """What is drawn, counted or written follows the events, not the time between them."""
    told = plain()
    middle = len(told) // 2
    later = [
        (at + pause_s * S, source, moved(event, pause_s * S)) for at, source, event in told[middle:]
    ]
    path = write(tmp_path / "days.trace", [*told[:middle], *later])
    for arguments in commands(path, clean, tmp_path):
        done = run(arguments, tmp_path)
        check(done, arguments)
        assert "set aside" not in done.out
        if arguments[2:] == ["--json"] and arguments[0] == "show":
            assert document(done)["losses"]["set_aside"] == 0


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[Terminal]:
    odd = believed_by_its_writer(
        stray(tmp_path / "odd.trace", "Received", STAMPS["wall clock"], (0.5, 1.0))
    )
    env = {**os.environ, "TERM": "xterm-256color"}
    shown = Terminal(
        strays.command(["replay", str(odd), "--at", "50%"], tmp_path / "measured"), env
    )
    yield shown
    shown.close()


@pytest.mark.slow
def test_a_replay_shows_it_and_is_sent_around(replayed: Terminal, tmp_path: Path) -> None:
    replayed.wait_for_text("req-")
    replayed.wait_for_text("set aside")
    for keys in (".", ",", "\x1b[C", "\x1b[D", "3", "4", "1"):
        replayed.type(keys)
        replayed.read(0.2)
    replayed.type("q")
    assert replayed.wait_for_end() == 0
    peak, _ = strays.measured(tmp_path / "measured")
    assert peak <= MOST_MB


@pytest.mark.parametrize("stamp", ["wall clock", "the last instant", "in five hours"])
@pytest.mark.parametrize("places", [(0.0,), (0.5,), (1.0,), (0.3, 0.3, 0.6)])
def test_the_timeline_of_a_file_is_that_without_the_stray(
    stamp: str, places: tuple[float, ...], clean: Path, tmp_path: Path
) -> None:
    """Whatever its writer believed: where the file begins and ends, and what is there at any
    instant."""
    odd = stray(tmp_path / "odd.trace", "Received", STAMPS[stamp], places)
    for path in (
        odd,
        believed_by_its_writer(stray(tmp_path / "old.trace", "Received", STAMPS[stamp], places)),
    ):
        with TraceFile(path) as trace, TraceFile(clean) as expected:
            assert (trace.begin, trace.end) == (expected.begin, expected.end)
            times = [t for block in trace.blocks for t in (block.first, block.last)]
            assert times == sorted(times)
            span = expected.end - expected.begin
        for share in (0.25, 0.75):
            at = expected.begin + round(share * span)
            there, here = load(clean, until=at), load(path, until=at)
            assert abs(here.now - there.now) <= S
            assert abs(here.requests.finished_total - there.requests.finished_total) <= 6
        player = Player.open(path, paused=True)
        player.seek_fraction(0.5)
        while player.target is not None:
            player.tick()
        assert abs(player.now() - (expected.begin + span // 2)) <= 1
        player.close()


def test_an_import_leaves_spans_out_whose_times_contradict_the_others(tmp_path: Path) -> None:
    from tests.spans.test_import_spans import HERE
    from tracer.export.imports.spans import read

    document = json.loads((HERE / "vllm.json").read_text())
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    usual = read(json.dumps(document).encode())
    for begin, end in (
        (0, 5),
        (0, 1_790_000_000 * S),
        ((1 << 62) - 1, (1 << 63) - 1),
        (10**17, 10**17 + 5),
        (int(spans[0]["startTimeUnixNano"]), 1 << 62),
    ):
        odd = json.loads(json.dumps(spans[0]))
        odd.update(startTimeUnixNano=str(begin), endTimeUnixNano=str(end), spanId="odd")
        document["resourceSpans"][0]["scopeSpans"][0]["spans"] = [odd, *spans]
        found = read(json.dumps(document).encode())
        assert (found.set_aside, found.requests) == (1, usual.requests)
        assert found.events == usual.events

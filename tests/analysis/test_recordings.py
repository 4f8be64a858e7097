"""``tracer budget --fit`` and ``--what-if`` on recordings, and the expected column of ``tracer
show``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine_hooks.protocol.stages import Stage
from tracer.analysis.fit.calibration import calibration_path, load
from tracer.cli.main import main
from tracer.format.text import cell_width

RECORDING = Path(__file__).parents[2] / "recordings" / "transformers-mixed.trace"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> int:
    """One command; its exit code."""
    try:
        return main(arguments)
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code


def test_a_recording_calibrates_its_engine_and_expected_values_follow_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("budget", "--fit", str(RECORDING)) == 0
    text = capsys.readouterr().out
    assert re.search(r"decode runs at [\d.]+ % of the memory bandwidth of ", text)
    for words in (
        "MFU",
        "MBU",
        "host overhead of a step",
        "90 % of resamples",
        "on steps not used for it",
        "Kept in",
    ):
        assert words in text
    assert all(cell_width(line) <= 100 for line in text.splitlines())
    assert len(load().fits) == 1

    assert run("budget", "--fit", str(RECORDING), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_error"] < 0.25
    assert told["mbu"]["low"] <= told["mbu"]["value"] <= told["mbu"]["high"]
    assert told["step"]["weights_ms"] > 0

    assert run("show", str(RECORDING), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert "fitted" in document["engine"]["expected_from"]
    request = next(
        row for row in document["requests"] if row["phase"] == "done" and row["output_tokens"] > 10
    )
    rows = [row for row in request["stages"].values() if row is not None]
    assert rows
    assert all(row["expected_ms"] >= 0 for row in rows)

    assert run("show", str(RECORDING), "--request", request["id"], "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert set(alone["stages"]) == {stage.id for stage in Stage}
    assert alone["stages"]["decode"]["expected_ms"] > 0
    assert run("show", str(RECORDING), "--request", request["id"]) == 0
    page = capsys.readouterr().out
    assert re.search(r"^ +ms +expected +share$", page, re.MULTILINE)
    assert "expected values: a step fitted to a recording of this engine" in page


def test_without_a_calibration_nothing_is_expected_and_show_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("show", str(RECORDING), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert "tracer budget --device cpu" in document["engine"]["expected_from"]
    rows = [
        row
        for request in document["requests"]
        for row in request["stages"].values()
        if row is not None
    ]
    assert {row["expected_ms"] for row in rows} == {None}
    assert run("show", str(RECORDING), "--request", document["requests"][0]["id"]) == 0
    assert "no expected values: run `tracer budget --device cpu` once" in capsys.readouterr().out


def test_what_if_tells_the_change_with_its_range_as_text_and_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("budget", "--what-if", str(RECORDING), "rate×2", "max-num-seqs=2") == 0
    text = capsys.readouterr().out
    assert text.startswith("with rate×2 slots=2: TTFT p50 ")
    assert "90 % of replays" in text
    assert run("budget", "--what-if", str(RECORDING), "rate×2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    metric = told["metrics"]["ttft_p95"]
    assert metric["low"] <= metric["predicted"] <= metric["high"]
    assert metric["predicted"] >= metric["measured"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fit", "nowhere.trace"],
        ["--what-if", "nowhere.trace", "batch×2"],
        ["--what-if", str(RECORDING)],
        ["--what-if", str(RECORDING), "colour=blue"],
        ["--what-if", str(RECORDING), "kv-blocks=1"],
        ["--fit", __file__],
        ["--fit", str(RECORDING), "--screen"],
        ["--screen", "--json"],
        ["--screen"],
        ["--journey"],
        ["--fit", str(RECORDING), "--device", "abacus"],
        ["--what-if"],
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("budget", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("tracer budget: ")
    assert "Traceback" not in captured.err


def test_measuring_this_processor_is_kept_for_the_screens(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert run("budget", "--model", "smollm2-135m", "--device", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["device"]["name"] == "cpu"
    kept = load().processor
    assert kept is not None
    assert kept.flops > 0
    assert cache in calibration_path().parents


def test_a_cache_that_cannot_be_written_is_told_and_does_no_harm(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    assert run("budget", "--model", "smollm2-135m", "--device", "cpu", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["modelled"]
    assert "is not kept" in captured.err

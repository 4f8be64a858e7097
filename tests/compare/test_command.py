"""``tracer compare`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import tracer  # noqa: F401
from tests.cli.test_screen import Open, terminal  # noqa: F401
from tests.compare.recorded import recorded
from tracer.cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two equal runs and one that decodes more slowly."""
    folder = tmp_path_factory.mktemp("traces")
    recorded(folder / "one.trace", seed=1)
    recorded(folder / "two.trace", seed=2)
    recorded(folder / "slow.trace", seed=3, decode_ms=lambda batch, context: 25 + 0.05 * batch)
    return folder


def test_equal_runs_and_a_slow_one_are_told_apart(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, slow = (str(files / f"{name}.trace") for name in ("one", "two", "slow"))
    assert main(["compare", one, two, slow, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    equal, slower = document["pairs"]
    assert equal["differs"] is False
    assert equal["verdict"].startswith("No difference beyond noise: E2E p50 ")
    assert slower["explained_by"] == "decode"
    assert [column["name"] for column in document["columns"]] == [
        "one.trace",
        "two.trace",
        "slow.trace",
    ]
    assert main(["compare", one, slow]) == 0
    page = capsys.readouterr().out
    assert "decode explains" in " ".join(page.split())
    assert "prefix cache on" in page


@pytest.mark.parametrize(
    ("checks", "code", "said"),
    [
        ((), 0, ""),
        (("tpot=5", "decode=100"), 1, "tpot p50 of slow.trace rose 2"),
        (("tpot=60", "ttft=60"), 0, ""),
        (("11=5%",), 1, "decode p50"),
        (("itl=90",), 0, ""),
    ],
)
def test_checks_decide_the_exit_code(
    files: Path, capsys: pytest.CaptureFixture[str], checks: tuple[str, ...], code: int, said: str
) -> None:
    words = [word for check in checks for word in ("--fail-on", check)]
    assert main(["compare", str(files / "one.trace"), str(files / "slow.trace"), *words]) == code
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == (1 if code else 0)


def test_what_cannot_be_checked_does_not_pass(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(files / "one.trace"), str(files / "two.trace")]
    assert main(["compare", *names, "--percentile", "p99", "--fail-on", "ttft=50"]) == 1
    assert (
        "ttft p99 of two.trace cannot be checked: 200 requests needed; A has 40, B has 40"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{one}", "missing.trace"], "cannot read missing.trace"),
        (["{one}", "{one}", "--fail-on", "gpu=5"], "gpu"),
        (["{one}", "{one}", "--fail-on", "decode"], "decode=5"),
        (["{one}", "{one}", "--fail-on", "decode=x"], "decode=5"),
        (["{one}", "{one}", "--screen"], "no terminal"),
        (["{one}", "no-such-engine"], "no-such-engine"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["compare", *(word.format(one=files / "one.trace") for word in words)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert reason in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize("count", [1, 4])
def test_two_or_three_traces_are_compared(
    files: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["compare", *[str(files / "one.trace")] * count])
    assert left.value.code == 2
    assert f"two or three traces are compared, not {count}" in capsys.readouterr().err


def test_a_trace_beside_itself_is_given_two_names(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *[str(files / "one.trace")] * 2, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [column["name"] for column in document["columns"]] == ["one.trace (1)", "one.trace (2)"]
    assert document["pairs"][0]["differs"] is False


def test_a_file_that_is_no_trace_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.trace"
    text.write_text("not a trace\n" * 50)
    assert main(["compare", str(text), str(text)]) == 2
    assert "is not a trace file" in capsys.readouterr().err


@pytest.mark.slow
def test_on_a_terminal_the_screen_opens_on_the_comparison(files: Path, terminal: Open) -> None:  # noqa: F811
    shown = terminal("compare", str(files / "one.trace"), str(files / "slow.trace"), "--screen")
    shown.wait_for_text("one.trace against slow.trace")
    shown.wait_for_text("decode explains")
    shown.type("q")
    assert shown.wait_for_end() == 0


def test_the_three_contexts_stand_side_by_side_even_where_no_difference_can_be_told() -> None:
    from tests.test_readme import ROOT
    from tracer.analysis.compare import compare, trace_of_state
    from tracer.export.compare_text import compare_text
    from tracer.replay.cursor import load

    names = ("transformers-cold", "transformers-shared-prefix", "transformers-loaded")
    traces = [trace_of_state(name, load(ROOT / "recordings" / f"{name}.trace")) for name in names]
    assert [trace.context.kind for trace in traces] == [
        "cold and idle",
        "warm and shared",
        "loaded",
    ]
    comparison = compare(traces)
    text = compare_text(comparison, width=100)
    for row in ("TTFT", "queue", "prefill", "decode", "teardown"):
        line = next(line for line in text.splitlines() if line.startswith(f"{row} "))
        assert (
            len([word for word in line.split() if word.replace(",", "").replace(".", "").isdigit()])
            == 3
        ), line
        assert "unlike" in line
    assert all(
        change.differs is None
        for pair in comparison.pairs
        for found in pair.changes.values()
        for change in found.values()
    )
    assert text.count("prefix cache on") == 3
    assert text.count("req/s") >= 3

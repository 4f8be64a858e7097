"""A sample of hostile files for every command that takes one; `python -m tests.bench.hostile` gives
ten thousand."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.effort import examples
from tests.hostile.doors import check, run
from tests.hostile.files import Files
from tests.hostile.payloads import MARK, SEQUENCES

EACH = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of earlier runs on this machine must not change what is printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("kind", Files.KINDS)
def test_a_hostile_file_is_shown_as_text_or_refused_in_a_line(kind: str, files: Files) -> None:
    codes: Counter[int] = Counter()
    for number in range(EACH):
        codes[files.one(random.Random(f"{kind} {number}"), kind).code] += 1
        if codes[0] and number + 1 >= examples(EACH, 3):
            break
    assert set(codes) <= {0, 2}
    assert codes[0], "none was understood: what is hostile inside of it was not tried"


@pytest.mark.parametrize("seed", ["2 file 1736", "3 file 1477"])
def test_what_once_did_not_hold_holds(seed: str, files: Files) -> None:
    """Found by the bench: steps of more than 64 bits; a clock anchor that leads out of them."""
    assert files.one(random.Random(seed)).code in (0, 2)


@pytest.mark.parametrize("sequence", SEQUENCES[:6])
def test_a_file_name_steers_no_terminal(sequence: str, tmp_path: Path) -> None:
    name = str(tmp_path / (sequence.replace("/", "") + ".trace"))
    for arguments in (
        ["show", name],
        ["diagnose", name],
        ["compare", name, name],
        ["export", name, "--to", "csv"],
        ["import", name, "-o", name],
        ["metrics", name],
        ["metrics", name, "--alerts", name],
        ["budget", "--fit", name],
        ["budget", "--model", name],
        ["replay", name],
    ):
        done = run(arguments)
        check(done)
        assert done.code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", MARK],
        ["attach", MARK],
        ["export", MARK, "--to", MARK],
        ["show", "x", MARK],
        [MARK],
        ["show", f"--{MARK}"],
        ["show", "x.trace", "--slo", f"ttft={MARK}"],
        ["record", MARK, "-o", MARK],
        ["diagnose", "x.trace", "--fail-on", MARK],
        ["budget", "--device", MARK],
        ["budget", "--what-if", "x.trace", MARK],
        ["replay", "x.trace", "--at", MARK],
        ["completion", MARK],
        ["metrics", "x.trace", "--metrics", MARK],
        ["metrics", "x.trace", "--otlp-metrics", MARK],
        ["compare", "x.trace", "y.trace", "--fail-on", MARK],
        ["show", f"ssh://{MARK}"],
        ["attach", f"ssh://-o{MARK}"],
        ["demo", "--fault", MARK],
        ["record", "x", "-o", "x.trace", "--flight-recorder", "1m", "--on", MARK],
    ],
    ids=lambda arguments: " ".join(arguments).replace(MARK, "…"),
)
def test_an_argument_steers_no_terminal(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_SOCKET_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = run(arguments)
    check(done)
    assert done.code == 2

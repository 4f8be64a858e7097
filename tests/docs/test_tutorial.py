"""What the tutorial shows of the recordings is what the commands print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tracer.cli.main import main

PAGE = ROOT / "docs" / "tutorial.md"
SHOWN = re.compile(r"```sh\ntracer ([^\n]*recordings/[^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)
"""A command on a recording of the project, and the output below it."""


def cases() -> Iterator[tuple[str, str]]:
    for found in SHOWN.finditer(PAGE.read_text(encoding="utf-8")):
        yield found[1], found[2]


@pytest.mark.parametrize(("command", "output"), cases(), ids=lambda text: text.splitlines()[0])
def test_the_output_of_a_recording_is_exact(
    command: str,
    output: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert main(command.split()) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in output.splitlines():
        assert line == "…" or any(line == told for told in printed), line


def test_there_are_some() -> None:
    assert len(list(cases())) >= 5

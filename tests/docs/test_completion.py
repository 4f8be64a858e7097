"""The completion scripts are those of the command line, and bash completes with them."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.docs.command_line import commands_of, whole_parser
from tracer.cli.completion import SHELLS, script
from tracer.cli.main import main
from tracer.export.extras import install_command

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
[[ $(complete -p tracer) =~ -F\\ ([^ ]+) ]]
"${BASH_REMATCH[1]}" tracer "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Asks bash as readline does when Tab is pressed."""


@cache
def made(shell: str) -> str:
    """The script for a shell."""
    return script(shell, whole_parser())


def completed(*words: str, folder: Path) -> set[str]:
    """What bash offers for the last of these words."""
    script = folder / "completion.bash"
    script.write_text(made("bash"), encoding="utf-8")
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", str(script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == made(shell)


def test_without_shtab_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    told = capsys.readouterr().err
    assert install_command("completion") in told and told.count("\n") == 1


def test_another_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "csh"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1 and "bash" in told


def test_every_command_and_option_is_in_every_script() -> None:
    for shell in SHELLS:
        text = made(shell)
        for command, parser in commands_of(whole_parser()).items():
            options = {option for action in parser._actions for option in action.option_strings}
            for word in {command, *options}:
                written = word.lstrip("-") if shell == "fish" else word
                assert written in text, f"{shell}: {command} {word}"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("rep",), {"replay"}),
        (("re",), {"record", "replay", "relay"}),
        (("demo", "--fau"), {"--fault"}),
        (("demo", "--fault", "slow-s"), {"slow-stream", "slow-sampler"}),
        (("export", "mine.trace", "--to", "p"), {"perfetto", "parquet"}),
        (("replay", "min"), {"mine.trace"}),
        (("completion", "z"), {"zsh"}),
        (("run", "--head"), {"--headless"}),
        (("budget", "--device", "h100"), {"h100-sxm", "h100-pcie"}),
    ],
)
def test_bash_completes(words: tuple[str, ...], offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "mine.trace").touch()
    assert completed("tracer", *words, folder=tmp_path) == offered

"""docs/exit-codes.md names every command, and what it says was tried comes out so."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engine_hooks.protocol.environment import SOCKETS
from tests.docs.command_line import commands_of, whole_parser
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
TRIED = re.findall(r"^\| `(tracer.*?)` \| (\d+) \| (?:`(.+)` )?\|$", PAGE, re.MULTILINE)


def test_every_command_has_a_row() -> None:
    table = PAGE.partition("## Each command")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == list(commands_of(whole_parser()))
    assert len(TRIED) == sum("| `tracer" in line for line in PAGE.splitlines()) > 20


@pytest.mark.parametrize(("typed", "code", "says"), TRIED)
def test_what_was_tried_comes_out_so(typed: str, code: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "recordings").symlink_to(ROOT / "recordings")
    sockets = tmp_path / "sockets"
    sockets.mkdir(mode=0o700)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRACER")}
    done = subprocess.run(
        [sys.executable, "-m", "tracer", *shlex.split(typed)[1:]],
        cwd=tmp_path,
        env={
            **kept,
            SOCKETS: str(sockets),
            "TRACER_LOG_DIR": str(tmp_path / "logs"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = done.stderr.splitlines()
    assert done.returncode == int(code), told
    if says:
        pattern = re.escape(says.removesuffix("…")) + (".*" if says.endswith("…") else "")
        assert told and re.fullmatch(pattern, told[-1]), told
        assert done.stdout == "" or done.returncode not in (2, 126, 127)
    else:
        assert not told

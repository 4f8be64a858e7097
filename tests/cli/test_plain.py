"""Where there is no terminal, or one that cannot be steered: plain text, in any encoding, without
an escape byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tracer.cli.output import knows_sequences
from tracer.cli.status_line import StatusLine

RECORDING = str(Path(__file__).parents[2] / "recordings" / "transformers-mixed.trace")


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("show", RECORDING), {}),
        (("show", RECORDING), {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}),
        (("diagnose", RECORDING), {"PYTHONIOENCODING": "latin-1"}),
        (
            ("budget", "--model", "llama-3.1-8b", "--device", "h100-sxm"),
            {"PYTHONIOENCODING": "ascii", "TERM": "vt100"},
        ),
        (("show", RECORDING, "--json"), {"PYTHONIOENCODING": "ascii"}),
    ],
)
def test_into_a_pipe_goes_no_escape_byte_and_nothing_that_the_encoding_lacks(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    env = {
        **os.environ,
        "COLORTERM": "truecolor",
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        **environment,
    }
    env.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "tracer", *arguments],
        capture_output=True,
        env=env,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.count(b"Traceback")) == (0, 0), done.stderr
    assert len(done.stdout) > 400
    assert b"\x1b" not in done.stdout + done.stderr
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    assert done.stdout.decode(encoding)
    if encoding == "ascii":
        assert max(done.stdout) < 128


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_be_steered_is_told_what_prints_instead(term: str | None) -> None:
    env = {**os.environ}
    env.pop("TERM", None)
    if term is not None:
        env["TERM"] = term
    shown = Terminal([sys.executable, "-m", "tracer", "replay", RECORDING], env)
    try:
        assert shown.wait_for_end() == 2
        assert b"\x1b" not in shown.raw
        assert b"tracer show " in shown.raw
    finally:
        shown.close()


@pytest.mark.parametrize(
    ("term", "steered"), [("xterm", True), ("vt100", True), ("dumb", False), (None, False)]
)
def test_a_terminal_that_does_not_name_itself_counts_as_dumb(
    monkeypatch: pytest.MonkeyPatch, term: str | None, steered: bool
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert knows_sequences() is steered
    assert StatusLine(sys.stderr)._terminal is (steered and sys.stderr.isatty())

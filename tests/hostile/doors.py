"""The doors through which outside bytes come in: each command in this process, and the screens on a
captured terminal.

Whatever comes in, a command exits with 0 or 2, says why in lines of its own, shows no traceback,
and prints no character that steers a terminal; a screen sends its own sequences and text, nothing
else.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

from tests.hostile.payloads import MARK
from tracer.cli.main import main
from tracer.format.text import clean

STEERING: Final = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u206f\ufeff]"
)
"""What no line for people holds, said here again: a hole in `tracer.format.text` must not be a hole
in its test."""
OWN: Final = re.compile(
    r"\x1b\[(?!666)[0-9;]*[mHKJABCDG]|\x1b\[\?[0-9;]+[hlu]|\x1b\]22;[a-z]*\x07|\x1b\[[<>=][0-9;]*[uct]?|\x1b\[\?[0-9;]+\$p"
    r"|\x1b\[[0-9;]*[ct]|\r|\n"
)
"""Sequences that a screen itself writes: styles, cursor, modes, the pointer's shape, questions
about the terminal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str


def run(arguments: Sequence[str]) -> Outcome:
    """Run ``tracer ARGUMENTS`` here, its output in files that are no terminal, as strict as real
    ones."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how, write_through=True)
        for how in ("strict", "backslashreplace")
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "stdout", out))
        stack.enter_context(mock.patch.object(sys, "stderr", err))
        try:
            code = main(list(arguments))
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Outcome(tuple(arguments), code, *texts)


def check(done: Outcome) -> None:
    """It ended well, or said in one line of its own why not. Raises AssertionError."""
    told = (
        f"{' '.join(map(clean, done.arguments))}: exit "
        f"{done.code}\n{clean(done.err[-600:], keep_newlines=True)}"
    )
    assert done.code in (0, 2), told
    assert "Traceback" not in done.err + done.out, told
    for text in (done.out, done.err):
        found = STEERING.search(text)
        assert found is None, (
            f"{told}\nsteers: {text[max(0, found.start() - 60) : found.start() + 20]!r}"
        )
    lines = done.err.splitlines()
    assert all(line.startswith("tracer") for line in lines), told
    if done.code == 2:
        assert lines and not done.out, told
        assert len(lines[-1]) < 10_000, told


def check_file(path: Path) -> None:
    """A file made for people or browsers holds no sequence. Raises AssertionError."""
    data = path.read_bytes()
    assert b"\x1b" not in data and b"\xc2\x9b" not in data and b"\xc2\x9d" not in data, path.name


def check_sent(sent: str) -> None:
    """What reached a terminal is sequences of our own and text. Raises AssertionError."""
    assert MARK not in sent and "\x1b[6n" not in sent
    body = OWN.sub("", sent)
    found = STEERING.search(body)
    assert found is None, repr(body[max(0, found.start() - 60) : found.start() + 30])

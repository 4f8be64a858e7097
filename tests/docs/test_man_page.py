"""The manual page is that of the command line, and programs that draw manual pages take it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.docs import man_page
from tests.docs.command_line import commands_of, whole_parser

PROGRAMS = {
    "groff": ["groff", "-man", "-Tutf8", "-ww", str(man_page.PAGE)],
    "man": ["man", "--warnings", "-l", str(man_page.PAGE)],
    "mandoc": ["mandoc", "-Tlint", "-Wwarning", str(man_page.PAGE)],
}
"""Each says on stderr or stdout what it does not like."""


def test_the_page_is_what_the_parser_says() -> None:
    assert man_page.PAGE.read_text(encoding="utf-8") == man_page.page(), (
        "run: python -m tests.docs.man_page"
    )


def test_the_width_of_the_terminal_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = set()
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        pages.add(man_page.page())
    assert len(pages) == 1


def test_every_command_and_option_is_in_it() -> None:
    text = man_page.PAGE.read_text(encoding="utf-8")
    for name, parser in commands_of(whole_parser()).items():
        _, found, rest = text.partition(f"\n.SS tracer {name}\n")
        section = rest.partition("\n.SS ")[0].partition("\n.SH ")[0]
        assert found, name
        for action in parser._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or man_page.plain(option) in section, option


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_draws_such_pages_takes_it(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    done = subprocess.run(
        PROGRAMS[program],
        env={**os.environ, "MANWIDTH": "80", "MANPAGER": "cat", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if program == "man" and "minimized" in done.stdout + done.stderr:
        pytest.skip("this man draws no pages: its system was installed without them")
    assert (done.returncode, done.stderr) == (0, "")
    assert program == "mandoc" or "flight" in done.stdout

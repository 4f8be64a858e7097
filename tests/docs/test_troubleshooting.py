"""What docs/troubleshooting.md quotes is what the code says, and its line of Python runs."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "troubleshooting.md"
VARIES = re.compile(r"\W*(?:\b(?:PATH|NAME|N|M|F|shtab|vllm)\b|…|\d[\d,]*|: )\W*")
"""What stands for something else in a quoted line, and where one message is put into another."""
OURS = re.compile(r"^tracer(?: \w+)?: ")


def constants() -> str:
    """Every string of the code, f-strings without what is put into them."""
    found: list[str] = []
    for folder in ("tracer", "engine_hooks"):
        for path in (ROOT / folder).rglob("*.py"):
            found += (
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )
    return "\n".join(found)


def quoted() -> list[str]:
    """The lines of its text blocks, and what the first column of its tables quotes."""
    lines = [" ".join(text.split()) for text in blocks(PAGE, "text")]
    for row in re.findall(r"^\| (`.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        lines += re.findall(r"`([^`]{12,})`", row)
    return lines


CODE = constants()


@pytest.mark.parametrize("line", [line for line in quoted() if not line.startswith("Module")])
def test_what_is_quoted_is_said_by_the_code(line: str) -> None:
    parts = [part.strip(" :;,") for part in VARIES.split(OURS.sub("", line))]
    assert any(len(part) >= 6 for part in parts)
    for part in parts:
        assert part in CODE, part


def test_much_is_quoted() -> None:
    assert len(quoted()) > 25


def test_its_line_of_python_says_which_package_is_found() -> None:
    (line,) = (
        one for body in blocks(PAGE, "sh") for one in body.splitlines() if one.startswith("python3")
    )
    done = subprocess.run(
        [sys.executable, *shlex.split(line)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{ROOT / 'tracer' / '__init__.py'}\n"

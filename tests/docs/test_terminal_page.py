"""Every test that docs/terminal.md names is there, and every case names one or the bench that
measures it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| case")
]


def names_in(path: Path) -> set[str]:
    """Functions that a module defines at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_each_case_names_tests_that_exist() -> None:
    assert len(CASES) > 30
    for case, held in CASES:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", held)
        assert named, case
        for path, test in named:
            assert (ROOT / path).is_file(), f"{case}: {path}"
            if "by measurement" in held:
                assert path.startswith("tests/bench/")
            else:
                assert test.startswith("test_"), case
                assert test in names_in(ROOT / path), f"{case}: {path}::{test}"

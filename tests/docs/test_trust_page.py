"""Every test and program that docs/evidence/trust.md names is there, and every case names one or
says how it was tried."""

from __future__ import annotations

import re

from tests.docs.test_terminal_page import ROOT, names_in

CASES = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "docs" / "evidence" / "trust.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
    and not line.startswith(("| case", "| rounds with"))
    and line.count(" | ") == 3
]


def test_each_case_names_tests_that_exist_or_how_it_was_tried() -> None:
    assert len(CASES) > 25
    for case, tried, held, how in CASES:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", how)
        assert named or tried.startswith(("by hand", "not tried")), case
        assert held, case
        for path, test in named:
            assert (ROOT / path).is_file(), f"{case}: {path}"
            if not path.startswith("tests/bench/"):
                assert test in names_in(ROOT / path), f"{case}: {path}::{test}"

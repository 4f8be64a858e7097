"""The reference figures and the public measurements hold. ``pytest -s`` prints the table."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracer.analysis.budget.reference import Row, rows, table

ROWS = rows()


def test_the_table_of_all_figures_is_printed() -> None:
    print("\n" + table(ROWS))
    printed = table(ROWS)
    assert all(row.name in printed and row.group in printed for row in ROWS)
    assert len({row.group for row in ROWS}) == 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.name}")
def test_a_figure_holds_within_its_tolerance(row: Row) -> None:
    assert row.low <= row.got <= row.high, (
        f"{row.name}: said {row.said:g}, model {row.got:g} {row.unit}"
    )


def test_a_figure_outside_its_tolerance_is_marked() -> None:
    off = Row("g", "n", "ms", 10.0, 14.0, 9.0, 11.0)
    assert not off.holds
    assert table([off]).splitlines()[-1].startswith("!")


def test_the_module_prints_the_table_and_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tracer.analysis.budget.reference"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.strip() == table(ROWS).strip()

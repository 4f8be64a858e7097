"""The comparison printed and as JSON: no wider than asked for, labelled, safe, and as
documented."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_hooks.protocol.stages import Stage
from tests.compare.traffic import Traffic
from tracer.analysis.compare import Comparison, compare, trace_of_views
from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import NONE_ALIKE, Change, Part
from tracer.export.compare_doc import document
from tracer.export.compare_text import (
    band_plot,
    compare_text,
    noise_cell,
    parts_line,
    percent,
    word,
)
from tracer.format.text import cell_width

DOCS = Path(__file__).parents[2] / "docs" / "compare.md"


@pytest.fixture(scope="module")
def pair() -> Comparison:
    one, two = Traffic(drift=0.02, requests=100), Traffic(drift=0.02, requests=100, token_ms=23.0)
    return compare(
        [trace_of_views("before.trace", one.views(1)), trace_of_views("after.trace", two.views(2))]
    )


@pytest.fixture(scope="module")
def three(pair: Comparison) -> Comparison:
    kinds = (Traffic(drift=0.02), Traffic(drift=0.02, token_ms=23.0), Traffic(drift=0.02, slots=2))
    return compare([trace_of_views(f"{k}.trace", kind.views(k)) for k, kind in enumerate(kinds)])


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 132, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_asked_for(
    pair: Comparison, three: Comparison, width: int, unicode: bool
) -> None:
    for made in (pair, three):
        page = compare_text(made, width=width, unicode=unicode)
        assert max(map(cell_width, page.splitlines())) <= width
        assert unicode or page.isascii()
        assert "\x1b" not in page


def test_the_verdict_comes_first_and_every_row_has_both_figures_and_the_change(
    pair: Comparison,
) -> None:
    page = compare_text(pair, width=80)
    assert " ".join(page.split()).startswith(pair.pairs[0].verdict)
    rows = {line[:13].strip(): line for line in page.splitlines()}
    for row in pair.rows:
        assert row.label in rows, row.label
    tpot = rows["TPOT"].split()
    assert tpot[0] == "TPOT" and tpot[-1] == "slower"
    assert float(tpot[1]) == pytest.approx(20, rel=0.05) and float(tpot[2]) == pytest.approx(
        23, rel=0.05
    )
    assert rows["tokenise"].endswith("noise")


def test_every_column_is_labelled_with_rate_concurrency_percentile_and_prefix_caching(
    three: Comparison,
) -> None:
    for width in (60, 80, 200):
        for percentile in ("p50", "p95"):
            made = replace(three, percentile=percentile)
            text = " ".join(compare_text(made, width=width).split())
            for k in range(3):
                after = text[text.index(f"{k}.trace ·") :]
                label = after[: after.index("engine unknown")]
                for wanted in ("req/s", "open (", f"· {percentile} ·", "prefix cache not told"):
                    assert wanted in label


def test_wide_pages_show_the_band_of_each_change(pair: Comparison) -> None:
    narrow, wide = compare_text(pair, width=80), compare_text(pair, width=160)
    assert "●" not in narrow
    lines = [line for line in wide.splitlines() if "●" in line]
    assert len(lines) >= len(Stage)
    assert "o" in compare_text(pair, width=160, unicode=False).splitlines()[12]


def test_a_band_lies_where_its_figures_are() -> None:
    change = Change(difference=10.0, low=5.0, high=15.0, noise=5.0, relative=0.1, differs=True)
    plot = band_plot(change, 41, 0.2)
    assert (plot.index("│"), plot.index("├"), plot.index("●"), plot.index("┤")) == (20, 25, 30, 35)
    assert (
        band_plot(replace(change, relative=1.0, low=9.0, high=11.0), 41, 0.2).rstrip().endswith("▸")
    )
    assert band_plot(Change(), 11, 0.2) == "     │     "


@pytest.mark.parametrize(
    ("change", "said", "noise", "relative"),
    [
        (Change(10.0, 5.0, 15.0, 5.0, 0.1, True), "slower", "±5.00", "+10.0 %"),
        (Change(-10.0, -15.0, -5.0, 5.0, -0.1, True), "faster", "±5.00", "-10.0 %"),
        (Change(1.0, -5.0, 7.0, 199.0, 11.2, False), "noise", "±199", "×12"),
        (Change(1.0, -5.0, 7.0, 300.0, 0.01, False), "noise", "×4.0", "+1.0 %"),
        (Change(1.0, -5.0, 7.0, 1e6, 0.01, False), "noise", ">×1,000", "+1.0 %"),
        (Change(difference=1.0), "too few", "", ""),
        (Change(why="8 are needed"), "too few", "", ""),
        (Change(why=NONE_ALIKE), "unlike", "", ""),
        (Change(), "–", "", ""),
    ],
)
def test_a_change_has_its_words(change: Change, said: str, noise: str, relative: str) -> None:
    assert word(change) == said
    assert noise_cell(change, 100.0) == noise
    assert percent(change) == relative


def test_the_parts_of_a_change_add_up(pair: Comparison) -> None:
    rows = {row.key: row for row in pair.rows}
    parts = [
        Part(rows["decode"], 1000.0, 1171.2), Part(rows["admission"], 10.0, 20.5),
        Part(rows["tokenise"], 1.0, 1.05), Part(rows["embed"], 2.0, 1.5),
    ]  # fmt: skip
    assert parts_line(parts) == "+181 ms = decode +171, admission +10.5, the rest -0.45"
    assert parts_line([Part(rows["decode"], 5.0, 5.0)]) == "0 ms = 0"


def test_names_from_outside_cannot_steer_a_terminal() -> None:
    views = Traffic(requests=20).views(1)
    made = compare([trace_of_views("\x1b[2Jevil\n", views), trace_of_views("b", views)])
    page = compare_text(made, width=100)
    assert "\x1b" not in page and "\\x1b[2Jevil\\n" in page
    assert "\x1b" not in json.dumps(document(made), ensure_ascii=False)


# --- JSON -----------------------------------------------------------------------------------------


def documented() -> dict[str, set[str]]:
    """Keys by section of the page's part on JSON."""
    found: dict[str, set[str]] = {}
    for line in DOCS.read_text(encoding="utf-8").partition("## JSON")[2].splitlines():
        if line.startswith("### "):
            found[line[4:]] = set()
        elif match := re.match(r"\| `(\w+)` \|", line):
            found[list(found)[-1]].add(match[1])
    return found


def test_the_document_has_exactly_the_keys_of_the_page(three: Comparison) -> None:
    made: dict[str, Any] = json.loads(json.dumps(document(three)))
    pages = documented()
    row = made["stages"]["decode"]
    parts = (
        ("document", made),
        ("column", made["columns"][0]),
        ("matched", made["matched"]["early"]),
        ("row", row),
        ("change", row["changes"][0]["p50"]),
        ("pair", made["pairs"][0]),
        ("part", made["pairs"][0]["e2e_parts"][0]),
    )
    for name, part in parts:
        assert set(part) == pages[name], name
    assert {name for name, _ in parts} == set(pages)
    assert list(made["stages"]) == [stage.id for stage in Stage]
    assert made["pairs"][0]["explained_by"] == "decode"


def test_contexts_without_requests_have_a_word_too() -> None:
    empty: Context = compare([trace_of_views("a", []), trace_of_views("b", [])]).columns[0]
    assert empty.kind == "no requests"

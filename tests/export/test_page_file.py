"""The page as a parser of HTML5 that forgives nothing reads it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import html5lib
import pytest
from hypothesis import given, settings

from tests.effort import examples
from tests.export.exported import STATES, made, recorded, snapshot_of, stage_ms
from tests.export.test_perfetto import HOSTILE, hostile
from tracer.export.page_file import page_text
from tracer.export.whole import Whole
from tracer.format.text import clean
from tracer.state.trace_state import TraceState

XHTML = "{http://www.w3.org/1999/xhtml}"


def parse(state: TraceState, name: str = "t", **options: Any) -> Any:
    """The tree; any error of markup raises."""
    return html5lib.HTMLParser(strict=True).parse(page_text(Whole(state, name, **options)))


def data_of(tree: Any) -> Any:
    (block,) = [
        node for node in tree.iter(f"{XHTML}script") if node.get("type") == "application/json"
    ]
    return json.loads(block.text)


@pytest.mark.parametrize("name", STATES)
def test_its_totals_are_the_states(name: str) -> None:
    state = STATES[name]()
    seen, tree = snapshot_of(state), parse(state)
    requests = data_of(tree)["requests"]
    assert len(requests) == len(seen.requests)
    assert sum(row["output"] for row in requests) == sum(
        view.output_tokens for view in seen.requests
    )
    assert sum(row["prompt"] or 0 for row in requests) == sum(
        view.prompt_tokens or 0 for view in seen.requests
    )
    in_data = {stage.split()[0]: 0.0 for stage in stage_ms(seen)}
    for row in requests:
        for number, _, ms, *_ in row["stages"]:
            in_data[list(in_data)[number - 1]] += ms
    assert in_data == pytest.approx(stage_ms(seen), abs=1e-2)
    in_table = {
        line.get("data-stage"): float(next(cell.get("title") for cell in line if cell.get("title")))
        for line in tree.iter(f"{XHTML}tr") if line.get("data-stage")
    }  # fmt: skip
    assert in_table == pytest.approx(stage_ms(seen))
    (line,) = [node for node in tree.iter(f"{XHTML}p") if node.get("class") == "totals"]
    steps = sum(engine.steps for engine in seen.engines)
    assert (
        line.text.startswith(f"{len(requests)} requests, {seen.finished} finished")
        and f"{steps} steps" in line.text
    )


def test_nothing_is_fetched_and_only_its_own_script_runs() -> None:
    text = page_text(Whole(recorded(), "t"))
    tree = html5lib.HTMLParser(strict=True).parse(text)
    for node in tree.iter():
        assert not {"src", "href", "srcset", "style", "onclick", "onload", "action"} & set(
            node.keys()
        ), node.tag
    assert (
        "url(" not in text
        and "@import" not in text
        and "http:" not in text
        and "https:" not in text
    )
    (policy,) = [
        node.get("content") for node in tree.iter(f"{XHTML}meta") if node.get("http-equiv")
    ]
    assert "default-src 'none'" in policy
    (style,) = [node.text for node in tree.iter(f"{XHTML}style")]
    (script,) = [node.text for node in tree.iter(f"{XHTML}script") if not node.get("type")]
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|setAttribute\('style", script
    )


@settings(max_examples=examples(25), deadline=None)
@given(HOSTILE, HOSTILE)
def test_hostile_text_stays_text(name: str, other: str) -> None:
    tree = parse(hostile(name, other), name)
    (row,) = data_of(tree)["requests"]
    assert row["error"] == clean(name)
    assert len(list(tree.iter(f"{XHTML}script"))) == 2
    (title,) = [node.text for node in tree.iter(f"{XHTML}title")]
    assert " ".join(title.split()) == " ".join(f"{clean(name)} · tracer".split())


def test_markup_in_names_opens_nothing() -> None:
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>{{data}}"
    tree = parse(hostile(evil, evil), evil)
    assert data_of(tree)["requests"][0]["error"] == evil
    assert not list(tree.iter(f"{XHTML}img")) and len(list(tree.iter(f"{XHTML}script"))) == 2


def test_text_is_there_when_asked_for() -> None:
    assert (
        "prompt_text"
        not in page_text(Whole(made(), "t")).partition('id="data"')[2].partition("</script>")[0]
    )
    rows = data_of(parse(made(), with_text=True))["requests"]
    assert any(row.get("prompt_text") == "x" * 20 for row in rows)

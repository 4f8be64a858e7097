"""The picture as an XML parser reads it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from engine_hooks.protocol.events import Closed, Queued, Received
from tests.effort import examples
from tests.export.exported import STATES, recorded, snapshot_of, stage_ms
from tests.export.test_perfetto import HOSTILE, hostile
from tracer.export.stage_colours import STAGE_COLOURS_DARK, STAGE_COLOURS_LIGHT
from tracer.export.svg import MOST_ROWS, svg_text
from tracer.export.whole import Whole
from tracer.format.text import clean
from tracer.state.trace_state import TraceState

SVG = "{http://www.w3.org/2000/svg}"


def texts(tree: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in tree.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", STATES)
def test_it_shows_every_request_and_the_states_totals(name: str) -> None:
    state = STATES[name]()
    seen = snapshot_of(state)
    tree = ElementTree.fromstring(svg_text(Whole(state, "some.trace")).encode())
    (totals,) = [text for text in texts(tree) if " prompt tokens" in text]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", totals)]
    assert numbers == [
        len(seen.requests),
        seen.finished,
        sum(view.prompt_tokens or 0 for view in seen.requests),
        sum(view.output_tokens for view in seen.requests),
        sum(engine.steps for engine in seen.engines),
    ]
    ids = {node.text for node in tree.iter(f"{SVG}text") if node.get("class") == "id"}
    assert len(ids) == len(seen.requests)
    if name == "recorded":
        assert ids == {view.id for view in seen.requests}
        assert any("SmolLM2-135M-Instruct" in text and "cpu" in text for text in texts(tree))


def test_bars_are_as_long_as_their_stages() -> None:
    view = max(snapshot_of(recorded()).requests, key=lambda view: view.output_tokens)
    tree = ElementTree.fromstring(svg_text(Whole(recorded(), "t", request=view.id)).encode())
    rows = [group for group in tree.iter(f"{SVG}g") if group.find(f"{SVG}rect") is not None]
    widths = {rect.get("class"): float(rect.get("width", "0")) for row in rows
              for rect in row.findall(f"{SVG}rect")[:1]}  # fmt: skip
    told = stage_ms(snapshot_of(recorded()))
    assert len(widths) == sum(stage.ms is not None for stage in view.stages) <= len(told)
    decode, prefill = view.stages[10].ms, view.stages[6].ms
    assert decode is not None and prefill is not None
    assert widths["s11"] / widths["s7"] == pytest.approx(decode / prefill, rel=0.01)


def test_of_many_requests_the_longest_are_drawn_and_that_is_said() -> None:
    state = TraceState()
    for key in range(1, MOST_ROWS + 51):
        for event in (
            Received(key, key, f"r{key}"),
            Queued(key + 1, key, f"r{key}"),
            Closed(key * 1000, key, 200),
        ):
            state.apply("s", event)
    tree = ElementTree.fromstring(svg_text(Whole(state, "t")).encode())
    assert sum(node.get("class") == "id" for node in tree.iter(f"{SVG}text")) == MOST_ROWS
    assert f"the {MOST_ROWS} longest of {MOST_ROWS + 50} requests" in texts(tree)
    assert any(text.startswith(f"{MOST_ROWS + 50} requests") for text in texts(tree))


def test_each_ground_has_its_own_colours() -> None:
    tree = ElementTree.fromstring(svg_text(Whole(recorded(), "t")).encode())
    style = tree.findtext(f"{SVG}style") or ""
    light, query, dark = style.partition("@media (prefers-color-scheme:dark)")
    assert query
    for rules, colours in ((light, STAGE_COLOURS_LIGHT), (dark, STAGE_COLOURS_DARK)):
        found = re.findall(r"\.s(\d+)\{fill:(#\w{6})\}", rules)
        assert found == [(str(number), colour) for number, colour in enumerate(colours, 1)]
    on_light, on_dark = (
        dict(re.findall(r"(\.ground|text)\{fill:(#\w+)\}", rules)) for rules in (light, dark)
    )
    assert on_light[".ground"] > "#f" > on_dark[".ground"]
    assert on_light["text"] < "#3" < "#c" < on_dark["text"]


@settings(max_examples=examples(40), deadline=None)
@given(HOSTILE, HOSTILE)
def test_hostile_text_stays_text(name: str, other: str) -> None:
    tree = ElementTree.fromstring(svg_text(Whole(hostile(name, other), name)).encode())
    assert {node.tag for node in tree.iter()} <= {
        SVG + tag
        for tag in ("svg", "style", "defs", "pattern", "rect", "text", "g", "title", "line")
    }
    assert all(clean(text, keep_newlines=True) == text for text in texts(tree))

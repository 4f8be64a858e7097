"""`tracer import`: other tools' spans, and Chrome traces made here, become traces that every
command takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.export.exported import RECORDING, STATES
from tests.export.test_exports import Capture, here, refused, run  # noqa: F401
from tests.export.test_perfetto import HOSTILE, hostile
from tracer.cli.export import read_whole
from tracer.export.chrome import chrome_lines
from tracer.export.imports.chrome import read
from tracer.export.imports.spans import SpanError
from tracer.export.whole import MOST, Whole
from tracer.format.text import clean
from tracer.replay.cursor import load
from tracer.state.trace_state import TraceState
from tracer.state.view import RequestView

SPANS = Path(__file__).parents[1] / "spans"


def chrome(state: TraceState, **options: Any) -> bytes:
    return b"".join(chrome_lines(Whole(state, "t", **options), state))


def folded(data: bytes) -> TraceState:
    imported = read(data)
    state = TraceState(keep_finished=MOST, keep_steps=MOST)
    for header in imported.headers:
        state.add_source(header)
    for source, event in imported.events:
        state.apply(source, event)
    return state


def comparable(view: RequestView) -> RequestView:
    """Without what the format does not hold: who told of it first, and by which number."""
    return replace(view, id="", key=("", 0), source="")


@pytest.mark.parametrize("name", STATES)
def test_a_chrome_trace_comes_back_as_it_was(name: str) -> None:
    state = STATES[name]()
    again = folded(chrome(state))
    assert again.unknown == 0
    before, after = Whole(state, "t"), Whole(again, "t")
    assert after.totals() == before.totals()
    for one, other in zip(before.requests, after.requests, strict=True):
        assert comparable(other.view) == comparable(one.view)
        assert [token.t for token in after.tokens(other)] == [
            token.t for token in before.tokens(one)
        ]
    for one, other in zip(before.steps, after.steps, strict=True):
        assert replace(other.view, source="") == replace(one.view, source="")
    timers = before.snapshot.timers, after.snapshot.timers
    assert {key: value.count for key, value in timers[1].items()} == {
        key: value.count for key, value in timers[0].items()
    }
    assert after.snapshot.wall == before.snapshot.wall


def test_text_comes_back_when_it_was_exported() -> None:
    state = STATES["made"]()
    again = Whole(folded(chrome(state, with_text=True)), "t", with_text=True)
    rows = zip(Whole(state, "t", with_text=True).requests, again.requests, strict=True)
    pairs = [(one.prompt_text, other.prompt_text) for one, other in rows]
    assert any(one for one, _ in pairs) and all(one == other for one, other in pairs)


def test_what_is_imported_is_shown_replayed_and_diagnosed(tmp_path: Path, capsys: Capture) -> None:
    assert run("export", RECORDING, "--to", "chrome", "-o", "x.json") == 0
    assert run("import", "x.json", "-o", "back.trace") == 0
    counted = load(RECORDING).snapshot()
    assert f"back.trace: {counted.total} requests" in capsys.readouterr().err
    assert run("show", "back.trace", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["counts"]["finished"] == counted.finished and document["losses"]["events"] == 0
    assert run("diagnose", "back.trace", "--json") == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert run("diagnose", RECORDING, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith(verdict)
    from tracer.replay.player import Player

    player = Player.open(tmp_path / "back.trace", paused=True)
    player.seek(player.trace.end)
    player.close()


@pytest.mark.parametrize(("name", "requests"), [("sglang.jsonl", 2), ("vllm.json", 3)])
def test_engines_own_spans_become_a_trace(
    name: str, requests: int, tmp_path: Path, capsys: Capture
) -> None:
    assert run("import", SPANS / name, "-o", "own.trace") == 0
    whole = Whole(read_whole("own.trace"), "t")
    assert whole.totals().requests == whole.totals().finished == requests
    assert whole.totals().stage_ms and math.fsum(whole.totals().stage_ms.values()) > 0
    capsys.readouterr()
    assert "exists already" in refused(capsys, "import", SPANS / name, "-o", "own.trace")
    assert run("import", SPANS / name, "-o", "own.trace", "--force", "--from", "otlp") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["own.trace"]


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    def told(data: bytes, *more: str) -> str:
        (tmp_path / "in").write_bytes(data)
        line = refused(capsys, "import", "in", "-o", "out.trace", *more)
        assert not (tmp_path / "out.trace").exists()
        return line

    assert "line 1 is no OTLP JSON" in told(b"no json")
    assert "it is a trace already" in told(RECORDING.read_bytes())
    assert "not written by tracer export" in told(b'{"traceEvents": []}')
    assert "no Chrome trace of ours" in told(b"[" * 100_000, "--from", "chrome")
    assert "newer tracer" in told(
        b'{"traceEvents": [], "otherData": {"tracer": {"version": 9, "began": 0}}}'
    )
    assert "no request spans of SGLang or vLLM" in told(b"")
    assert "no request spans" in told(chrome(hostile("a", "b")), "--from", "otlp")
    assert "cannot read none" in refused(capsys, "import", "none", "-o", "x")
    (tmp_path / "in").write_bytes((SPANS / "vllm.json").read_bytes())
    assert "cannot" in refused(capsys, "import", "in", "-o", "no/folder/x.trace")


@settings(max_examples=examples(25), deadline=None)
@given(HOSTILE, HOSTILE)
def test_hostile_names_come_back_clean(name: str, other: str) -> None:
    (view,) = folded(chrome(hostile(name, other))).snapshot().requests
    assert (view.rid, view.route, view.error) == (clean(name), clean(other), clean(name))


NUMBERS = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**61, 2**63, 2**64])
VALUES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats()
    | st.text(max_size=4)
    | st.just([])
    | st.just({})
)


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value of a document."""
    found = [at]
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            found += places(value, (*at, key))
    return found


@settings(max_examples=examples(70), deadline=None)
@given(st.data())
def test_whatever_a_chrome_file_holds_is_read_or_refused(data: st.DataObject) -> None:
    document = json.loads(small_chrome())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in places(document) if path]))
        node = document
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = data.draw(VALUES)
    try:
        state = folded(json.dumps(document).encode())
    except SpanError as error:
        assert "\n" not in str(error)
        return
    state.snapshot()


def small_chrome() -> bytes:
    from tests.state.traces import simulate

    trace = simulate(3, requests=2, output=4)
    state = TraceState()
    for header in trace.headers:
        state.add_source(header)
    for source, event in trace.events:
        state.apply(source, event)
    return chrome(state)

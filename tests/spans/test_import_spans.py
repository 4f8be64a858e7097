"""Spans of engines that trace themselves, as their sources write them (not recorded from a live
SGLang server)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import Received
from tests.effort import examples
from tracer.export.imports.spans import Imported, SpanError, read
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase, Status

HERE = Path(__file__).parent


def state_of(imported: Imported) -> TraceState:
    state = TraceState()
    for header in imported.headers:
        state.add_source(header)
    for source, event in imported.events:
        state.apply(source, event)
    assert state.unknown == 0
    return state


@pytest.fixture(scope="module")
def sglang() -> tuple[Imported, TraceState]:
    imported = read((HERE / "sglang.jsonl").read_bytes())
    return imported, state_of(imported)


def test_both_requests_are_found_whole(sglang: tuple[Imported, TraceState]) -> None:
    imported, state = sglang
    assert (imported.requests, imported.ignored) == (2, 0)
    views = state.snapshot().requests
    assert [view.phase for view in views] == [Phase.DONE] * 2
    assert [view.output_tokens for view in views] == [6, 4]
    assert [view.finish_reason for view in views] == ["length", "stop"]
    assert not any(view.incomplete for view in views)


def test_sglangs_stages_become_ours(sglang: tuple[Imported, TraceState]) -> None:
    _, state = sglang
    detail = state.detail("1111222233334444")
    assert detail is not None
    rows = {row.stage.id: row for row in detail.view.stages}
    assert rows["tokenise"].ms == pytest.approx(2.0)
    assert rows["admission"].ms == pytest.approx(7.5)
    assert [name for name, _ in rows["admission"].parts] == ["hop", "queue"]
    assert rows["prefill"].ms == pytest.approx(120)
    assert rows["decode"].ms == pytest.approx(100)
    assert detail.view.cached_tokens == 88
    assert detail.view.ttft_ms == pytest.approx(131)
    assert detail.view.e2e_ms == pytest.approx(232)
    for stage in ("template", "embed", "lm_head", "sample"):
        assert rows[stage].status is Status.UNAVAILABLE


def test_chunks_are_passes_and_say_that_their_tokens_are_divided(
    sglang: tuple[Imported, TraceState],
) -> None:
    _, state = sglang
    detail = state.detail("1111222233334444")
    assert detail is not None
    assert [chunk.tokens for chunk in detail.view.chunks] == [256, 256]
    assert detail.view.stages[6].status is Status.ESTIMATED


def test_loops_that_end_together_are_one_step(sglang: tuple[Imported, TraceState]) -> None:
    _, state = sglang
    detail = state.detail("1111222233334444")
    assert detail is not None
    assert detail.itl_ms == pytest.approx([60.2, 10, 10, 9.8, 10], abs=0.5)
    assert list(detail.itl_batch) == [2, 2, 2, 1, 1]


def test_vllms_one_span_a_request_gives_its_latencies() -> None:
    imported = read((HERE / "vllm.json").read_bytes())
    state = state_of(imported)
    assert imported.requests == 3
    assert len(imported.headers) == 2, "two at once, so two lanes"
    detail = state.detail("chatcmpl-1")
    assert detail is not None
    seen = detail.view
    assert (seen.prompt_tokens, seen.output_tokens) == (37, 16)
    assert seen.queue_ms == pytest.approx(2)
    assert seen.prefill_ms == pytest.approx(40)
    assert seen.ttft_ms == pytest.approx(50)
    assert seen.e2e_ms == pytest.approx(200)
    assert seen.tpot_ms == pytest.approx(148 / 15)
    single = state.detail("chatcmpl-3")
    assert single is not None
    assert (single.view.phase, single.view.output_tokens) == (Phase.DONE, 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no request spans"),
        (b"not json", "line 1 is no OTLP JSON"),
        (b"[1, 2]", "line 1 is no OTLP JSON"),
        (
            b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "GET /"}]}]}]}',
            "no request spans",
        ),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(data: bytes, reason: str) -> None:
    with pytest.raises(SpanError, match=reason) as raised:
        read(data)
    assert "\n" not in str(raised.value)


INSTANTS = st.integers(-5, 1 << 70).map(str)
VALUES = (
    st.integers(-3, 1 << 40).map(lambda n: {"intValue": str(n)})
    | st.floats(allow_nan=False).map(lambda n: {"doubleValue": n})
    | st.text(max_size=5).map(lambda text: {"stringValue": text})
)
KEYS = st.sampled_from([
    "rid", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens",
    "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e",
])  # fmt: skip
NAMES = st.sampled_from(
    ["tokenize", "prefill_forward", "chunked_prefill", "decode_loop", "llm_request", "x"]
)
SPAN = st.fixed_dictionaries({
    "traceId": st.sampled_from(["a", "b"]),
    "name": NAMES,
    "startTimeUnixNano": INSTANTS | st.text(max_size=3),
    "endTimeUnixNano": INSTANTS,
    "attributes": st.lists(st.fixed_dictionaries({"key": KEYS, "value": VALUES}), max_size=4),
})  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(SPAN, max_size=12))
def test_whatever_a_file_holds_is_read_or_refused(spans: list[dict[str, object]]) -> None:
    document = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    try:
        imported = read(document)
    except SpanError as error:
        assert "\n" not in str(error)
        return
    assert 0 < imported.requests <= len(spans)
    assert imported.requests + imported.ignored + imported.set_aside <= len(spans)
    sources = [header.source for header in imported.headers]
    assert len(set(sources)) == len(sources)
    assert {source for source, _ in imported.events} == set(sources)
    instants = [event.t for _, event in imported.events]
    assert instants == sorted(instants) and instants[0] >= 0
    received = [event.key for _, event in imported.events if isinstance(event, Received)]
    assert len(received) == imported.requests
    state = state_of(imported)
    assert state.received_total == state.snapshot().total == imported.requests


def test_a_span_that_is_no_request_is_counted_and_one_out_of_time_is_set_aside() -> None:
    def span(name: str, begin: int, **attributes: str) -> dict[str, object]:
        told = [{"key": key, "value": {"stringValue": text}} for key, text in attributes.items()]
        times = {"startTimeUnixNano": str(begin), "endTimeUnixNano": str(begin + 1000)}
        return {"traceId": f"{name}{begin}", "name": name, "attributes": told, **times}

    began = 1_700_000_000_000_000_000
    spans = [
        span("request", began, rid="one"),
        span("GET /", began + 5),
        span("decode_loop", began + 6),
        span("thread", began + 7, thread_label="tokenizer"),
        span("request", began + 366 * 86_400 * 10**9, rid="later"),
    ]
    imported = read(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode())
    assert (imported.requests, imported.ignored, imported.set_aside) == (1, 2, 1)

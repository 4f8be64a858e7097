"""Spans as opentelemetry-proto's messages read them, from a file and at a collector."""

from __future__ import annotations

import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from engine_hooks.protocol.stages import Stage
from tests.effort import examples
from tests.export.exported import STATES, made, recorded, snapshot_of, stage_ms
from tests.export.test_perfetto import HOSTILE, hostile
from tracer.export import otlp
from tracer.export.collector import TRIES, send
from tracer.export.otlp import otlp_documents, otlp_message
from tracer.export.output import ExportError
from tracer.export.whole import Whole
from tracer.format.text import clean
from tracer.state.trace_state import TraceState


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [value_of(item) for item in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )


def attributes(node: Any) -> dict[str, Any]:
    return {item.key: value_of(item.value) for item in node.attributes}


def spans_of(messages: list[ExportTraceServiceRequest]) -> list[Any]:
    return [span for message in messages for resource in message.resource_spans
            for scope in resource.scope_spans for span in scope.spans]  # fmt: skip


def read(state: TraceState, **options: Any) -> list[ExportTraceServiceRequest]:
    """The lines of a file, each read as a message: an unknown key or a wrong type would raise."""
    lines = [json.dumps(document) for document in otlp_documents(Whole(state, "t", **options))]
    return [otlp_message(json.loads(line)) for line in lines]


@pytest.mark.parametrize("name", STATES)
def test_its_totals_are_the_states(name: str) -> None:
    state = STATES[name]()
    seen = snapshot_of(state)
    messages = read(state)
    roots = [attributes(span) for span in spans_of(messages) if not span.parent_span_id]
    assert len(roots) == len(seen.requests)
    assert sum(root.get("gen_ai.usage.input_tokens", 0) for root in roots) == sum(
        view.prompt_tokens or 0 for view in seen.requests
    )
    assert sum(root["gen_ai.usage.output_tokens"] for root in roots) == sum(
        v.output_tokens for v in seen.requests
    )
    assert sum(root["tracer.request.phase"] in ("done", "lost") for root in roots) == seen.finished
    steps = {
        told["service.instance.id"]: told["tracer.engine.steps"]
        for message in messages for resource in message.resource_spans
        for told in [attributes(resource.resource)]
    }  # fmt: skip
    assert sum(steps.values()) == sum(engine.steps for engine in seen.engines) > 0
    told = {stage.id: 0.0 for stage in Stage}
    for span in spans_of(messages):
        if span.name in told:
            told[span.name] += (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
    assert told == pytest.approx(stage_ms(seen), abs=1e-4)


def test_spans_hang_together_and_keep_their_ids() -> None:
    spans = spans_of(read(recorded()))
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert (
            len(span.trace_id) == 16
            and len(span.span_id) == 8
            and any(span.trace_id)
            and any(span.span_id)
        )
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            assert (span.trace_id, span.parent_span_id) in by_id
    assert {span.span_id for span in spans_of(read(recorded()))} == {span.span_id for span in spans}
    assert len({span.trace_id for span in spans}) == len(snapshot_of(recorded()).requests)


def test_a_request_has_the_names_of_the_conventions() -> None:
    span = next(span for span in spans_of(read(recorded())) if not span.parent_span_id)
    told = attributes(span)
    assert span.kind == span.SPAN_KIND_SERVER
    assert span.name == "chat SmolLM2-135M-Instruct"
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "transformers"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.request.stream"] is True
    view = snapshot_of(recorded()).requests[0]
    assert view.ttft_ms is not None
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(view.ttft_ms / 1000)
    assert not any("messages" in name for name in told)


def test_text_is_there_when_asked_for() -> None:
    def texts(**options: Any) -> list[str]:
        found = [attributes(span) for span in spans_of(read(made(), **options))]
        return [told[name] for told in found for name in told if name.endswith(".messages")]

    assert texts() == []
    messages = [json.loads(text) for text in texts(with_text=True)]
    assert {message[0]["role"] for message in messages} == {"user", "assistant"}
    assert any(message[0]["parts"][0]["content"] == "x" * 20 for message in messages)


@settings(max_examples=examples(25), deadline=None)
@given(HOSTILE, HOSTILE)
def test_hostile_text_comes_back_clean(name: str, other: str) -> None:
    (root, *_) = spans_of(read(hostile(name, other)))
    told = attributes(root)
    assert told["gen_ai.response.id"] == clean(name)
    assert root.status.code == root.status.STATUS_CODE_ERROR and root.status.message == clean(name)


def test_no_document_is_large() -> None:
    counts = [len(spans_of([message])) for message in read(recorded())]
    assert sum(counts) > 400 and max(counts) < otlp.SPANS + 100


# --- a collector ----------------------------------------------------------------------------------


class Collector:
    """Answers with the statuses of `answers`, then 200; keeps what it took."""

    def __init__(self, answers: list[int], reply: bytes, headers: dict[str, str]) -> None:
        self.taken: list[ExportTraceServiceRequest] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.seen.append((self.path, dict(self.headers)))
                status = answers.pop(0) if answers else 200
                if status == 200:
                    outer.taken.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=lambda: self.server.serve_forever(0.02))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


Start = Callable[..., Collector]


@pytest.fixture
def collector() -> Iterator[Start]:
    started: list[Collector] = []

    def start(*answers: int, reply: bytes = b"", **headers: str) -> Collector:
        started.append(Collector(list(answers), reply, headers))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_collector_gets_every_span(collector: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc,x-other=1")
    there = collector()
    count = send(otlp_documents(Whole(recorded(), "t")), there.url)
    assert count == len(spans_of(there.taken)) == len(spans_of(read(recorded())))
    path, headers = there.seen[0]
    assert path == "/v1/traces" and headers["Content-Type"] == "application/x-protobuf"
    assert headers["Authorization"] == "Basic abc"


def test_what_is_not_final_is_tried_again(collector: Start) -> None:
    slept: list[float] = []
    there = collector(503, 429)
    assert send(otlp_documents(Whole(made(), "t")), there.url + "/own/path", slept.append) > 0
    assert len(slept) == 2 and slept[0] < slept[1]
    assert {path for path, _ in there.seen} == {"/own/path"}
    slept.clear()
    with pytest.raises(ExportError, match="does not take the spans: 503"):
        send(
            otlp_documents(Whole(made(), "t")),
            collector(*[503] * TRIES, **{"Retry-After": "7"}).url,
            slept.append,
        )
    assert slept == [7.0] * (TRIES - 1)


def test_a_refusal_is_said_in_one_line(collector: Start) -> None:
    documents = list(otlp_documents(Whole(made(), "t")))
    with pytest.raises(ExportError, match="400 Bad Request"):
        send(documents, collector(400).url)
    with pytest.raises(ExportError, match="302"):
        send(documents, collector(302, Location="/login").url)
    some = ExportTraceServiceResponse()
    some.partial_success.rejected_spans = 3
    some.partial_success.error_message = "too old"
    with pytest.raises(ExportError, match="refused 3 spans: too old"):
        send(documents, collector(reply=some.SerializeToString()).url)
    gone = collector()
    gone.server.server_close()
    with pytest.raises(ExportError, match=r"does not take the spans: .*refused"):
        send(documents, gone.url, lambda seconds: None)
    for address in ("ftp://x", "http://", "file:///etc/passwd", "http://[", "http://h:99999999"):
        with pytest.raises(ExportError, match="no address of a collector"):
            send(documents, address)


def test_wall_time_is_of_the_anchor() -> None:
    seen = snapshot_of(recorded())
    assert seen.wall is not None
    first = min(span.start_time_unix_nano for span in spans_of(read(recorded())))
    earliest = min(view.received for view in seen.requests)
    assert math.isclose(first, seen.wall - (seen.now - earliest), abs_tol=1)

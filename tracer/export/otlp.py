"""A trace as OpenTelemetry spans with the `gen_ai.*` attributes of the GenAI semantic conventions.

A request is a trace of its own: a server span, under it a span for each stage that has a length,
under prefill one for each chunk. What the conventions have no name for is under `tracer.*`. Ids
follow from the trace's content: exporting it twice gives the same spans, which a backend can tell
apart from new ones.

Documents are OTLP's JSON encoding (ids in hex, 64-bit integers as strings), one request to a
collector each; `otlp_message` makes the protobuf message of one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.stages import Stage
from tracer.export.fields import fields
from tracer.export.timeline import Value
from tracer.export.whole import LARGEST, RequestRow, Whole
from tracer.format.text import clean
from tracer.state.request.outcome import FAILED

SPANS: Final = 500
"""Spans in one document, about; a collector takes 4 MiB and more."""
_INTERNAL, _SERVER = 1, 2
_ERROR: Final = 2
_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})

Document = dict[str, Any]


def otlp_documents(whole: Whole) -> Iterator[Document]:
    """Iterate over `ExportTraceServiceRequest`s; there is one at least."""
    sources: dict[str, list[Document]] = {}
    count = 0
    made = False
    for row in whole.requests:
        spans = list(_request(whole, row))
        sources.setdefault(row.record.engine or row.view.source, []).extend(spans)
        count += len(spans)
        if count >= SPANS:
            yield _document(whole, sources)
            sources, count, made = {}, 0, True
    if sources or not made:
        yield _document(whole, sources)


def otlp_message(document: Document) -> Any:
    """Return the protobuf message of a document.

    Raises:
        ImportError: The `opentelemetry-proto` package is missing.
    """
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return ParseDict(_with_bytes(document), ExportTraceServiceRequest())


def _with_bytes(node: Any) -> Any:
    """Protobuf's own JSON has bytes in base64 where OTLP's has hex."""
    if isinstance(node, list):
        return [_with_bytes(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: base64.b64encode(bytes.fromhex(value)).decode("ascii")
        if key in _IDS
        else _with_bytes(value)
        for key, value in node.items()
    }


def _document(whole: Whole, sources: dict[str, list[Document]]) -> Document:
    scope = {"name": "tracer", "version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(_resource(whole, source))},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
            for source, spans in sources.items()
        ]
    }


def _resource(whole: Whole, source: str) -> dict[str, Any]:
    view, header = whole.engine(source), whole.headers.get(source)
    told: dict[str, Any] = {"service.name": (view.name if view is not None else "") or "llm-engine"}
    told["service.instance.id"] = source
    if view is not None:
        told |= {
            "service.version": view.version,
            "process.pid": view.pid or None,
            **_prefixed("tracer.engine.", fields(view, "model dtype device")),
            "tracer.engine.steps": sum(row.view.source == source for row in whole.steps),
        }
    if header is not None:
        told |= {"host.name": header.host}
    return told


def _prefixed(prefix: str, told: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in told.items()}


@dataclass(frozen=True, slots=True)
class _Trace:
    """Makes the spans of one request, whose ids are `trace` and, of its own span, `root`."""

    whole: Whole
    trace: str
    root: str

    def span(
        self, place: tuple[str, str], name: str, stretch: tuple[int, int], told: dict[str, Any]
    ) -> Document:
        """Return a span: its id and its parent's (empty: none), what it is called, from when to
        when (ns), and its attributes."""
        own, parent = place
        begin, end = stretch
        return {
            "traceId": self.trace,
            "spanId": own,
            **({"parentSpanId": parent} if parent else {}),
            "name": clean(name),
            "kind": _INTERNAL if parent else _SERVER,
            "startTimeUnixNano": str(self.whole.wall(begin)),
            "endTimeUnixNano": str(self.whole.wall(max(begin, end))),
            "attributes": _attributes(told),
        }

    def child(self, number: int) -> str:
        """Return the id of a part of the request: the request's with a number mixed in."""
        return (
            hashlib.blake2b(f"{self.root}{number}".encode(), digest_size=8).hexdigest()[:15] + "2"
        )


def _request(whole: Whole, row: RequestRow) -> Iterator[Document]:
    view = row.view
    trace = _Trace(whole, *_ids(whole, row))
    yield _root(whole, row, trace)
    for stage, begin, end in whole.stages(view):
        own = trace.child(stage.stage.value)
        known: dict[str, Any] = {
            "tracer.stage": stage.stage.value,
            **_prefixed("tracer.", fields(stage, "status reason wait_ms")),
            **{f"tracer.{name.replace(' ', '_')}_ms": ms for name, ms in stage.parts},
        }
        yield trace.span((own, trace.root), stage.stage.id, (begin, end), known)
        for number, chunk in enumerate(view.chunks if stage.stage is Stage.PREFILL else (), 1):
            known = {"tracer.step": chunk.step, "tracer.tokens": chunk.tokens}
            place = trace.child(100 + number), own
            yield trace.span(place, "chunk", (chunk.begin, chunk.end), known)


def _root(whole: Whole, row: RequestRow, trace: _Trace) -> Document:
    view, record = row.view, row.record
    failed = bool(view.error) or view.finish_reason in FAILED
    told = _request_attributes(whole, row, failed)
    model = told["gen_ai.request.model"].rpartition("/")[2]
    name = f"{told['gen_ai.operation.name']} {model}".strip()
    span = trace.span((trace.root, ""), name, (view.received, whole.end(view)), told)
    if failed:
        span["status"] = {"code": _ERROR, "message": clean(view.error or view.finish_reason)}
    moments = [] if record.first_token is None else [("first token", record.first_token)]
    moments += [(f"preempted ({clean(item.kind)})", item.begin) for item in record.preemptions]
    if moments:
        span["events"] = [{"timeUnixNano": str(whole.wall(t)), "name": name} for name, t in moments]
    return span


def _request_attributes(whole: Whole, row: RequestRow, failed: bool) -> dict[str, Any]:
    view = row.view
    engine = whole.engine(row.record.engine or view.source)
    chat = "chat" in view.route or "messages" in view.route
    error = str(view.status_code) if (view.status_code or 0) >= 400 else "failed"
    own = fields(
        view,
        "tenant id phase incomplete preemptions recomputed_tokens queue_ms prefill_ms ttft_ms "
        "tpot_ms e2e_ms unattributed_ms",
    )
    return {
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": (engine.name if engine is not None else "") or "llm-engine",
        "gen_ai.request.model": clean(view.model) or _model(whole, row),
        "gen_ai.response.model": _model(whole, row),
        "gen_ai.response.id": view.rid or view.id,
        "gen_ai.request.max_tokens": view.max_tokens,
        "gen_ai.request.stream": view.streaming,
        "gen_ai.usage.input_tokens": view.prompt_tokens,
        "gen_ai.usage.output_tokens": view.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": view.cached_tokens,
        "gen_ai.response.finish_reasons": [view.finish_reason] if view.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": None if view.ttft_ms is None else view.ttft_ms / 1e3,
        "error.type": error if failed else None,
        "http.response.status_code": view.status_code,
        "http.route": view.route if view.route.startswith("/") else None,
        **_prefixed("tracer.request.", own | {"incomplete": view.incomplete or None}),
        **dict(_messages(row)),
    }


def _messages(row: RequestRow) -> Iterator[tuple[str, str]]:
    """Prompt and output as the conventions want messages: JSON in a string."""
    names = {"prompt_text": ("input", "user"), "output_text": ("output", "assistant")}
    for kind, text in row.texts():
        name, role = names[kind]
        part = {"type": "text", "content": clean(text, keep_newlines=True)}
        message: dict[str, Any] = {"role": role, "parts": [part]}
        if role == "assistant":
            message["finish_reason"] = clean(row.view.finish_reason)
        yield f"gen_ai.{name}.messages", json.dumps([message], ensure_ascii=False)


def _model(whole: Whole, row: RequestRow) -> str:
    """The model of the request's engine, else of its front end, else of any engine."""
    own = [whole.engine(source) for source in (row.record.engine, row.view.source)]
    known = (engine.model for engine in (*own, *whole.snapshot.engines) if engine and engine.model)
    return clean(next(known, ""))


def _attributes(told: dict[str, Any]) -> list[Document]:
    """What is known, in OTLP's form; empty words and None are left out."""
    return [
        {"key": key, "value": _value(value)}
        for key, value in told.items()
        if value is not None and value != ""
    ]


def _value(value: Value | list[str]) -> Document:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(min(value, LARGEST))}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": clean(value)}


def _ids(whole: Whole, row: RequestRow) -> tuple[str, str]:
    """Ids of a request's trace and of its span: never all zeros, which would be invalid."""
    source, key = row.record.keys[0]
    seed = f"{source}\0{key}\0{row.view.rid}\0{whole.wall(row.view.received)}"
    digest = hashlib.blake2b(seed.encode("utf-8", "backslashreplace"), digest_size=24).hexdigest()
    return digest[:31] + (digest[31] if digest[:32].strip("0") else "1"), digest[32:47] + "1"

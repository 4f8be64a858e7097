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
from collections.abc import Iterator
from typing import Any, Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.clock import NS_PER_MS
from tracer.export.timeline import Value
from tracer.export.whole import RequestRow, Whole
from tracer.format.text import clean
from tracer.state.request.outcome import FAILED

SPANS: Final = 500
"""Spans in one document, about; a collector takes 4 MiB and more."""
_INTERNAL, _SERVER = 1, 2
_ERROR: Final = 2

Document = dict[str, Any]


def otlp_documents(whole: Whole) -> Iterator[Document]:
    """`ExportTraceServiceRequest` after `ExportTraceServiceRequest`; one at least."""
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
    """The protobuf message of a document. Raises ImportError without the `opentelemetry-proto`
    package."""
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


_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})

# --- documents ------------------------------------------------------------------------------------


def _document(whole: Whole, sources: dict[str, list[Document]]) -> Document:
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(_resource(whole, source))},
                "scopeSpans": [
                    {"scope": {"name": "tracer", "version": __version__}, "spans": spans}
                ],
            }
            for source, spans in sources.items()
        ]
    }


def _resource(whole: Whole, source: str) -> dict[str, Any]:
    view = next((engine for engine in whole.snapshot.engines if engine.source == source), None)
    header = whole.headers.get(source)
    told: dict[str, Any] = {"service.name": (view.name if view is not None else "") or "llm-engine"}
    told["service.instance.id"] = source
    if view is not None:
        told |= {
            "service.version": view.version,
            "process.pid": view.pid or None,
            "tracer.engine.model": view.model,
            "tracer.engine.dtype": view.dtype,
            "tracer.engine.device": view.device,
            "tracer.engine.steps": sum(row.view.source == source for row in whole.steps),
        }
    if header is not None:
        told |= {"host.name": header.host}
    return told


def _request(whole: Whole, row: RequestRow) -> Iterator[Document]:
    view = row.view
    trace, root = _ids(whole, row)
    model = clean(view.model) or _model(whole, row)
    operation = "chat" if "chat" in view.route or "messages" in view.route else "text_completion"
    failed = bool(view.error) or view.finish_reason in FAILED
    told = _request_attributes(whole, row, operation, model, failed)
    name = f"{operation} {model.rpartition('/')[2]}".strip()
    span = _span(whole, trace, root, "", name, view.received, whole.end(view), told, _SERVER)
    if failed:
        span["status"] = {"code": _ERROR, "message": clean(view.error or view.finish_reason)}
    first = row.record.first_token
    moments = [("first token", first)] if first is not None else []
    moments += [(f"preempted ({clean(item.kind)})", item.begin) for item in row.record.preemptions]
    if moments:
        span["events"] = [{"timeUnixNano": str(whole.wall(t)), "name": name} for name, t in moments]
    yield span
    for stage in view.stages:
        if stage.begin is None or stage.ms is None:
            continue
        own = _child(root, stage.stage.value)
        known: dict[str, Any] = {
            "tracer.stage": stage.stage.value,
            "tracer.status": stage.status.value,
            "tracer.reason": stage.reason,
            "tracer.wait_ms": stage.wait_ms,
            **{f"tracer.{name.replace(' ', '_')}_ms": ms for name, ms in stage.parts},
        }
        end = stage.begin + round(stage.ms * NS_PER_MS)
        yield _span(whole, trace, own, root, stage.stage.id, stage.begin, end, known, _INTERNAL)
        for number, chunk in enumerate(view.chunks if stage.stage.id == "prefill" else (), 1):
            known = {"tracer.step": chunk.step, "tracer.tokens": chunk.tokens}
            yield _span(
                whole,
                trace,
                _child(root, 100 + number),
                own,
                "chunk",
                chunk.begin,
                chunk.end,
                known,
                _INTERNAL,
            )


def _request_attributes(
    whole: Whole, row: RequestRow, operation: str, model: str, failed: bool
) -> dict[str, Any]:
    view = row.view
    engine = next(
        (e for e in whole.snapshot.engines if e.source == (row.record.engine or view.source)), None
    )
    told: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": (engine.name if engine is not None else "") or "llm-engine",
        "gen_ai.request.model": model,
        "gen_ai.response.model": _model(whole, row),
        "gen_ai.response.id": view.rid or view.id,
        "gen_ai.request.max_tokens": view.max_tokens,
        "gen_ai.request.stream": view.streaming,
        "gen_ai.usage.input_tokens": view.prompt_tokens,
        "gen_ai.usage.output_tokens": view.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": view.cached_tokens,
        "gen_ai.response.finish_reasons": [view.finish_reason] if view.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": view.ttft_ms / 1000
        if view.ttft_ms is not None
        else None,
        "error.type": (str(view.status_code) if (view.status_code or 0) >= 400 else "failed")
        if failed
        else None,
        "http.response.status_code": view.status_code,
        "http.route": view.route if view.route.startswith("/") else None,
        "tracer.request.tenant": view.tenant,
        "tracer.request.id": view.id,
        "tracer.request.phase": view.phase.value,
        "tracer.request.incomplete": view.incomplete or None,
        "tracer.request.preemptions": view.preemptions,
        "tracer.request.recomputed_tokens": view.recomputed_tokens,
        "tracer.request.queue_ms": view.queue_ms,
        "tracer.request.prefill_ms": view.prefill_ms,
        "tracer.request.ttft_ms": view.ttft_ms,
        "tracer.request.tpot_ms": view.tpot_ms,
        "tracer.request.e2e_ms": view.e2e_ms,
        "tracer.request.unattributed_ms": view.unattributed_ms,
    }
    for name, role, text in (
        ("input", "user", row.prompt_text),
        ("output", "assistant", row.output_text),
    ):
        if text is not None:
            told[f"gen_ai.{name}.messages"] = _Messages(role, text, view.finish_reason)
    return told


class _Messages:
    """One message as the conventions want it: JSON in a string."""

    def __init__(self, role: str, text: str, reason: str) -> None:
        import json

        message: dict[str, Any] = {
            "role": role, "parts": [{"type": "text", "content": clean(text, keep_newlines=True)}],
        }  # fmt: skip
        if role == "assistant":
            message["finish_reason"] = clean(reason)
        self.text = json.dumps([message], ensure_ascii=False)


def _model(whole: Whole, row: RequestRow) -> str:
    for source in (row.record.engine, row.view.source):
        for engine in whole.snapshot.engines:
            if engine.source == source and engine.model:
                return clean(engine.model)
    return clean(next((engine.model for engine in whole.snapshot.engines if engine.model), ""))


def _span(
    whole: Whole,
    trace: str,
    own: str,
    parent: str,
    name: str,
    begin: int,
    end: int,
    told: dict[str, Any],
    kind: int,
) -> Document:
    made: Document = {"traceId": trace, "spanId": own}
    if parent:
        made["parentSpanId"] = parent
    start, stop = whole.wall(begin), whole.wall(max(begin, end))
    made |= {
        "name": clean(name),
        "kind": kind,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(stop),
        "attributes": _attributes(told),
    }
    return made


def _attributes(told: dict[str, Any]) -> list[Document]:
    """What is known, in OTLP's form; empty words and None are left out."""
    return [
        {"key": key, "value": _value(value)}
        for key, value in told.items()
        if value is not None and value != ""
    ]


def _value(value: Value | list[str] | _Messages) -> Document:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(min(value, (1 << 63) - 1))}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value.text if isinstance(value, _Messages) else clean(value)}


# --- ids ------------------------------------------------------------------------------------------


def _ids(whole: Whole, row: RequestRow) -> tuple[str, str]:
    """Ids of a request's trace and of its span: never all zeros, which would be invalid."""
    source, key = row.record.keys[0]
    seed = f"{source}\0{key}\0{row.view.rid}\0{whole.wall(row.view.received)}"
    digest = hashlib.blake2b(seed.encode("utf-8", "backslashreplace"), digest_size=24).hexdigest()
    return digest[:31] + (digest[31] if digest[:32].strip("0") else "1"), digest[32:47] + "1"


def _child(root: str, number: int) -> str:
    """Id of a part of a request: the request's with a number mixed in."""
    return hashlib.blake2b(f"{root}{number}".encode(), digest_size=8).hexdigest()[:15] + "2"

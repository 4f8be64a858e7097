"""OpenTelemetry spans of a serving engine, turned into events: for engines that trace themselves.

`read` takes what a collector's file exporter writes: OTLP as JSON, one document or one a line.
Known are the request spans of SGLang (``--enable-trace``) and of vLLM (``--otlp-traces-endpoint``).
Spans are stamped with wall time, which here takes the place of the monotonic clock: all spans of
one file must come from one host, or from hosts whose clocks agree. What no span tells (stages 2, 5,
6, 8, 9, KV blocks) stays untold; where tokens of a pass have to be divided, the pass is marked
*estimated*. Read from the engines' sources; not run against a live SGLang server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final

import msgspec

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import Header, pack_u32
from engine_hooks.protocol.stages import Stage

MAX_BYTES: Final = 1 << 29
"""A file beyond half a gigabyte is refused: it is read as a whole."""
TOGETHER_NS: Final = NS_PER_MS
"""Passes that end within a millisecond of each other are one step of the engine: it stamps the
members of a batch one after the other, and no step is that short."""

APART_NS: Final = 365 * 86_400 * NS_PER_S
"""A span further than a year from most of the file has a stamp that cannot be: no file spans so
much."""
LONGEST_NS: Final = 86_400 * NS_PER_S
"""Nor does a request, or a part of one, last longer than a day."""

_ROOT_TTFT: Final = "gen_ai.latency.time_to_first_token"
_LARGEST: Final = (1 << 62) - 1


class SpanError(ValueError):
    """The file holds no spans that can be used. The message is one line that says why."""


class _Value(msgspec.Struct):
    stringValue: str | None = None  # noqa: N815  (OTLP's own names, as the next ones)
    intValue: int | str | None = None  # noqa: N815
    doubleValue: float | None = None  # noqa: N815
    boolValue: bool | None = None  # noqa: N815


class _Attribute(msgspec.Struct):
    key: str
    value: _Value = msgspec.field(default_factory=_Value)


class _Moment(msgspec.Struct):
    timeUnixNano: int | str = 0  # noqa: N815
    name: str = ""


class _Span(msgspec.Struct):
    traceId: str = ""  # noqa: N815
    spanId: str = ""  # noqa: N815
    parentSpanId: str = ""  # noqa: N815
    name: str = ""
    startTimeUnixNano: int | str = 0  # noqa: N815
    endTimeUnixNano: int | str = 0  # noqa: N815
    attributes: list[_Attribute] = []
    events: list[_Moment] = []


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct):
    attributes: list[_Attribute] = []


class _ResourceSpans(msgspec.Struct):
    resource: _Resource = msgspec.field(default_factory=_Resource)
    scopeSpans: list[_Scope] = []  # noqa: N815


class _Export(msgspec.Struct):
    resourceSpans: list[_ResourceSpans] = []  # noqa: N815


@dataclass(frozen=True, slots=True)
class Imported:
    """`headers` name the sources; `events` are (source, event) in order of time; `requests` were
    found, `ignored` spans were of no kind that we know."""

    headers: list[Header]
    events: list[tuple[str, events.Event]]
    requests: int
    ignored: int
    set_aside: int = 0
    """Spans whose times contradict the others."""


@dataclass(slots=True)
class _Pass:
    """One forward pass of a request: ns since the epoch, tokens that it ran and gave."""

    key: int
    begin: int
    end: int
    scheduled: int
    produced: int
    estimated: bool = False


@dataclass(slots=True)
class _Trace:
    """The spans of one request."""

    root: _Span | None = None
    parts: list[_Span] = field(default_factory=list)


def read(data: bytes) -> Imported:
    """The events that a file of spans tells. Raises SpanError."""
    if len(data) > MAX_BYTES:
        raise SpanError(f"{len(data):,} bytes of spans are too many; {MAX_BYTES:,} are read")
    traces: dict[str, _Trace] = {}
    requests: list[_Span] = []
    ignored = 0
    spans = list(_spans(data))
    believed = _believed(spans)
    for span in believed:
        attributes = _attributes(span)
        if span.name == "llm_request":
            requests.append(span)
        elif "rid" in attributes:
            traces.setdefault(span.traceId, _Trace()).root = span
        elif span.name in _KNOWN:
            traces.setdefault(span.traceId, _Trace()).parts.append(span)
        else:
            # SGLang's own frame around the spans of one thread
            ignored += "thread_label" not in attributes
    whole = [trace for trace in traces.values() if trace.root is not None]
    ignored += sum(len(trace.parts) for trace in traces.values() if trace.root is None)
    if not whole and not requests:
        raise SpanError("no request spans of SGLang or vLLM in it")
    began = min(
        map(_begin, [*(trace.root for trace in whole if trace.root is not None), *requests])
    )
    headers: list[Header] = []
    told: list[tuple[str, events.Event]] = []
    if whole:
        headers.append(_header("sglang", "SGLang (spans)", began))
        told += [("sglang", event) for event in _sglang(whole)]
    for lane, of_lane in enumerate(_lanes(requests), 1):
        headers.append(_header(f"vllm:{lane}", "vLLM (spans)", began))
        told += [(f"vllm:{lane}", event) for event in _vllm(of_lane)]
    told.sort(key=lambda pair: pair[1].t)
    return Imported(headers, told, len(whole) + len(requests), ignored, len(spans) - len(believed))


def _believed(spans: list[_Span]) -> list[_Span]:
    """Those whose times do not contradict the others'."""
    if not spans:
        return []
    usual = median_low([_begin(span) for span in spans])
    return [
        span for span in spans
        if abs(_begin(span) - usual) <= APART_NS and _end(span) - _begin(span) <= LONGEST_NS
    ]  # fmt: skip


# --- the file -------------------------------------------------------------------------------------


def _spans(data: bytes) -> Iterator[_Span]:
    decoder = msgspec.json.Decoder(_Export)
    lines = [line for line in data.splitlines() if line.strip()]
    for number, document in enumerate([data] if _whole(data) else lines, 1):
        try:
            export = decoder.decode(document)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SpanError(f"line {number} is no OTLP JSON: {error}") from error
        for resource in export.resourceSpans:
            for scope in resource.scopeSpans:
                yield from scope.spans


def _whole(data: bytes) -> bool:
    """Whether the file is one document, as opposed to one a line."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _attributes(span: _Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in span.attributes:
        value = attribute.value
        if value.intValue is not None:
            found[attribute.key] = _int(value.intValue)
        else:
            found[attribute.key] = next(
                (
                    v
                    for v in (value.stringValue, value.doubleValue, value.boolValue)
                    if v is not None
                ),
                None,
            )
    return found


def _int(value: Any, default: int = -1) -> int:
    """A whole number that a peer wrote, as number or as text; no larger than the fold takes for an
    instant."""
    try:
        return max(-1, min(int(value), _LARGEST))
    except (TypeError, ValueError, OverflowError):
        return default


def _count(value: Any) -> int:
    """A number of tokens, -1 when it is none."""
    return min(_int(value), 0x7FFF_FFFF)


def _seconds(value: Any) -> int:
    """A latency in seconds as ns, -1 when it is none."""
    return (
        int(value * NS_PER_S)
        if isinstance(value, int | float) and 0 <= value <= LONGEST_NS / NS_PER_S
        else -1
    )


def _begin(span: _Span) -> int:
    return max(0, _int(span.startTimeUnixNano, 0))


def _end(span: _Span) -> int:
    return max(_begin(span), _int(span.endTimeUnixNano, 0))


def _header(source: str, title: str, began: int) -> Header:
    """Spans are stamped with the wall clock: `began`, ns since the epoch, is that on both."""
    return Header(
        events.SCHEMA_VERSION, source, 0, "engine", title, "", "", ClockAnchor(began, began)
    )


# --- SGLang ---------------------------------------------------------------------------------------

_KNOWN: Final = frozenset(
    {
        "tokenize",
        "api_server_dispatch",
        "dpc_dispatch",
        "request_process",
        "prefill_waiting",
        "prefill_forward",
        "chunked_prefill",
        "decode_waiting",
        "decode_forward",
        "decode_loop",
    }
)
"""Names of SGLang's stages for a server that is not split into prefill and decode halves."""


def _sglang(traces: list[_Trace]) -> Iterator[events.Event]:
    spans = [span for trace in traces for span in (trace.root, *trace.parts) if span is not None]
    yield events.Engine(min(map(_begin, spans)), "sglang", warning="imported from its own spans")
    stages = dict.fromkeys((1, 3, 4, 7, 11, 12), "OpenTelemetry span")
    yield from _coverage(min(map(_begin, spans)), stages, "its spans do not tell it")
    passes: list[_Pass] = []
    for key, trace in enumerate(traces, 1):
        yield from _sglang_request(key, trace, passes)
    yield from _steps(passes)


def _sglang_request(key: int, trace: _Trace, passes: list[_Pass]) -> Iterator[events.Event]:
    root = trace.root
    assert root is not None
    attributes = _attributes(root)
    named: dict[str, list[_Span]] = {}
    for span in sorted(trace.parts, key=_begin):
        named.setdefault(span.name, []).append(span)
    begin, end = _begin(root), _end(root)
    prompt = _count(attributes.get("gen_ai.usage.prompt_tokens"))
    cached = _count(attributes.get("gen_ai.usage.cached_tokens"))
    yield events.Received(begin, key, str(attributes["rid"])[:200], "sglang", "", "")
    for span in named.get("tokenize", ())[:1]:
        yield events.End(_begin(span), key, Stage.RECEIVE)
        yield events.Begin(_begin(span), key, Stage.TOKENISE)
        yield events.End(_end(span), key, Stage.TOKENISE, prompt)
    for span in named.get("api_server_dispatch", ())[:1]:
        yield events.Begin(_begin(span), key, Stage.ADMISSION)
    for span in named.get("prefill_waiting", ()):
        yield events.Queued(
            _begin(span), key, "", prompt, _count(attributes.get("gen_ai.request.max_tokens"))
        )
        yield events.Scheduled(_end(span), key, _end(span), cached)
    moments = [moment for span in trace.parts for moment in span.events]
    retracted = sorted(_int(moment.timeUnixNano) for moment in moments if moment.name == "retract")
    retracted = [at for at in retracted if begin <= at <= end]
    forward = named.get("prefill_forward", [])
    first = _end(forward[0]) if forward else -1
    inner = [span for span in named.get("chunked_prefill", ()) if _end(span) <= first]
    run = prompt - max(cached, 0) if prompt >= 0 else 0
    for index, span in enumerate(inner or forward[:1]):
        count = max(1, len(inner))
        share = run // count if index < count - 1 else run - run // count * (count - 1)
        passes.append(
            _Pass(key, _begin(span), _end(span), max(share, 0), int(index == count - 1), count > 1)
        )
    for number, at in enumerate(retracted, 1):
        yield events.Preempted(at, key, "recompute", -1, -1, number)
    for span in forward[1:]:  # what a retraction lost is computed again, and yields the next token
        yield events.Scheduled(_begin(span), key, _begin(span), 0, 0, 0, True)
        passes.append(_Pass(key, _begin(span), _end(span), 0, 1, True))
    loops = named.get("decode_loop", [])
    passes += [_Pass(key, _begin(span), _end(span), 1, 1) for span in loops]
    total = _count(attributes.get("gen_ai.usage.completion_tokens"))
    generated = len(forward)
    if not loops and total > generated and (decode := named.get("decode_forward")):
        # Only told as a whole (a lower trace level): its tokens are spread over it.
        passes.append(_Pass(key, _begin(decode[0]), _end(decode[-1]), 1, total - generated, True))
    ttft = _seconds(attributes.get(_ROOT_TTFT))
    if ttft >= 0:
        yield events.End(begin + ttft, key, Stage.STREAM)
    last = max((item.end for item in passes if item.key == key), default=end)
    reason = str(attributes.get("gen_ai.response.finish_reasons") or "")[:40]
    yield events.Finished(min(last, end), key, reason, total, "", prompt, cached)
    yield events.Closed(end, key)


def _steps(passes: list[_Pass]) -> Iterator[events.Event]:
    """Passes as steps of one engine, which runs one after the other: those that end together are
    one."""
    groups: list[list[_Pass]] = []
    for item in sorted(passes, key=lambda item: item.end):
        group = groups[-1] if groups else None
        if (
            group
            and item.end - group[-1].end <= TOGETHER_NS
            and all(other.key != item.key for other in group)
        ):
            group.append(item)
        else:
            groups.append([item])
    members: set[int] = set()
    reached = 0
    for n, group in enumerate(groups, 1):
        token = group[-1].end
        begin = min(max(min(item.begin for item in group), reached), token)
        keys = {item.key for item in group}
        odd: list[int] = []
        for item in group:
            if item.scheduled != 1 or item.produced != 1:
                odd += (item.key, item.scheduled, item.produced)
        step = events.Step(begin, n, token=token - begin, end=token - begin, batch=len(keys))
        step.joined, step.left = pack_u32(sorted(keys - members)), pack_u32(sorted(members - keys))
        step.odd = pack_u32(odd)
        step.tokens = sum(item.scheduled for item in group)
        if any(item.estimated for item in group):
            step.timing = events.Timing.ESTIMATED
        yield step
        members, reached = keys, max(reached + 1, token)


# --- vLLM -----------------------------------------------------------------------------------------


def _lanes(spans: list[_Span]) -> list[list[_Span]]:
    """Requests that do not overlap share a source: their spans tell no batch."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans, key=_begin):
        for lane in lanes:
            if _end(lane[-1]) < _begin(span):
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _vllm(spans: list[_Span]) -> Iterator[events.Event]:
    start = _begin(spans[0])
    yield events.Engine(
        start, "vllm", warning="imported from its own spans: one a request, with latencies"
    )
    yield from _coverage(
        start, dict.fromkeys((1, 4, 7, 10, 11), "span llm_request"), "one span a request"
    )
    passes: list[_Pass] = []
    for key, span in enumerate(spans, 1):
        attributes = _attributes(span)
        begin = _begin(span)
        ttft, e2e, queue, prefill, decode = (
            _seconds(attributes.get(f"gen_ai.latency.{name}"))
            for name in (
                "time_to_first_token",
                "e2e",
                "time_in_queue",
                "time_in_model_prefill",
                "time_in_model_decode",
            )
        )
        end = begin + e2e if e2e >= 0 else _end(span)
        prompt = _count(attributes.get("gen_ai.usage.prompt_tokens"))
        total = _count(attributes.get("gen_ai.usage.completion_tokens"))
        yield events.Received(
            begin, key, str(attributes.get("gen_ai.request.id") or span.spanId)[:200], "vllm"
        )
        if min(ttft, queue, prefill, decode) >= 0:
            first = begin + ttft
            taken = first - prefill
            limit = _count(attributes.get("gen_ai.request.max_tokens"))
            yield events.Queued(max(begin, taken - queue), key, "", prompt, limit)
            yield events.Scheduled(taken, key, taken)
            yield events.End(first, key, Stage.STREAM)
            passes.append(_Pass(key, taken, first, max(prompt, 0), 1, True))
            if total > 1:
                passes.append(_Pass(key, first, first + decode, 1, total - 1, True))
            yield events.Finished(first + decode, key, "", total, "", prompt)
        yield events.Closed(end, key)
    yield from _steps(passes)


def _coverage(at: int, told: dict[int, str], why: str) -> Iterable[events.Event]:
    for stage in Stage:
        if stage in told:
            yield events.Coverage(
                at, int(stage), "estimated", told[stage], "from the engine's own spans"
            )
        else:
            yield events.Coverage(at, int(stage), "unavailable", "", why)

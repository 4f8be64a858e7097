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
from dataclasses import dataclass
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

_LARGEST: Final = (1 << 62) - 1


class SpanError(ValueError):
    """The file holds no spans that can be used. The message is one line that says why."""


class _Value(msgspec.Struct, rename="camel"):
    string_value: str | None = None
    int_value: int | str | None = None
    double_value: float | None = None
    bool_value: bool | None = None


class _Attribute(msgspec.Struct):
    key: str
    value: _Value = msgspec.field(default_factory=_Value)


class _Moment(msgspec.Struct, rename="camel"):
    time_unix_nano: int | str = 0
    name: str = ""


class _Span(msgspec.Struct, rename="camel"):
    trace_id: str = ""
    span_id: str = ""
    name: str = ""
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: list[_Attribute] = []
    events: list[_Moment] = []

    @property
    def begin(self) -> int:
        return max(0, _int(self.start_time_unix_nano, 0))

    @property
    def end(self) -> int:
        """End in ns since the epoch, not before the start."""
        return max(self.begin, _int(self.end_time_unix_nano, 0))

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for attribute in self.attributes:
            value = attribute.value
            number = None if value.int_value is None else _int(value.int_value)
            values = (number, value.string_value, value.double_value, value.bool_value)
            found[attribute.key] = next((each for each in values if each is not None), None)
        return found


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _ResourceSpans(msgspec.Struct, rename="camel"):
    scope_spans: list[_Scope] = []


class _Export(msgspec.Struct, rename="camel"):
    resource_spans: list[_ResourceSpans] = []


@dataclass(frozen=True, slots=True)
class Imported:
    """`headers` name the sources; `events` are (source, event) in order of time; `requests` were
    found, `ignored` spans were of no kind that we know, `set_aside` have times that contradict the
    others."""

    headers: list[Header]
    events: list[tuple[str, events.Event]]
    requests: int
    ignored: int
    set_aside: int


@dataclass(slots=True)
class _Pass:
    """One forward pass of a request: ns since the epoch, tokens that it ran and gave."""

    key: int
    begin: int
    end: int
    scheduled: int
    produced: int
    estimated: bool = False


def read(data: bytes) -> Imported:
    """Return the events that a file of spans tells.

    Raises:
        SpanError: The file holds no request that can be read.
    """
    if len(data) > MAX_BYTES:
        raise SpanError(f"{len(data):,} bytes of spans are too many; {MAX_BYTES:,} are read")
    spans = list(_spans(data))
    believed = _believed(spans)
    roots: dict[str, _Span] = {}
    parts: dict[str, list[_Span]] = {}
    requests: list[_Span] = []
    ignored = 0
    for span in believed:
        attributes = span.told()
        if span.name == "llm_request":
            requests.append(span)
        elif "rid" in attributes:
            roots[span.trace_id] = span
        elif span.name in _KNOWN:
            parts.setdefault(span.trace_id, []).append(span)
        else:
            # SGLang's own frame around the spans of one thread
            ignored += "thread_label" not in attributes
    ignored += sum(len(of_trace) for trace, of_trace in parts.items() if trace not in roots)
    if not roots and not requests:
        raise SpanError("no request spans of SGLang or vLLM in it")
    began = min(span.begin for span in (*roots.values(), *requests))
    sources: dict[str, tuple[str, Iterable[events.Event]]] = {}
    if roots:
        traces = [(root, parts.get(trace, [])) for trace, root in roots.items()]
        sources["sglang"] = ("SGLang (spans)", _sglang(traces))
    for lane, of_lane in enumerate(_lanes(requests), 1):
        sources[f"vllm:{lane}"] = ("vLLM (spans)", _vllm(of_lane))
    told = [(source, event) for source, (_, of) in sources.items() for event in of]
    told.sort(key=lambda pair: pair[1].t)
    headers = [_header(source, title, began) for source, (title, _) in sources.items()]
    set_aside = len(spans) - len(believed)
    return Imported(headers, told, len(roots) + len(requests), ignored, set_aside)


def _believed(spans: list[_Span]) -> list[_Span]:
    """Those whose times do not contradict the others'."""
    if not spans:
        return []
    usual = median_low([span.begin for span in spans])
    return [
        span for span in spans
        if abs(span.begin - usual) <= APART_NS and span.end - span.begin <= LONGEST_NS
    ]  # fmt: skip


# --- the file -------------------------------------------------------------------------------------


def _spans(data: bytes) -> Iterator[_Span]:
    decoder = msgspec.json.Decoder(_Export)
    lines = [line for line in data.splitlines() if line.strip()]
    for number, document in enumerate([data] if _is_one_document(data) else lines, 1):
        try:
            export = decoder.decode(document)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SpanError(f"line {number} is no OTLP JSON: {error}") from error
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                yield from scope.spans


def _is_one_document(data: bytes) -> bool:
    """True unless the file has one document a line."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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
    known = isinstance(value, int | float) and 0 <= value <= LONGEST_NS / NS_PER_S
    return int(value * NS_PER_S) if known else -1


def _header(source: str, title: str, began: int) -> Header:
    """Spans are stamped with the wall clock: `began`, ns since the epoch, is that on both."""
    return Header(
        events.SCHEMA_VERSION, source, 0, "engine", title, "", "", ClockAnchor(began, began)
    )


# --- SGLang ---------------------------------------------------------------------------------------

_KNOWN: Final = frozenset({
    "tokenize", "api_server_dispatch", "dpc_dispatch", "request_process", "prefill_waiting",
    "prefill_forward", "chunked_prefill", "decode_waiting", "decode_forward", "decode_loop",
})  # fmt: skip
"""Names of SGLang's stages for a server that is not split into prefill and decode halves."""


def _sglang(traces: list[tuple[_Span, list[_Span]]]) -> Iterator[events.Event]:
    """Events of requests, each told by its root span and its parts."""
    begin = min(span.begin for root, parts in traces for span in (root, *parts))
    yield events.Engine(begin, "sglang", warning="imported from its own spans")
    stages = dict.fromkeys((1, 3, 4, 7, 11, 12), "OpenTelemetry span")
    yield from _coverage(begin, stages, "its spans do not tell it")
    passes: list[_Pass] = []
    for key, (root, parts) in enumerate(traces, 1):
        yield from _sglang_request(key, root, sorted(parts, key=lambda span: span.begin), passes)
    yield from _steps(passes)


def _sglang_request(
    key: int, root: _Span, parts: list[_Span], passes: list[_Pass]
) -> Iterator[events.Event]:
    told = root.told()
    named: dict[str, list[_Span]] = {}
    for span in parts:
        named.setdefault(span.name, []).append(span)
    begin, end = root.begin, root.end
    prompt = _count(told.get("gen_ai.usage.prompt_tokens"))
    cached = _count(told.get("gen_ai.usage.cached_tokens"))
    limit = _count(told.get("gen_ai.request.max_tokens"))
    total = _count(told.get("gen_ai.usage.completion_tokens"))
    yield events.Received(begin, key, str(told["rid"])[:200], "sglang", "", "")
    for span in named.get("tokenize", ())[:1]:
        yield events.End(span.begin, key, Stage.RECEIVE)
        yield events.Begin(span.begin, key, Stage.TOKENISE)
        yield events.End(span.end, key, Stage.TOKENISE, prompt)
    for span in named.get("api_server_dispatch", ())[:1]:
        yield events.Begin(span.begin, key, Stage.ADMISSION)
    for span in named.get("prefill_waiting", ()):
        yield events.Queued(span.begin, key, "", prompt, limit)
        yield events.Scheduled(span.end, key, span.end, cached)
    moments = [moment for span in parts for moment in span.events if moment.name == "retract"]
    retracted = sorted(_int(moment.time_unix_nano) for moment in moments)
    for number, at in enumerate([at for at in retracted if begin <= at <= end], 1):
        yield events.Preempted(at, key, "recompute", -1, -1, number)
    # what a retraction lost is computed again, and yields the next token
    for span in named.get("prefill_forward", [])[1:]:
        yield events.Scheduled(span.begin, key, span.begin, 0, 0, 0, True)
    own = _sglang_passes(key, named, prompt - max(cached, 0) if prompt >= 0 else 0, total)
    passes += own
    ttft = _seconds(told.get("gen_ai.latency.time_to_first_token"))
    if ttft >= 0:
        yield events.End(begin + ttft, key, Stage.STREAM)
    last = max((item.end for item in own), default=end)
    reason = str(told.get("gen_ai.response.finish_reasons") or "")[:40]
    yield events.Finished(min(last, end), key, reason, total, "", prompt, cached)
    yield events.Closed(end, key)


def _sglang_passes(key: int, named: dict[str, list[_Span]], run: int, total: int) -> list[_Pass]:
    """The passes of a request that ran `run` prompt tokens and gave `total`."""
    forward, loops = named.get("prefill_forward", []), named.get("decode_loop", [])
    first = forward[0].end if forward else -1
    chunks = [span for span in named.get("chunked_prefill", ()) if span.end <= first]
    count = max(1, len(chunks))
    passes = []
    for index, span in enumerate(chunks or forward[:1]):
        is_last = index == count - 1
        share = run - run // count * (count - 1) if is_last else run // count
        passes.append(_Pass(key, span.begin, span.end, max(share, 0), int(is_last), count > 1))
    passes += [_Pass(key, span.begin, span.end, 0, 1, True) for span in forward[1:]]
    passes += [_Pass(key, span.begin, span.end, 1, 1) for span in loops]
    if not loops and total > len(forward) and (decode := named.get("decode_forward")):
        # Only told as a whole (a lower trace level): its tokens are spread over it.
        given = total - len(forward)
        passes.append(_Pass(key, decode[0].begin, decode[-1].end, 1, given, True))
    return passes


def _steps(passes: list[_Pass]) -> Iterator[events.Event]:
    """Passes as steps of one engine, which runs one after the other: those that end together are
    one."""
    groups: list[list[_Pass]] = []
    for item in sorted(passes, key=lambda item: item.end):
        last = groups[-1] if groups else []
        together = last and item.end - last[-1].end <= TOGETHER_NS
        if together and all(other.key != item.key for other in last):
            last.append(item)
        else:
            groups.append([item])
    members: set[int] = set()
    reached = 0
    for n, group in enumerate(groups, 1):
        token = group[-1].end
        begin = min(max(min(item.begin for item in group), reached), token)
        keys = {item.key for item in group}
        odd = [item for item in group if (item.scheduled, item.produced) != (1, 1)]
        step = events.Step(begin, n, token=token - begin, end=token - begin, batch=len(keys))
        step.joined, step.left = pack_u32(sorted(keys - members)), pack_u32(sorted(members - keys))
        step.odd = pack_u32([n for item in odd for n in (item.key, item.scheduled, item.produced)])
        step.tokens = sum(item.scheduled for item in group)
        if any(item.estimated for item in group):
            step.timing = events.Timing.ESTIMATED
        yield step
        members, reached = keys, max(reached + 1, token)


# --- vLLM -----------------------------------------------------------------------------------------


def _lanes(spans: list[_Span]) -> list[list[_Span]]:
    """Requests that do not overlap share a source: their spans tell no batch."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        free = next((lane for lane in lanes if lane[-1].end < span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _vllm(spans: list[_Span]) -> Iterator[events.Event]:
    start = spans[0].begin
    warning = "imported from its own spans: one a request, with latencies"
    yield events.Engine(start, "vllm", warning=warning)
    stages = dict.fromkeys((1, 4, 7, 10, 11), "span llm_request")
    yield from _coverage(start, stages, "one span a request")
    passes: list[_Pass] = []
    for key, span in enumerate(spans, 1):
        yield from _vllm_request(key, span, passes)
    yield from _steps(passes)


def _vllm_request(key: int, span: _Span, passes: list[_Pass]) -> Iterator[events.Event]:
    told, begin = span.told(), span.begin
    ttft, e2e, queue, prefill, decode = (
        _seconds(told.get(f"gen_ai.latency.{name}")) for name in _VLLM_LATENCIES
    )
    prompt = _count(told.get("gen_ai.usage.prompt_tokens"))
    total = _count(told.get("gen_ai.usage.completion_tokens"))
    rid = str(told.get("gen_ai.request.id") or span.span_id)[:200]
    yield events.Received(begin, key, rid, "vllm")
    if min(ttft, queue, prefill, decode) >= 0:
        first = begin + ttft
        taken = first - prefill
        limit = _count(told.get("gen_ai.request.max_tokens"))
        yield events.Queued(max(begin, taken - queue), key, "", prompt, limit)
        yield events.Scheduled(taken, key, taken)
        yield events.End(first, key, Stage.STREAM)
        passes.append(_Pass(key, taken, first, max(prompt, 0), 1, True))
        if total > 1:
            passes.append(_Pass(key, first, first + decode, 1, total - 1, True))
        yield events.Finished(first + decode, key, "", total, "", prompt)
    yield events.Closed(begin + e2e if e2e >= 0 else span.end, key)


_VLLM_LATENCIES: Final = (
    "time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill", "time_in_model_decode",
)  # fmt: skip


def _coverage(at: int, told: dict[int, str], why: str) -> Iterator[events.Event]:
    for stage in Stage:
        row = ("unavailable", "", why)
        if stage in told:
            row = ("estimated", told[stage], "from the engine's own spans")
        yield events.Coverage(at, int(stage), *row)

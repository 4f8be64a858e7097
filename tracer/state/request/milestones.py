"""What one event says about one request. Each function writes the event's facts into the record.

The first event that tells a milestone wins: a retold or duplicated one changes nothing. Counters
are cumulative, so the largest wins. Text is kept up to `TEXT_ROOM`.
"""

from __future__ import annotations

from engine_hooks.protocol.events import (
    Begin,
    Closed,
    End,
    Finished,
    Output,
    Params,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Scheduled,
    Sent,
)
from engine_hooks.protocol.stages import Stage
from tracer.state.request.request import TEXT_ROOM, Preemption, Request

_BEGINS = {
    Stage.TEMPLATE: "template_begin",
    Stage.TOKENISE: "tokenise_begin",
    Stage.ADMISSION: "admission_begin",
}
_ENDS = {
    Stage.RECEIVE: "receive_end",
    Stage.TEMPLATE: "template_end",
    Stage.TOKENISE: "tokenise_end",
    Stage.STREAM: "stream_end",
}


def received(request: Request, event: Received) -> None:
    """Who asks, and how. The instant itself is set by the table, which keeps the order of
    receipt."""
    request.route = request.route or event.route
    request.client_id = request.client_id or event.client_id
    request.tenant = request.tenant or event.tenant
    request.streaming = max(request.streaming, min(event.streaming, 1))
    request.offline = request.offline or event.offline


def params(request: Request, event: Params) -> None:
    """What the body asks for."""
    request.streaming = max(request.streaming, min(event.streaming, 1))
    request.tenant = request.tenant or event.tenant
    request.model = request.model or event.model
    request.max_tokens = max(request.max_tokens, event.max_tokens)
    request.messages = max(request.messages, event.messages)
    request.logprobs = request.logprobs or event.logprobs > 0


def begin(request: Request, event: Begin) -> None:
    """A stage that is told by its own events began."""
    _first(request, _BEGINS.get(event.stage), event.t)  # type: ignore[call-overload]


def end(request: Request, event: End) -> None:
    """A stage that is told by its own events ended."""
    _first(request, _ENDS.get(event.stage), event.t)  # type: ignore[call-overload]
    if event.units < 0:
        return
    if event.stage == Stage.RECEIVE and request.body_bytes < 0:
        request.body_bytes = event.units
    elif event.stage == Stage.TEMPLATE and request.prompt_chars < 0:
        request.prompt_chars = event.units
    elif event.stage == Stage.TOKENISE and request.prompt_tokens < 0:
        request.prompt_tokens = event.units


def prompt(request: Request, event: Prompt) -> None:
    """The prompt's text and ids."""
    if event.text and request.prompt_text is None:
        request.prompt_text = event.text[:TEXT_ROOM]
    if event.ids and not request.prompt_ids:
        request.prompt_ids = event.ids[:TEXT_ROOM]
    request.prompt_chars = max(request.prompt_chars, event.chars)
    if request.prompt_tokens < 0:
        request.prompt_tokens = max(-1, event.tokens)


def queued(request: Request, event: Queued, source: str) -> None:
    """The engine's queue took it. A second time is a preemption, also when the engine did not say
    so."""
    if request.queued is None:
        request.queued = event.t
        request.engine = source
    elif not request.preempted and event.t > _last_taken(request) >= 0 and event.t > request.queued:
        request.preemptions.append(Preemption(event.t, "requeued"))
    if event.prompt_tokens >= 0:
        request.prompt_tokens = event.prompt_tokens  # the engine's count is what it computes
    request.max_tokens = max(request.max_tokens, event.max_tokens)


def scheduled(request: Request, event: Scheduled) -> bool:
    """The scheduler took it. Returns whether that was for the first time."""
    request.attempts = max(request.attempts, event.attempts)
    # An engine may put a request back before it has scheduled it at all: its queue time goes on
    # until it is.
    first = request.lookup is None and (
        not event.resumed or (request.preempted and _never_ran(request))
    )
    if request.preempted and event.lookup >= request.preemptions[-1].begin:
        preemption = request.preemptions[-1]
        preemption.resumed, preemption.cached = event.lookup, max(0, event.cached_tokens)
    elif not first:
        if event.resumed and event.lookup > _last_taken(request):
            request.incomplete = True  # the preemption before it was lost
        return False
    if first:
        request.lookup, request.scheduled = event.lookup, max(event.t, event.lookup)
        if event.cached_tokens >= 0:
            request.cached_tokens = event.cached_tokens
        request.blocks = max(request.blocks, max(0, event.shared_blocks) + max(0, event.new_blocks))
    return first


def preempted(request: Request, event: Preempted) -> None:
    """It lost its place."""
    if any(known.begin == event.t and known.kind == event.kind for known in request.preemptions):
        return
    last = request.preemptions[-1] if request.preemptions else None
    if last is not None and last.resumed is None:
        # Told by its second queueing already, or twice: one preemption.
        last.begin = min(last.begin, event.t)
        last.kind, last.computed = event.kind, max(last.computed, event.computed)
    else:
        request.preemptions.append(Preemption(event.t, event.kind, max(-1, event.computed)))
    if event.generated > 0 and request.observed + request.unseen == 0:
        request.unseen = event.generated  # its tokens were before anything was heard of it
        request.incomplete = True


def finished(request: Request, event: Finished) -> None:
    """The last token is known, or none will come.

    At a stop string the front end says so first and cancels the request; the engine then only knows
    of that. The earlier instant and the more telling reason stand.
    """
    if request.finished is None or event.t < request.finished:
        request.finished = event.t
    if request.finish_reason in ("", "cancelled"):
        request.finish_reason = event.reason or request.finish_reason
    request.error = request.error or event.error
    request.final_tokens = max(request.final_tokens, event.output_tokens)
    if event.prompt_tokens >= 0:
        request.prompt_tokens = event.prompt_tokens
    if event.cached_tokens >= 0 and request.cached_tokens < 0:
        request.cached_tokens = event.cached_tokens


def released(request: Request, event: Released) -> bool:
    """Its blocks were given back. Returns whether that was news."""
    if request.released is not None:
        return False
    request.released = event.t
    request.freed, request.kept = max(-1, event.freed), max(-1, event.cached)
    return True


def sent(request: Request, event: Sent) -> None:
    """What was handed out so far."""
    request.sent_chunks = max(request.sent_chunks, event.chunks)
    request.sent_bytes = max(request.sent_bytes, event.size)
    request.sent_tokens = max(request.sent_tokens, event.tokens)
    request.sent_work = max(request.sent_work, event.work)


def output(request: Request, event: Output) -> None:
    """A piece of the output; what was lost before it is said in its place, what is known already is
    skipped."""
    text, known = event.text, request.output_chars
    if event.offset > known:
        text = f"[{event.offset - known:,} characters lost]{text}"
        request.output_chars = event.offset + len(event.text)
    else:
        text = text[known - max(0, event.offset) :]
        request.output_chars = known + len(text)
    if text and (room := TEXT_ROOM - sum(map(len, request.output))) > 0:
        request.output.append(text[:room])
        if len(request.output) > 64:
            request.output = ["".join(request.output)]


def closed(request: Request, event: Closed) -> None:
    """The response is over for the client."""
    if request.closed is None:
        request.closed = event.t
    request.status_code = max(request.status_code, event.status)
    request.sent_bytes = max(request.sent_bytes, event.size)
    request.disconnected = request.disconnected or event.disconnected


def _first(request: Request, name: str | None, t: int) -> None:
    if name is not None and getattr(request, name) is None:
        setattr(request, name, t)


def _never_ran(request: Request) -> bool:
    """Whether the engine has not worked on it yet, as far as everything was heard."""
    return not request.ran and not request.incomplete and request.queued is not None


def _last_taken(request: Request) -> int:
    """When the scheduler last took it (ns); -1 when it never did."""
    if request.preemptions and request.preemptions[-1].resumed is not None:
        return request.preemptions[-1].resumed
    return -1 if request.lookup is None else request.lookup

"""The front end seen from outside: an ASGI middleware that times a request from its first byte to
its last.

Engine-specific hooks find the request that they work for through `current` (a context variable: it
follows the task, and the tasks that it starts) or through `Fronts.by_rid`. Counters of a stream are
gathered here and emitted a few times a second.
"""

from __future__ import annotations

import contextvars
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine_hooks.base.emitter import FRONT, Emitter
from engine_hooks.base.model_name import model_name
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.stages import Stage

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REPORT_PERIOD_NS: Final = NS_PER_S // 5
"""How often the progress of one stream is emitted: often enough for text to flow on a screen."""

CLIENT_ID_LIMIT: Final = 128
"""Characters kept of an id that a client sent."""

ERRORS: Final = {"/v1/responses": b'"type":"response.failed"', "/v1/messages": b'"type":"error"'}
OTHER_ERRORS: Final = b'data: {"error"'
"""Path → bytes of a streamed chunk that reports an error: the answer started with status 200 and
cannot take that back. In a model's own text the quotes would be escaped."""

_SERVER_ERROR: Final = 500

_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields of a body that limit its output, the first one that is given."""

REQUEST_ID: Final = b"x-request-id"
TENANTS: Final = tuple(
    name.strip().lower().encode("latin-1", "replace")
    for name in os.environ.get("TRACER_TENANT_HEADER", "x-tenant-id,x-tenant").split(",")
    if name.strip()
)
"""Headers that name the tenant, the first one that is there; the body's ``user`` field does where
none is."""


@dataclass(slots=True, eq=False)
class Front:
    """A request in the front end. Used by one event loop only. `needle`: see
    `TracingMiddleware.routes`."""

    key: int
    rid: str
    needle: bytes
    route: str = ""
    streaming: int = -1
    chunks: int = 0
    size: int = 0
    tokens: int = 0
    work: int = 0
    size_in: int = 0
    status: int = -1
    started: set[Stage] = field(default_factory=set)
    """Stages whose start was emitted."""
    prompt_text: str = ""
    text: list[str] = field(default_factory=list)
    """Output that was not emitted yet."""
    text_reported: int = 0
    chunks_reported: int = 0
    reported: int = 0
    """When counters were last emitted (ns)."""
    handed_out: bool = False
    completed: bool = False
    disconnected: bool = False
    failed: bool = False


current: contextvars.ContextVar[Front | None] = contextvars.ContextVar("tracer_front", default=None)
"""The request that the running task answers."""


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a request's tenant by the first of its headers in `TENANTS`; empty without one."""
    known = list(headers)
    found = next(
        (value for wanted in TENANTS for name, value in known if name.lower() == wanted), b""
    )
    return found[:CLIENT_ID_LIMIT].decode("latin-1")


class Fronts:
    """The requests that this process's front end is answering, and what is emitted about them."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.by_rid: dict[str, Front] = {}

    def open(self, rid: str, needle: bytes, received: events.Received) -> Front:
        """Register request `rid`, whose first byte is here, and emit `received` with its key."""
        received.key = self.emitter.hold(rid, FRONT)
        front = Front(received.key, rid, needle, received.route, received.streaming)
        self.by_rid[rid] = front
        self.emitter.emit_lifecycle(received)
        return front

    def parsed(self, front: Front, given: Callable[[str], Any], *, streaming: bool) -> None:
        """Emit the end of stage 1 and what the body asks for. `given` returns a field of the body,
        None where it has none."""
        at = now()
        front.streaming = int(streaming)
        limit = next((value for name in _LIMITS if isinstance(value := given(name), int)), -1)
        messages = given("messages")
        self.emitter.emit_lifecycle(events.End(at, front.key, Stage.RECEIVE, front.size_in))
        asked = events.Params(at, front.key, front.streaming, str(given("user") or "")[:128])
        asked.model = model_name(given("model"))
        asked.max_tokens = limit
        asked.messages = len(messages) if isinstance(messages, list) else -1
        asked.logprobs = int(bool(given("logprobs")))
        self.emitter.emit_lifecycle(asked)

    def start(self, front: Front | None, stage: Stage, at: int) -> Front | None:
        """Emit that `stage` starts and return the request; None if it has started before."""
        if front is None or stage in front.started:
            return None
        front.started.add(stage)
        self.emitter.emit_lifecycle(events.Begin(at, front.key, stage))
        return front

    def tokenised(self, front: Front, at: int, ids: Sequence[int]) -> None:
        """Emit the end of stage 3 and the prompt, whose text is `front.prompt_text`."""
        text, front.prompt_text = front.prompt_text, ""
        self.emitter.emit_lifecycle(events.End(at, front.key, Stage.TOKENISE, len(ids)))
        self.emitter.prompt(at, front.key, text, ids)

    def report(self, front: Front, at: int, *, force: bool = False) -> None:
        """Emit the counters and the new output text, if it is time."""
        if not force and at - front.reported < REPORT_PERIOD_NS:
            return
        front.reported = at
        emit = self.emitter.emit
        if front.chunks != front.chunks_reported:
            front.chunks_reported = front.chunks
            emit(events.Sent(at, front.key, front.chunks, front.size, front.tokens, front.work))
        if front.text:
            text = "".join(front.text)
            front.text.clear()
            emit(events.Output(at, front.key, front.text_reported, text))
            front.text_reported += len(text)

    def handed_out(self, front: Front, at: int) -> None:
        """Emit the end of stage 10: the first output bytes are with the socket."""
        front.handed_out = True
        self.emitter.emit_lifecycle(events.End(at, front.key, Stage.STREAM, front.size))

    def failed(self, front: Front, at: int, error: str) -> None:
        front.failed = True
        self.emitter.emit_lifecycle(events.Finished(at, front.key, "failed", -1, error))

    def close(self, front: Front, at: int) -> None:
        self.report(front, at, force=True)
        self.emitter.emit_lifecycle(
            events.Closed(at, front.key, front.status, front.size, front.disconnected)
        )
        self.forget(front)

    def forget(self, front: Front) -> None:
        self.by_rid.pop(front.rid, None)
        self.emitter.drop(front.rid, FRONT)


class TracingMiddleware:
    """Outermost ASGI middleware. `routes`: path → bytes that stand in a streamed chunk if it
    carries output text (a chunk with the role alone is no first token). POST requests to these
    paths are traced, all else passes through.

    An engine that dies when two live requests carry the same client id gets a fresh one for the
    second; the client is answered with its own.
    """

    def __init__(self, app: App, fronts: Fronts, routes: Mapping[str, bytes]) -> None:
        self.app = app
        self.fronts = fronts
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http_post = scope["type"] == "http" and scope.get("method") == "POST"
        if not http_post or scope.get("path") not in self.routes:
            await self.app(scope, receive, send)
            return
        try:
            front, scope, client_header = self._open(scope)
        except Exception as error:
            self._fault("open", error)
            await self.app(scope, receive, send)
            return
        token = current.set(front)
        try:
            await self.app(
                scope, self._receive(front, receive), self._send(front, send, client_header)
            )
        except Exception as error:
            self._guarded("raised", self._raised, front, error)
            raise
        finally:
            current.reset(token)
            self._guarded("close", self.fronts.close, front, now())

    def _open(self, scope: Scope) -> tuple[Front, Scope, bytes | None]:
        """(front, scope with an id unique here, header value to answer with when ours differs)."""
        at, path, headers = now(), str(scope["path"]), list(scope["headers"])
        sent = next((value for name, value in headers if name.lower() == REQUEST_ID), b"")
        client_id = sent.decode("latin-1")
        received = events.Received(at, 0, client_id, path, client_id[:CLIENT_ID_LIMIT])
        received.tenant = tenant_of(headers)
        rid, scope, answer = self.identify(received, scope)
        return self.fronts.open(rid, self.routes[path], received), scope, answer

    def identify(self, received: events.Received, scope: Scope) -> tuple[str, Scope, bytes | None]:
        """Choose the request's id, unique here: (id, scope that carries it, header value to answer
        with when the client's differs). `received.rid` is the client's and becomes the chosen
        one."""
        rid = received.rid
        if rid and not self.fronts.emitter.known(rid):
            return rid, scope, None
        received.rid = uuid.uuid4().hex
        headers = [pair for pair in scope["headers"] if pair[0].lower() != REQUEST_ID]
        headers.append((REQUEST_ID, received.rid.encode()))
        return received.rid, {**scope, "headers": headers}, rid.encode("latin-1") or None

    def carries(self, front: Front, body: bytes) -> bool:
        """True when a streamed chunk carries output."""
        return front.needle in body

    def _hands_out(self, front: Front, body: bytes) -> bool:
        """True when `body`, which is about to be sent, hands out the first token. An error is no
        token, and nothing is handed out to a client that has gone."""
        streamed = front.streaming == 1
        if streamed and not front.failed and ERRORS.get(front.route, OTHER_ERRORS) in body:
            self.fronts.failed(front, now(), "the answer broke off with an error")
        if front.handed_out or not body or front.status >= 400:
            return False
        if front.failed or front.disconnected:
            return False
        return self.carries(front, body) if streamed else True

    def _raised(self, front: Front, error: Exception) -> None:
        """Note that the application raised. If it had sent nothing, the server outside of us
        answers with status 500. The error's own words stay with the engine's log: they may quote
        the request."""
        if front.status < 0:
            front.status = _SERVER_ERROR
        if not front.disconnected and not front.failed:
            self.fronts.failed(front, now(), f"the application raised {type(error).__name__}")

    def _guarded(self, place: str, ours: Callable[..., None], *args: Any) -> None:
        try:
            ours(*args)
        except Exception as error:
            self._fault(place, error)

    def _fault(self, place: str, error: Exception) -> None:
        self.fronts.emitter.fault(f"http:{place}", f"{type(error).__name__}: {error}", 1, False)

    def _receive(self, front: Front, receive: Receive) -> Receive:
        async def traced() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                # Asked for after the end too, where it says nothing. Before it, the server will
                # still send an empty last message into the void: that completes nothing.
                front.disconnected = front.disconnected or not front.completed
            elif message["type"] == "http.request" and not front.completed:
                front.size_in += len(message.get("body", b""))
            return message

        return traced

    def _send(self, front: Front, send: Send, client_header: bytes | None) -> Send:
        fronts = self.fronts

        async def traced(message: Message) -> None:
            kind = message["type"]
            if kind == "http.response.start":
                self._guarded("start", self._answering, front, message)
                if client_header is not None:
                    kept = (
                        pair for pair in message.get("headers", ()) if pair[0].lower() != REQUEST_ID
                    )
                    message = {**message, "headers": [*kept, (REQUEST_ID, client_header)]}
            if kind != "http.response.body":
                await send(message)
                return
            body = message.get("body", b"")
            carries = False
            try:
                carries = self._hands_out(front, bytes(body))
            except Exception as error:
                self._fault("body", error)
            sending = now()
            await send(message)
            at = now()
            front.chunks += 1
            front.size += len(body)
            front.work += at - sending
            if carries:
                fronts.handed_out(front, at)
            if not message.get("more_body", False):
                front.completed = True
            fronts.report(front, at)

        return traced

    def _answering(self, front: Front, message: Message) -> None:
        """Note the response's head. Streaming by its own word outweighs what was asked for: a route
        may stream unasked."""
        streaming = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )
        front.status = int(message["status"])
        asked, front.streaming = front.streaming, int(streaming)
        if asked != front.streaming and front.status < 400:
            params = events.Params(now(), front.key, front.streaming)
            self.fronts.emitter.emit_lifecycle(params)

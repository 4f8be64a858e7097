"""The front end seen from outside: an ASGI middleware that times a request from its first byte to
its last.

Engine-specific hooks find the request that they work for through `current` (a context variable: it
follows the task, and the tasks that it starts) or through `Fronts.by_rid`. Counters of a stream are
gathered here and told a few times a second.
"""

from __future__ import annotations

import contextvars
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

from engine_hooks.base.emitter import FRONT, Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.stages import Stage

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TELL_PERIOD_NS: Final = NS_PER_S // 5
"""How often the progress of one stream is told: often enough for text to flow on a screen."""

CLIENT_ID_LIMIT: Final = 128
"""Characters kept of an id that a client sent."""

ERRORS: Final = {"/v1/responses": b'"type":"response.failed"', "/v1/messages": b'"type":"error"'}
OTHER_ERRORS: Final = b'data: {"error"'
"""Path → what stands in a streamed chunk that tells an error: the answer began with status 200 and
cannot take that back. In a model's own text the quotes would be escaped."""

_SERVER_ERROR: Final = 500

REQUEST_ID: Final = b"x-request-id"
TENANTS: Final = tuple(
    name.strip().lower().encode("latin-1", "replace")
    for name in os.environ.get("TRACER_TENANT_HEADER", "x-tenant-id,x-tenant").split(",")
    if name.strip()
)
"""Headers that name the tenant, the first one that is there; the body's ``user`` field does where
none is."""


class Front:
    """A request in the front end. Used by one event loop only."""

    __slots__ = (
        "key",
        "rid",
        "needle",
        "streaming",
        "chunks",
        "size",
        "tokens",
        "work",
        "told",
        "told_chunks",
        "text",
        "text_told",
        "handed_out",
        "status",
        "completed",
        "disconnected",
        "failed",
        "templated",
        "tokenised",
        "prompt_text",
        "size_in",
        "route",
    )

    def __init__(self, key: int, rid: str, needle: bytes, route: str = "") -> None:
        self.needle = needle
        self.route = route
        self.key = key
        self.rid = rid
        self.size_in = 0
        self.streaming = -1
        self.chunks = self.size = self.tokens = self.work = 0
        self.told = 0
        self.told_chunks = 0
        self.text: list[str] = []
        self.text_told = 0
        self.handed_out = False
        self.status = -1
        self.completed = False
        self.disconnected = False
        self.failed = False
        self.templated = False
        self.tokenised = False
        self.prompt_text = ""


current: contextvars.ContextVar[Front | None] = contextvars.ContextVar("tracer_front", default=None)
"""The request that the running task answers."""


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Who a request is for, by the first of `TENANTS` that is among its headers; empty where none
    is."""
    known = list(headers)
    found = next(
        (value for wanted in TENANTS for name, value in known if name.lower() == wanted), b""
    )
    return found[:CLIENT_ID_LIMIT].decode("latin-1")


class Fronts:
    """The requests that this process's front end is answering, and what is told about them."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.by_rid: dict[str, Front] = {}

    def open(
        self, rid: str, route: str, client_id: str, needle: bytes, at: int, tenant: str = ""
    ) -> Front:
        """A request's first byte is here. `needle`: see `TracingMiddleware.routes`."""
        front = Front(self.emitter.hold(rid, FRONT), rid, needle, route)
        self.by_rid[rid] = front
        self.emitter.emit_lifecycle(events.Received(at, front.key, rid, route, client_id, tenant))
        return front

    def tell(self, front: Front, at: int, *, force: bool = False) -> None:
        """Tell the counters and the new output text, if it is time."""
        if not force and at - front.told < TELL_PERIOD_NS:
            return
        front.told = at
        if front.chunks != front.told_chunks:
            front.told_chunks = front.chunks
            self.emitter.emit(
                events.Sent(at, front.key, front.chunks, front.size, front.tokens, front.work)
            )
        if front.text:
            text = "".join(front.text)
            front.text.clear()
            self.emitter.emit(events.Output(at, front.key, front.text_told, text))
            front.text_told += len(text)

    def handed_out(self, front: Front, at: int) -> None:
        """The first output bytes are with the socket: stage 10 ends."""
        front.handed_out = True
        self.emitter.emit_lifecycle(events.End(at, front.key, Stage.STREAM, front.size))

    def answering(self, front: Front, status: int, streaming: bool) -> None:
        """The response's head is here: its status, and whether it is streamed. Its own word
        outweighs what was asked for: what a route does unasked is the server's to choose."""
        front.status = status
        told, front.streaming = front.streaming, int(streaming)
        if told != front.streaming and status < 400:
            self.emitter.emit_lifecycle(events.Params(now(), front.key, front.streaming))

    def failed(self, front: Front, at: int, error: str) -> None:
        """The answer breaks off."""
        front.failed = True
        self.emitter.emit_lifecycle(events.Finished(at, front.key, "failed", -1, error))

    def close(self, front: Front, at: int) -> None:
        """The response is over."""
        self.tell(front, at, force=True)
        self.emitter.emit_lifecycle(
            events.Closed(at, front.key, front.status, front.size, front.disconnected)
        )
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
        if (
            scope["type"] != "http"
            or scope.get("method") != "POST"
            or scope.get("path") not in self.routes
        ):
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
            self._raised(front, error)
            raise
        finally:
            current.reset(token)
            self._close(front)

    def _open(self, scope: Scope) -> tuple[Front, Scope, bytes | None]:
        """(front, scope with an id that is unique here, header value to answer with when ours
        differs)."""
        at = now()
        headers = list(scope["headers"])
        sent = next((value for name, value in headers if name.lower() == REQUEST_ID), None)
        client_id = sent.decode("latin-1")[:CLIENT_ID_LIMIT] if sent else ""
        rid = sent.decode("latin-1") if sent else ""
        answer = None
        if not rid or self.fronts.emitter.known(rid):
            answer = sent
            rid = uuid.uuid4().hex
            headers = [pair for pair in headers if pair[0].lower() != REQUEST_ID]
            headers.append((REQUEST_ID, rid.encode()))
            scope = {**scope, "headers": headers}
        path = str(scope["path"])
        front = self.fronts.open(rid, path, client_id, self.routes[path], at, tenant_of(headers))
        return front, scope, answer

    def carries(self, front: Front, body: bytes) -> bool:
        """Whether a streamed chunk carries output."""
        return front.needle in body

    def _look(self, front: Front, body: bytes) -> bool:
        """Look at what is about to be sent; whether it hands out the first token. An error is no
        token, and nothing is handed out to a client that has gone."""
        streamed = front.streaming == 1
        if streamed and not front.failed and ERRORS.get(front.route, OTHER_ERRORS) in body:
            self.fronts.failed(front, now(), "the answer broke off with an error")
        if (
            front.handed_out
            or not body
            or front.status >= 400
            or front.failed
            or front.disconnected
        ):
            return False
        return self.carries(front, body) if streamed else True

    def _raised(self, front: Front, error: Exception) -> None:
        """The application raised. If it had sent nothing, the server outside of us answers with
        status 500. The error's own words stay with the engine's log: they may quote the request."""
        try:
            if front.status < 0:
                front.status = _SERVER_ERROR
            if not front.disconnected and not front.failed:
                self.fronts.failed(front, now(), f"the application raised {type(error).__name__}")
        except Exception as own:
            self._fault("raised", own)

    def _close(self, front: Front) -> None:
        try:
            self.fronts.close(front, now())
        except Exception as error:
            self._fault("close", error)

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
                try:
                    fronts.answering(
                        front, int(message["status"]), _is_event_stream(message.get("headers", ()))
                    )
                except Exception as error:
                    self._fault("start", error)
                if client_header is not None:
                    headers = [
                        pair for pair in message.get("headers", ()) if pair[0].lower() != REQUEST_ID
                    ]
                    message = {**message, "headers": [*headers, (REQUEST_ID, client_header)]}
                await send(message)
                return
            if kind != "http.response.body":
                await send(message)
                return
            body = message.get("body", b"")
            size = len(body)
            carries = False
            try:
                carries = self._look(front, bytes(body))
            except Exception as error:
                self._fault("body", error)
            begin = now()
            await send(message)
            at = now()
            front.chunks += 1
            front.size += size
            front.work += at - begin
            if carries:
                fronts.handed_out(front, at)
            if not message.get("more_body", False):
                front.completed = True
            fronts.tell(front, at)

        return traced


def _is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a response is streamed, by its content type."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )

"""Who asks vLLM's front end for what: requests of clients and callers, and the engine's requests
that answer them."""

from __future__ import annotations

import uuid
from typing import Final

from engine_hooks.base.emitter import FRONT, Emitter
from engine_hooks.base.http import Front, Fronts
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now

_COMPLETIONS: Final = "/v1/completions"
ROUTES: Final = {
    "/v1/chat/completions": b'"content":"',
    _COMPLETIONS: b'"text":"',
    "/v1/responses": b'.delta"',
    "/v1/messages": b'_delta"',
}
"""Path → what stands in a streamed chunk that carries output (see `http.TracingMiddleware`)."""


class Answer:
    """One engine request that a front end waits for. `rid` is the engine's id; `first` whether it
    is the one that stands for the front end's request (``n > 1`` and lists of prompts make
    several)."""

    __slots__ = ("chars", "first", "front", "offline", "rid")

    def __init__(self, front: Front, rid: str, first: bool, offline: bool) -> None:
        self.front = front
        self.rid = rid
        self.first = first
        self.offline = offline
        self.chars = 0


class VllmFronts(Fronts):
    """The requests of this process's front end, and the engine's ids for them."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter)
        self.answers: dict[str, Answer] = {}
        self._of: dict[int, list[Answer]] = {}
        self.handed: dict[int, int] = {}
        """Number of a request → when it was handed to the engine's client (ns)."""

    def open(
        self, rid: str, route: str, client_id: str, needle: bytes, at: int, tenant: str = ""
    ) -> Front:
        """As in `Fronts`, but the id is told later: it is the engine's to choose."""
        front = Front(self.emitter.hold(rid, FRONT), rid, needle, route)
        self.by_rid[rid] = front
        self.emitter.emit_lifecycle(events.Received(at, front.key, "", route, client_id, tenant))
        return front

    def open_offline(self, route: str, at: int, streaming: int) -> Front:
        """A request without a socket: an API of this process was called at `at`."""
        rid = uuid.uuid4().hex
        front = Front(self.emitter.hold(rid, FRONT), rid, b"")
        front.streaming = streaming
        self.by_rid[rid] = front
        self.emitter.emit_lifecycle(
            events.Received(at, front.key, "", route, "", "", streaming, True)
        )
        return front

    def add(self, front: Front, rid: str, external: str, *, offline: bool) -> Answer:
        """The engine's client was given `rid` to answer `front`, whose caller knows it as
        `external`."""
        others = self._of.setdefault(front.key, [])
        answer = Answer(front, rid, not others, offline)
        others.append(answer)
        self.answers[rid] = answer
        if answer.first:
            self.emitter.alias(front.rid, rid)
            at = now()
            if front.needle == ROUTES[_COMPLETIONS]:
                # The engine's ids count the prompts of one call, its answer names the call.
                self.emitter.emit_lifecycle(
                    events.Alias(at, front.key, external.removesuffix("-0"))
                )
            if external:
                self.emitter.emit_lifecycle(events.Alias(at, front.key, external))
            self.emitter.emit_lifecycle(events.Alias(at, front.key, rid))
        return answer

    def close(self, front: Front, at: int) -> None:
        """The response is over."""
        super().close(front, at)
        self._forget(front)

    def close_offline(self, front: Front, at: int) -> None:
        """The caller has all of it. The engine tells when its blocks are back, which ends it."""
        self.tell(front, at, force=True)
        self.by_rid.pop(front.rid, None)
        self.emitter.drop(front.rid, FRONT)
        self._forget(front)

    def _forget(self, front: Front) -> None:
        self.handed.pop(front.key, None)
        for answer in self._of.pop(front.key, ()):
            self.answers.pop(answer.rid, None)
            self.emitter.drop(answer.rid, FRONT)

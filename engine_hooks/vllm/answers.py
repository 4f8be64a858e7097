"""The requests of clients and callers of vLLM's front end, and the engine's requests that answer
them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
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
"""Path → bytes of a streamed chunk that carries output (see `http.TracingMiddleware`)."""


@dataclass(slots=True, eq=False)
class Answer:
    """One engine request that a front end waits for. `rid` is the engine's id; `first`: true for
    the one that stands for the front end's request (``n > 1`` and lists of prompts make
    several)."""

    front: Front
    rid: str
    first: bool
    offline: bool
    chars: int = 0


class VllmFronts(Fronts):
    """The requests of this process's front end, and the engine's ids for them."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter)
        self.answers: dict[str, Answer] = {}
        self._of: dict[int, list[Answer]] = {}
        self.handed: dict[int, int] = {}
        """Key of a request → when it was handed to the engine's client (ns)."""

    def open_offline(self, route: str, at: int, streaming: int) -> Front:
        """Open a request without a socket: an API of this process was called at `at`."""
        received = events.Received(at, 0, "", route, streaming=streaming, offline=True)
        return self.open(uuid.uuid4().hex, b"", received)

    def add(self, front: Front, rid: str, external: str) -> Answer:
        """Note that the engine's client answers `front`, known outside as `external`, by `rid`."""
        others = self._of.setdefault(front.key, [])
        answer = Answer(front, rid, first=not others, offline=not front.needle)
        others.append(answer)
        self.answers[rid] = answer
        if answer.first:
            self.emitter.alias(front.rid, rid)
            names = [external, rid]
            if front.route == _COMPLETIONS:
                # The engine's ids count the prompts of one call, its answer names the call.
                names.insert(0, external.removesuffix("-0"))
            at = now()
            for name in filter(None, names):
                self.emitter.emit_lifecycle(events.Alias(at, front.key, name))
        return answer

    def close_offline(self, front: Front, at: int) -> None:
        """Emit the last output to a caller. The end comes from the engine, once blocks are back."""
        self.report(front, at, force=True)
        self.forget(front)

    def forget(self, front: Front) -> None:
        super().forget(front)
        self.handed.pop(front.key, None)
        for answer in self._of.pop(front.key, ()):
            self.answers.pop(answer.rid, None)
            self.emitter.drop(answer.rid, FRONT)

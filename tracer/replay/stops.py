"""Where a player stops when it is sent to the next event, step, token or stage.

A stop is asked before and after each thing that is taken in; the second answer says whether it was
reached.
"""

from __future__ import annotations

from typing import Final, Protocol

from engine_hooks.protocol.events import Event, Heartbeat, Step
from tracer.replay.cursor import Item
from tracer.state.request.request import Request
from tracer.state.snapshot import phase_of
from tracer.state.trace_state import TraceState

_MILESTONES: Final = (
    "received",
    "receive_end",
    "template_begin",
    "template_end",
    "tokenise_begin",
    "tokenise_end",
    "admission_begin",
    "stream_end",
    "closed",
    "queued",
    "lookup",
    "scheduled",
    "first_token",
    "finished",
    "released",
)


class Stop(Protocol):
    """Something to come to."""

    def before(self, state: TraceState, item: Item) -> None:
        """`item` is about to be taken in."""

    def reached(self, state: TraceState, item: Item) -> bool:
        """`item` was taken in: is this where to stop?"""


class NextEvent:
    """The next event; a sign of life is none. `kind`: of this type only."""

    def __init__(self, kind: type[Event] | None = None) -> None:
        self._kind = kind

    def before(self, state: TraceState, item: Item) -> None:
        """Nothing to remember."""

    def reached(self, state: TraceState, item: Item) -> bool:
        """Whether it is one."""
        found = type(item.event)
        return (
            found is self._kind if self._kind is not None else found not in (type(None), Heartbeat)
        )


class NextToken:
    """The next output token of a request, by its id, or of any."""

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id
        self._before = 0

    def before(self, state: TraceState, item: Item) -> None:
        """Count tokens."""
        self._before = self._count(state)

    def reached(self, state: TraceState, item: Item) -> bool:
        """Whether there are more."""
        return self._count(state) > self._before

    def _count(self, state: TraceState) -> int:
        if self._request_id is None:
            return sum(source.batch.produced for source in state.sources.values())
        request = state.requests.find(self._request_id)
        return 0 if request is None else request.output_tokens


class NextStage:
    """Where a request, by its id, or any, enters or leaves a stage."""

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id
        self._before: dict[int, tuple[object, ...]] = {}

    def before(self, state: TraceState, item: Item) -> None:
        """Note where the requests are that the event can be about."""
        self._before = {request.serial: _stages(request) for request in self._about(state, item)}

    def reached(self, state: TraceState, item: Item) -> bool:
        """Whether one of them is elsewhere."""
        return any(
            self._before.get(request.serial) != _stages(request)
            for request in self._about(state, item)
        )

    def _about(self, state: TraceState, item: Item) -> list[Request]:
        if self._request_id is not None:
            request = state.requests.find(self._request_id)
            return [] if request is None else [request]
        key = getattr(item.event, "key", None)
        if key is not None:
            request = state.requests.get(item.source, key)
            return [] if request is None else [request]
        if type(item.event) is Step:  # which can begin a prefill or bring a first token
            return [
                request for request in state.requests.live.values()
                if request.first_token is None or request.serial in self._before
            ]  # fmt: skip
        return []


def _stages(request: Request) -> tuple[object, ...]:
    """Changes whenever the request enters or leaves a stage."""
    known = [getattr(request, name) is not None for name in _MILESTONES]
    return (
        *known,
        phase_of(request),
        bool(request.passes),
        len(request.preemptions),
        request.preempted,
    )

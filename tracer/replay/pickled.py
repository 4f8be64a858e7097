"""A fold as bytes, and back: what a snapshot of a trace file holds.

Requests and steps make up nearly all of a fold, and most of them are in many snapshots: a step is
never changed in place, and a request that was over for a while hardly ever. Each such part is
written once, numbered, and a snapshot refers to it. `Writer` makes them.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import gc
import io
import pickle
from array import array
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from engine_hooks.protocol.events import Step
from tracer.state.engine.steps import Batch
from tracer.state.request.request import Pass, Request, Settled, Span
from tracer.state.trace_state import TraceState

_NAMES: Final = tuple(field.name for field in dataclasses.fields(Request))
_BATCH, _SETTLED = _NAMES.index("batch"), _NAMES.index("settled")
_values: Final = attrgetter(*_NAMES)
_decoder: Final = msgspec.msgpack.Decoder(list[Step])


STEPS_KNOWN: Final = 16_384
"""Steps of a source that may still be referred to: those of its history, and before it those that
ran a prompt."""


class Pickled(NamedTuple):
    """A snapshot as bytes: the `state`, and the shared parts that no snapshot before it had:
    so many `steps` from number `first_step` on, and `requests` from number `first_request` on."""

    state: bytes
    steps: bytes
    requests: bytes
    first_step: int
    count_steps: int
    first_request: int
    count_requests: int


class _Known(NamedTuple):
    """A shared part: its number, and what it was like when it got it. Held here, so that its
    identity stays its own."""

    number: int
    part: Any
    was: tuple[Any, ...] = ()


class Writer:
    """Makes the snapshots of one fold, one after the other."""

    def __init__(self, next_step: int = 0, next_request: int = 0) -> None:
        self._next_step, self._next_request = next_step, next_request
        self._reached: dict[str, int] = {}
        """Index of the newest step that has a number, by source."""
        self._steps: dict[int, _Known] = {}
        self._requests: dict[int, _Known] = {}
        """Both by identity, oldest first."""
        self._new_steps: list[Step] = []
        self._new_requests: list[Request] = []

    def _number(self, state: TraceState) -> None:
        """Number the parts that are new."""
        self._new_steps, self._new_requests = [], []
        for name, source in state.sources.items():
            history = source.batch.history
            first = max(self._reached.get(name, -1) + 1, history.base)
            for step in history.steps[first - history.base :]:
                self._steps[id(step)] = _Known(self._next_step, step)
                self._next_step += 1
                self._new_steps.append(step)
            self._reached[name] = history.last_index
        while len(self._steps) > STEPS_KNOWN * max(1, len(state.sources)):
            del self._steps[next(iter(self._steps))]
        known, self._requests = self._requests, {}
        for request in state.requests.over.values():
            if not request.in_totals or not request.detached:
                continue
            was = _was(request)
            one = known.get(id(request))
            if one is None or one.was != was:
                one = _Known(self._next_request, request, was)
                self._next_request += 1
                self._new_requests.append(request)
            self._requests[id(request)] = one

    def write(self, state: TraceState) -> Pickled:
        """Return a snapshot. It can be read when those before it can."""
        self._number(state)
        steps, requests = self._new_steps, self._new_requests
        table = {
            **copyreg.dispatch_table,
            Pass: lambda one: (Pass, tuple(one)),
            Span: lambda one: (Span, tuple(one)),
            Step: self._reduced_step,
        }
        return Pickled(
            _dump(state, {**table, Request: self._reduced}),
            msgspec.msgpack.encode(steps),
            _dump([_plain(request) for request in requests], table),
            self._next_step - len(steps),
            len(steps),
            self._next_request - len(requests),
            len(requests),
        )

    def _reduced_step(self, step: Step) -> Any:
        known = self._steps.get(id(step))
        return step.__reduce__() if known is None else (_step, (known.number,))

    def _reduced(self, request: Request) -> tuple[Any, ...]:
        # Its batch refers to it in turn, so it is set when the request is there.
        batch, known = request.batch, self._requests.get(id(request))
        if known is not None:
            return _request_numbered, (known.number,), batch, None, None, _set_batch
        return _request, (_plain(request),), batch, None, None, _set_batch


StepOf = Callable[[int], Step]
"""Gives the step of a number."""


def read_state(data: bytes, step: StepOf, request: Callable[[int], list[Any]]) -> TraceState:
    """Return the fold in `Pickled.state`. `request` gives the values of the request of a number,
    new ones at each call."""
    own = {
        _step.__name__: step,
        _request_numbered.__name__: lambda number: _request(request(number)),
    }
    with collections_paused():
        found: TraceState = _Unpickler(io.BytesIO(data), own).load()
    return found


def read_requests(data: bytes, step: StepOf) -> list[list[Any]]:
    """Return the values of the requests in `Pickled.requests`, new ones at each call."""
    found: list[list[Any]] = _Unpickler(io.BytesIO(data), {_step.__name__: step}).load()
    return found


def read_steps(data: bytes) -> list[Step]:
    """Return the steps in `Pickled.steps`."""
    return _decoder.decode(data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, own: dict[str, Callable[[int], Any]]) -> None:
        super().__init__(file)
        self._own = own

    def find_class(self, module: str, name: str) -> Any:
        return self._own.get(name) or super().find_class(module, name)


def _dump(value: object, table: dict[type, Any]) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = table
    pickler.dump(value)
    return file.getvalue()


def _was(request: Request) -> tuple[Any, ...]:
    """What changes when a request that was over for a while does."""
    return (
        request.version, request.outputs, request.incomplete, request.counted,
        request.prompt_text is None, len(request.settled.times),
    )  # fmt: skip


def _plain(request: Request) -> list[Any]:
    values = list(_values(request))
    one: Settled = values[_SETTLED]
    values[_BATCH], values[_SETTLED] = None, (
        one.count, one.last, one.times.tobytes(), one.batches.tobytes(), one.parts,
        one.step, one.token, one.end,
    )  # fmt: skip
    return values


def _request(values: list[Any]) -> Request:
    count, last, times, batches, *rest = values[_SETTLED]
    values[_SETTLED] = Settled(count, last, array("q", times), array("I", batches), *rest)
    return Request(*values)


def _set_batch(request: Request, batch: Batch) -> None:
    request.batch = batch


def _step(number: int) -> Step:
    """Stands in a pickle for the step of this number."""
    raise LookupError(f"step {number}")


def _request_numbered(number: int) -> Request:
    """Stands in a pickle for the request of this number."""
    raise LookupError(f"request {number}")


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Keep the garbage collector from walking a state in the making again and again: nothing in it
    is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

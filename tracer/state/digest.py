"""A hash of the whole state: what proves that a replay gives what was seen live."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from tracer.state.request.request import Pass, Request, Settled

if TYPE_CHECKING:
    from tracer.state.fold import Fold

_NOT_STATE: Final = frozenset({"version", "outputs", "batch"})
_FIELDS: Final = tuple(
    field.name for field in dataclasses.fields(Request) if field.name not in _NOT_STATE
)


def of(state: Fold) -> str:
    """Hex digest over everything that events told: requests, steps, gauges, timers, losses. Caches
    are not in it."""
    digest = hashlib.blake2b(digest_size=16)

    def add(*values: Any) -> None:
        digest.update(repr(values).encode("utf-8", "backslashreplace"))

    add(state.now, state.began, state.unknown, state.received_total)
    for request in state.requests.order:
        add(*(_plain(getattr(request, name)) for name in _FIELDS))
    add(state.requests.finished_total, state.requests.dropped_incomplete, list(state.requests.live))
    for name, source in sorted(state.sources.items()):
        batch, history = source.batch, source.batch.history
        add(
            name,
            source.header,
            source.engine,
            source.status,
            source.reason,
            source.gone,
            source.missing,
        )
        add(
            sorted(source.coverage.items()),
            sorted(source.faults.items()),
            source.beat,
            source.beat_before,
        )
        add(source.stamps.set_aside, source.stamps.held)
        add(
            source.preempted,
            source.evicted,
            source.blocks.bytes(None),
            source.blocks.cached_since(),
        )
        add(source.given_back)
        add(batch.count, batch.produced, batch.expected)
        add(
            [(key, request.serial) for key, request in sorted(batch.members.items())],
            sorted(batch.doubtful),
        )
        add(history.base, bytes(history.tokens), bytes(history.sizes), bytes(history.prefills))
        for step in history.steps:
            digest.update(msgspec.msgpack.encode(step))
    add(_plain(state.counters.entries()))
    add(*state.totals.entries())
    for log in (state.received, state.scheduled, state.produced):
        add(log.entries())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A part of the state as something whose repr tells it all."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, Settled):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(Settled)]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in sorted(value.items())]
    if isinstance(value, Pass):
        return (
            value.step if isinstance(value.step, int) else value.step.n,
            value.scheduled,
            value.produced,
        )
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value

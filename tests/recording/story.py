"""Recorded traces for tests: simulated engines written through a `Recorder`, and what a live viewer
saw of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine_hooks.protocol.block_maker import known_at, without_text
from engine_hooks.protocol.events import AnyEvent, Event, Header, Heartbeat
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.state.traces import Trace, simulate
from tracer.recording import event_columns
from tracer.state.trace_state import TraceState

MS, S = 1_000_000, 1_000_000_000


def deliveries(trace: Trace, size: int = 20) -> list[Delivery]:
    """A simulated trace as a bus hands it out: the sources, then up to `size` events of one source
    at a time."""
    told = [Delivery(header.source, header) for header in trace.headers]
    for source, event in plain(trace.events):
        if told[-1].source != source or told[-1].header is not None or len(told[-1].events) >= size:
            told.append(Delivery(source, None, []))
        told[-1].events.append(event)
    return told


def plain(events: Iterable[tuple[str, Event]]) -> Iterator[tuple[str, Event]]:
    """Events as they come out of a socket: what a hook put in as an enum is a number."""
    for source, event in events:
        yield source, msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent)


def some(seed: int = 1, **options: Any) -> list[Delivery]:
    """Deliveries of a small trace of two processes."""
    options = {"requests": 30, "split": True, "output": 60, **options}
    return deliveries(simulate(seed, **options))


def record(
    path: Path, told: Sequence[Delivery], *, with_text: bool = True, block_ns: int = 200 * MS
) -> Recorder:
    """Write deliveries to a file, in blocks of `block_ns` of the trace."""
    recorder = Recorder(
        path, with_text=with_text, encode=event_columns.encode, now=Clock(), overwrite=True
    )
    began = None
    for delivery in told:
        if delivery.events:
            began = delivery.events[0].t if began is None else began
            if delivery.events[-1].t - began > block_ns:
                recorder.flush()
                began = delivery.events[0].t
        recorder.write(delivery)
    recorder.close()
    assert not recorder.error
    return recorder


class Clock:
    """A clock that only goes when told."""

    def __init__(self, t: int = 0) -> None:
        self.t = t

    def __call__(self) -> int:
        return self.t


def fold(told: Iterable[Delivery], state: TraceState | None = None) -> TraceState:
    """What a live viewer's state is after these deliveries."""
    state = TraceState() if state is None else state
    for delivery in told:
        state.feed(delivery)
    return state


def states(told: Sequence[Delivery], *, with_text: bool = True) -> list[tuple[int, int, str]]:
    """(instant, until, digest) of the states that a live viewer had, each from the instant at which
    all its events were known until the next event was known (ns)."""
    state = TraceState()
    seen: list[tuple[int, str]] = []
    due = 0
    for delivery in told:
        if delivery.header is not None:
            state.add_source(delivery.header)
        for event in delivery.events if with_text else without_text(delivery.events):
            at = max(due, known_at(event))
            if due and at > due:
                seen.append((due, state.digest()))
            due = at
            state.apply(delivery.source, event)
    seen.append((due, state.digest()))
    return [
        (t, then, digest)
        for (t, digest), (then, _) in zip(seen, [*seen[1:], (due + S, "")], strict=True)
    ]


def header_of(told: Sequence[Delivery]) -> Header:
    """The first source."""
    return next(delivery.header for delivery in told if delivery.header is not None)


def beats(source: str, begin: int, seconds: int) -> list[Delivery]:
    """Signs of life, one a second."""
    return [Delivery(source, None, [Heartbeat(begin + n * S)]) for n in range(seconds)]

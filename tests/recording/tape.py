"""A trace in parts with a snapshot of the fold after each, as the process makes them that folds a
file."""

from __future__ import annotations

import random
from typing import Any

from engine_hooks.protocol.events import Event, Header, Step
from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import fold
from tracer.replay.pickled import Pickled, Writer, read_requests, read_state, read_steps
from tracer.state.trace_state import TraceState


class Tape:
    """`live` is the fold of all `parts`; `digests` are those of the fold after each."""

    def __init__(self, parts: list[list[Delivery]], live: TraceState | None = None) -> None:
        self.parts = parts
        self.live = TraceState() if live is None else live
        self.digests: list[str] = []
        self._snapshots: list[Pickled] = []
        writer = Writer()
        for part in parts:
            fold(part, self.live)
            self._snapshots.append(writer.write(self.live))
            self.digests.append(self.live.digest())

    def restored(self, number: int) -> TraceState:
        """The state after a part, from its snapshot and those before it."""
        steps: list[Step] = []
        requests: list[list[Any]] = []
        for snapshot in self._snapshots[: number + 1]:
            assert (snapshot.first_step, snapshot.first_request) == (len(steps), len(requests))
            steps += read_steps(snapshot.steps)
            requests += read_requests(snapshot.requests, steps.__getitem__)
        return read_state(self._snapshots[number].state, steps.__getitem__, requests.__getitem__)

    def gone_on(self, number: int) -> TraceState:
        """The state at the end, folded from the snapshot after a part."""
        state = self.restored(number)
        for part in self.parts[number + 1 :]:
            fold(part, state)
        return state


def tape(
    seed: int,
    events: list[tuple[str, Event]],
    headers: list[Header],
    *,
    blocks: int = 8,
    **options: int,
) -> Tape:
    """Cut a trace at places that `seed` chooses; `options` are those of `TraceState`."""
    pick = random.Random(seed)
    cuts = sorted(pick.randrange(len(events) + 1) for _ in range(blocks - 1))
    parts = [
        [Delivery(source, None, [event]) for source, event in events[begin:end]]
        for begin, end in zip([0, *cuts], [*cuts, len(events)], strict=True)
    ]
    parts[0][:0] = [Delivery(header.source, header) for header in headers]
    return Tape(parts, TraceState(**options))

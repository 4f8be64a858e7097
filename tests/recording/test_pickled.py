"""A state read from a snapshot is the state that was folded, and goes on like it."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import Alias, AnyEvent, Event, Gap, Output, SourceGone
from engine_hooks.protocol.stream_decoder import Delivery
from tests.effort import examples
from tests.recording.story import fold, plain
from tests.recording.tape import Tape, tape
from tests.state.test_properties import hostile
from tests.state.traces import simulate
from tracer.state.trace_state import TraceState

pytestmark = pytest.mark.slow

phases = [Phase.explicit, Phase.reuse, Phase.generate]
few = settings(max_examples=examples(25), deadline=None, phases=phases)
"""Without shrinking: an example takes long, and names its seed."""


@few
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 30, 4096]),
    st.sampled_from([3, 2000]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_state_from_a_snapshot_is_the_one_that_was_folded_and_goes_on_like_it(
    seed: int, keep_steps: int, keep_finished: int, split: bool, device: bool, offline: bool
) -> None:
    trace = simulate(
        seed % 10_000, requests=9, split=split, device=device, offline=offline, blocks=60
    )
    options = {"keep_steps": keep_steps, "keep_finished": keep_finished}
    made = tape(seed, list(plain(trace.events)), trace.headers, **options)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest
    number = seed % len(made.parts)
    state = made.gone_on(number)
    assert state.digest() == made.digests[-1]
    assert made.restored(number).digest() == made.digests[number], (
        "states of one snapshot have nothing in common"
    )
    mine, live = state.snapshot(), made.live.snapshot()
    assert list(mine.steps) == list(live.steps)
    assert replace(mine, steps=()) == replace(live, steps=())
    for request_id in state.request_ids():
        assert state.detail(request_id) == made.live.detail(request_id)


def test_requests_are_whole_whose_steps_came_and_went_between_two_snapshots() -> None:
    trace = simulate(9, requests=30, split=True, blocks=60)
    made = tape(1, list(plain(trace.events)), trace.headers, blocks=5, keep_steps=1)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest


@few
@given(st.integers(0, 1 << 32), st.floats(0, 0.4))
def test_losses_and_ends_are_in_snapshots_too(seed: int, loss: float) -> None:
    pick = random.Random(seed)
    trace = simulate(seed % 10_000, requests=10, split=True)
    events: list[tuple[str, Event]] = []
    for source, event in plain(trace.events):
        if pick.random() < loss:
            events.append((source, Gap(event.t, 1)))
        else:
            events.append((source, event))
        if pick.random() < 0.005:
            events.append((source, SourceGone(event.t, "hung up")))
    made = tape(seed, events, trace.headers, keep_steps=60)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest


@example([("a", Alias(69, 21, "measured")), ("b", Alias(69, 21, "measured"))], 20_864_119)
@settings(max_examples=examples(60), deadline=None, phases=phases)
@given(hostile, st.integers(0, 1 << 32))
def test_what_hostile_events_leave_behind_is_in_snapshots_too(
    events: list[tuple[str, Event]], seed: int
) -> None:
    sane = [pair for pair in events if encodable(pair[1])]
    made = tape(seed, sane, [], blocks=3, keep_steps=4, keep_finished=3)
    for number, digest in enumerate(made.digests):
        state = made.restored(number)
        assert state.digest() == digest
        state.snapshot()
        assert made.gone_on(number).digest() == made.digests[-1]


def encodable(event: Event) -> bool:
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent)
    except (UnicodeEncodeError, OverflowError):
        return False
    return True


def test_a_piece_of_output_that_comes_late_reaches_a_request_of_a_snapshot() -> None:
    trace = simulate(3, requests=14, split=True, blocks=60)
    made = tape(3, list(plain(trace.events)), trace.headers, keep_steps=60)
    live = TraceState(keep_steps=60)
    tried = 0
    for number, part in enumerate(made.parts):
        fold(part, live)
        restored = made.restored(number)
        for known in list(live.requests.over.values()):
            source, key = known.keys[0]
            if live.sources[source].gone is not None or not known.output_chars:
                continue  # nothing more is taken from who has gone
            restored.apply(source, Output(live.now, key, known.output_chars, "more"))
            found = restored.requests.get(source, key)
            assert found is not None and found.output == [*known.output, "more"]
            assert restored.unknown == live.unknown
            tried += 1
    assert tried


def test_a_request_that_changes_after_it_was_over_is_told_anew() -> None:
    """Output that came late is in the snapshots from then on, and in none before."""
    trace = simulate(3, requests=14, split=True, blocks=60)
    parts = [[Delivery(header.source, header) for header in trace.headers]]
    parts[0] += [
        Delivery(source, None, [event])
        for source, event in plain(trace.events)
        if type(event) is not SourceGone
    ]
    before = fold(parts[0])
    late = [
        (source, Output(before.now, key, request.output_chars, f"more {key}"))
        for request in before.requests.over.values()
        for source, key in request.keys[:1]
        if request.output_chars and before.sources[source].gone is None
    ]
    assert late
    parts += [[Delivery(source, None, [event])] for source, event in late]
    made = Tape(parts)
    assert len(set(made.digests)) == len(parts)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest

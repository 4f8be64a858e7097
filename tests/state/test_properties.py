"""What holds for any trace, whatever part of it arrives, in whatever order."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import EVENT_TYPES, Event, Gap, Header, SourceGone
from tests.effort import examples
from tests.state.invariants import check_nothing_raised, check_snapshot, check_view
from tests.state.traces import MS, S, Trace, simulate
from tracer.state.engine.steps import LAG
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase


def some_traces(device: st.SearchStrategy[bool]) -> st.SearchStrategy[Trace]:
    return st.builds(
        simulate,
        st.integers(0, 10_000),
        requests=st.integers(1, 9),
        split=st.booleans(),
        blocks=st.sampled_from([30, 60, 200]),
        budget=st.sampled_from([16, 64, 512]),
        max_batch=st.sampled_from([2, 8]),
        device=device,
        offline=st.booleans(),
        output=st.sampled_from([1, 3, 25]),
    )


traces = some_traces(st.booleans())
few = settings(max_examples=examples(40), deadline=None)


def fold(
    headers: Iterable[Header], events: Iterable[tuple[str, Event]], *, keep_steps: int = 4096
) -> TraceState:
    state = TraceState(keep_steps=keep_steps)
    for header in headers:
        state.add_source(header)
    for source, event in events:
        state.apply(source, event)
    return state


def gone(trace: Trace) -> list[tuple[str, Event]]:
    return [
        (header.source, SourceGone(max(e.t for _, e in trace.events) + 1, "ended"))
        for header in trace.headers
    ]


@few
@given(traces)
def test_whole_trace_gives_what_really_happened(trace: Trace) -> None:
    state = fold(trace.headers, trace.events)
    check_nothing_raised(state)
    snapshot = state.snapshot()
    check_snapshot(snapshot)
    assert snapshot.losses.events == snapshot.losses.incomplete_requests == 0
    assert {view.id for view in snapshot.requests} == set(trace.truth)
    for view in snapshot.requests:
        truth = trace.truth[view.id]
        assert view.phase is Phase.DONE and not view.incomplete
        assert view.output_tokens == len(truth.tokens)
        assert view.preemptions == truth.preemptions
        assert view.closed == (truth.closed or truth.released)
        ends = (truth.closed if truth.closed is not None else truth.released) or 0
        assert view.e2e_ms == (ends - truth.received) / MS
        if truth.lookup is not None:
            assert view.queue_ms == (truth.lookup - truth.handed) / MS
        if truth.tokens and truth.streamed is not None:
            assert view.ttft_ms == (truth.streamed - truth.received) / MS
        detail = state.detail(view.id)
        assert detail is not None
        assert list(detail.itl_ms) == [
            (after - before) / MS
            for before, after in zip(truth.tokens, truth.tokens[1:], strict=False)
        ]
        assert list(detail.itl_batch) == truth.sizes[1:]
        if len(truth.tokens) > 1:
            assert view.tpot_ms == pytest.approx(
                (truth.tokens[-1] - truth.tokens[0]) / (len(truth.tokens) - 1) / MS
            )


@few
@given(traces, st.floats(0, 1), st.integers(0, 3_000))
def test_any_prefix_is_sound_and_ends_with_its_sources(
    trace: Trace, share: float, ahead_ms: int
) -> None:
    state = fold(trace.headers, trace.events[: int(share * len(trace.events))])
    check_nothing_raised(state)
    check_snapshot(state.snapshot())
    check_snapshot(state.snapshot(now=state.now + ahead_ms * MS))
    for source, event in gone(trace):
        state.apply(source, event)
    snapshot = state.snapshot()
    check_snapshot(snapshot)
    assert snapshot.live == 0
    assert all(view.phase in (Phase.DONE, Phase.LOST) for view in snapshot.requests)


@few
@given(traces, st.integers(0, 1 << 32), st.floats(0, 0.6), st.booleans())
def test_lost_events_leave_a_sound_state(trace: Trace, seed: int, loss: float, told: bool) -> None:
    """Any subset may be missing; the reader may or may not have told that there is a gap."""
    pick = random.Random(seed)
    state, lost = TraceState(), 0
    for source, event in trace.events:
        if pick.random() < loss:
            lost += 1
            continue
        if lost and told:
            state.apply(source, Gap(event.t, lost))
            lost = 0
        state.apply(source, event)
        if pick.random() < 0.02:
            check_snapshot(state.snapshot(now=state.now + pick.randrange(S)))
    for source, event in gone(trace):
        state.apply(source, event)
    check_nothing_raised(state)
    snapshot = state.snapshot()
    check_snapshot(snapshot)
    assert snapshot.live == 0


@few
@given(traces, st.integers(0, 1 << 32))
def test_tokens_are_never_made_up_when_events_are_lost_and_told(trace: Trace, seed: int) -> None:
    """After gaps a request may be short of tokens but never has more than it got; its end tells the
    exact count."""
    pick = random.Random(seed)
    state, lost = TraceState(), {header.source: 0 for header in trace.headers}
    for source, event in trace.events:
        if pick.random() < 0.1 and not event.lifecycle:
            lost[source] += 1
            continue
        if lost[source]:
            state.apply(source, Gap(event.t, lost[source]))
            lost[source] = 0
        state.apply(source, event)
        if pick.random() < 0.05:
            for view in state.snapshot(live_only=True).requests:
                if view.id in trace.truth and not view.finish_reason:
                    assert view.output_tokens <= len(trace.truth[view.id].tokens)
    for view in state.snapshot().requests:
        assert view.output_tokens == len(trace.truth[view.id].tokens)


@few
@given(traces, st.integers(0, 1 << 32))
def test_reordered_sources_duplicates_and_strangers_do_no_harm(trace: Trace, seed: int) -> None:
    pick = random.Random(seed)
    queues = {
        header.source: [e for s, e in trace.events if s == header.source]
        for header in trace.headers
    }
    state = TraceState()
    for header in trace.headers:
        state.add_source(header)
    while any(queues.values()):
        source = pick.choice([name for name, queue in queues.items() if queue])
        event = queues[source].pop(0)
        for _ in range(1 + (pick.random() < 0.1)):
            state.apply(source, event)
        if pick.random() < 0.02:
            check_snapshot(state.snapshot())
        if pick.random() < 0.05 and hasattr(event, "key"):
            stranger = type(event)(
                **{name: getattr(event, name) for name in event.__struct_fields__}
            )
            stranger.key = 90_000 + pick.randrange(9)
            # a name of its own: under a known one it would be that request
            if hasattr(stranger, "rid"):
                stranger.rid = f"stranger-{stranger.key}"
            state.apply("stranger", stranger)
    check_nothing_raised(state)
    snapshot = state.snapshot()
    check_snapshot(snapshot)
    known = [view for view in snapshot.requests if view.source != "stranger"]
    assert all(view.phase in (Phase.DONE, Phase.LOST) for view in known)
    by_id = {view.id: view for view in known}
    for rid, truth in trace.truth.items():
        assert by_id[rid].output_tokens == len(truth.tokens)


@few
@given(traces, st.integers(0, 1 << 32))
def test_shuffled_events_do_no_harm(trace: Trace, seed: int) -> None:
    events = list(trace.events)
    random.Random(seed).shuffle(events)
    state = fold(trace.headers, events)
    check_nothing_raised(state)
    check_snapshot(state.snapshot())
    state = fold(
        trace.headers, [*events, *((s, SourceGone(state.now, "ended")) for s in state.sources)]
    )
    assert state.snapshot().live == 0


@few
@given(traces, st.integers(0, 1 << 32))
def test_same_events_give_the_same_state_whatever_is_read_in_between(
    trace: Trace, seed: int
) -> None:
    pick = random.Random(seed)
    quiet = fold(trace.headers, trace.events, keep_steps=40)
    read = TraceState(keep_steps=40)
    for header in trace.headers:
        read.add_source(header)
    for source, event in trace.events:
        read.apply(source, event)
        if pick.random() < 0.1:
            read.snapshot(
                now=read.now + pick.randrange(10 * S),
                sort=pick.choice(["e2e", "itl", "received"]),
                text="a",
            )
            read.detail("req-1")
    assert read.digest() == quiet.digest()
    if len(trace.events) > 1:
        assert fold(trace.headers, trace.events[:-1], keep_steps=40).digest() != quiet.digest()


@few
@given(st.one_of(
    st.tuples(some_traces(st.just(False)), st.integers(1, 60)),
    # device times arrive up to some 40 steps later
    st.tuples(some_traces(st.just(True)), st.integers(50, 60)),
))  # fmt: skip
def test_a_short_step_history_changes_no_figure(traced: tuple[Trace, int]) -> None:
    """Steps are dropped from the ring; what they told of each request is not."""
    trace, keep = traced
    whole, short = (
        fold(trace.headers, trace.events),
        fold(trace.headers, trace.events, keep_steps=keep),
    )
    for request_id in whole.request_ids():
        assert short.detail(request_id) == whole.detail(request_id)
    for source in short.sources.values():
        kept = max(LAG, keep)
        assert len(source.batch.history) <= kept + max(LAG, kept // 4)


values = {
    int: st.one_of(
        st.integers(-5, 70), st.sampled_from([0, -1, 1 << 31, (1 << 63) - 1, -(1 << 63)])
    ),
    str: st.sampled_from(["", "req-1", "measured", "dead", "\x1b[2J", "\ud800"]),
    bytes: st.sampled_from(
        [b"", b"\x01\0\0\0", b"\x01\0\0\0\x02\0\0\0\x01\0\0\0", b"\xff" * 26, b"\x01\x02\x03"]
    ),
    bool: st.booleans(),
}
kinds = {"int": int, "str": str, "bytes": bytes, "bool": bool}


def any_event(kind: type[Event]) -> st.SearchStrategy[Event]:
    annotations: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        annotations.update(getattr(base, "__annotations__", {}))
    return st.builds(
        kind, **{name: values[kinds[annotations[name]]] for name in kind.__struct_fields__}
    )


hostile = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(EVENT_TYPES).flatmap(any_event)),
    max_size=40,
)


@settings(max_examples=examples(200), deadline=None)
@given(hostile)
def test_made_up_events_never_raise(events: list[tuple[str, Event]]) -> None:
    state = TraceState(keep_steps=4, keep_finished=3)
    for source, event in events:
        state.apply(source, event)
        snapshot = state.snapshot(sort="itl", reverse=True)
        for view in snapshot.requests:
            check_view(view, snapshot.now)
            assert state.detail(view.id) is not None
        assert len(snapshot.steps[:]) == len(snapshot.steps)
    state.digest()

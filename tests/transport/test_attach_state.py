"""What a late viewer is told: everything that is still true, and no more than fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol.attach_state import HALF_OVER, HUNG_UP, LINGER, MAX_PAST, AttachState
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Begin,
    Closed,
    Coverage,
    Engine,
    EngineStatus,
    Event,
    Finished,
    Heartbeat,
    HookFault,
    Output,
    Params,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Roster,
    Scheduled,
    Sent,
    Step,
    StepDevice,
    pack_u32,
    unpack_u32,
)
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase

S = NS_PER_S


def told(attach_state: AttachState, kind: type[Event]) -> list[Event]:
    """What the snapshot holds of one kind."""
    return [event for event in attach_state.snapshot() if type(event) is kind]


def keys(attach_state: AttachState) -> set[int]:
    """Requests that the snapshot speaks of."""
    return {event.key for event in attach_state.snapshot() if isinstance(event, (Received, Queued))}


def test_the_last_word_on_each_fact_is_kept() -> None:
    attach_state = AttachState()
    facts: list[Event] = [
        Engine(1, "old"),
        Engine(2, "new"),
        EngineStatus(3, "loading"),
        EngineStatus(4, "ready"),
        Coverage(5, 6, "measured", "a.b"),
        Coverage(6, 7, "unavailable", "c.d", "why"),
        Coverage(7, 6, "unavailable", "a.b", "graph"),
        HookFault(8, "a.b", "x", 1),
        HookFault(9, "a.b", "x", 2, True),
        Heartbeat(10),
        Heartbeat(11),
    ]
    attach_state.observe(facts, 12)
    assert attach_state.snapshot() == [facts[1], facts[3], facts[5], facts[6], facts[8], facts[10]]


def test_a_live_request_is_told_from_its_beginning() -> None:
    attach_state = AttachState()
    request: list[Event] = [
        Received(1, 7, "r7"),
        Begin(2, 7, 2),
        Prompt(3, 7, "text", 4, b"\x01\0\0\0", 1),
        Queued(4, 7, "r7", 1),
        Scheduled(6, 7, 5),
        Output(8, 7, 0, "he"),
        Output(9, 7, 2, "llo"),
        Sent(10, 7, 2, 20),
    ]
    attach_state.observe([*request[:-1], Sent(8, 7, 1, 10)], 10)
    attach_state.observe(request[-1:], 3600 * S)
    assert attach_state.snapshot() == request


def test_what_a_request_asked_for_is_told_to_those_who_come_late() -> None:
    attach_state = AttachState()
    asked = Params(2, 1, 1, "team-a", "some/model", 16)
    attach_state.observe([Received(1, 1, "r", "/v1"), asked], 3)
    assert told(attach_state, Params) == [asked]


def test_a_request_is_forgotten_a_little_after_its_end() -> None:
    attach_state = AttachState()
    attach_state.observe(
        [Received(0, 1, "a"), Queued(1, 1, "a"), Finished(2, 1, "stop"), Released(3, 1)], 4
    )
    attach_state.observe([Closed(5, 1, 200)], 6)
    assert keys(attach_state) == {1}
    attach_state.observe([], 5 + LINGER)
    assert attach_state.snapshot() == []
    attach_state.observe(
        [Sent(6, 1, 1, 1), Output(6, 1, 0, "x"), Released(6, 1), Finished(6, 1, "stop")], 6 + LINGER
    )
    assert attach_state.snapshot() == []


def life(key: int, begin: int, end: int) -> list[Event]:
    """A request from its receipt to its end."""
    rid = f"r{key}"
    return [
        Received(begin, key, rid),
        Prompt(begin + 1, key, "secret", 6, b"1234", 1),
        Queued(begin + 2, key, rid, 1),
        Scheduled(begin + 3, key, begin + 3),
        Finished(end, key, "stop", 2),
        Released(end + 1, key),
        Closed(end + 2, key),
    ]


def test_whoever_a_kept_step_names_is_told_to_be_over() -> None:
    """A late viewer took a member of an old batch of whom nothing was said for a request without an
    end."""
    attach_state = AttachState()
    first, row = Step(2 * S, 1, joined=pack_u32([1]), batch=1), pack_u32((1, 1, 1, 1, 1, 1))
    attach_state.observe(
        [*life(1, S, 3 * S), first, Roster(2 * S + 5, 1, row), Step(2 * S + 9, 2, batch=1)], 4 * S
    )
    # nothing has run for a minute: the last steps are those of request 1
    attach_state.observe([Heartbeat(60 * S)], 60 * S)
    state = TraceState()
    for event in attach_state.snapshot():
        state.apply("engine", event)
    snapshot = state.snapshot()
    assert [(view.rid, view.phase, view.incomplete) for view in snapshot.requests] == [
        ("r1", Phase.DONE, False)
    ]
    assert snapshot.live == 0
    assert [event.text for event in told(attach_state, Prompt)] == [""], "its text is gone"  # type: ignore[attr-defined]
    for key, at in ((2, 61 * S), (3, 81 * S)):
        attach_state.observe(
            [*life(key, at, at + S), Roster(at + 10, key * 2, b""), Step(at + 20, key * 2 + 1)],
            at + S,
        )
        attach_state.observe([Heartbeat(at + 10 * S)], at + 10 * S)
    assert keys(attach_state) == {2, 3}, "no step names the first any more"


def test_requests_that_are_over_and_named_are_bounded_and_steps_go_with_them() -> None:
    attach_state = AttachState()
    attach_state.observe([Received(S, 0, "long"), Queued(S + 1, 0, "long")], S)
    for key in range(1, 2 * MAX_PAST):
        at = S + key * S // 10
        step = Step(at + 13, 2 * key + 1, joined=pack_u32([key]))
        attach_state.observe([*life(key, at, at + 9), Roster(at + 12, 2 * key, b""), step], at)
        if key % 500 == 0:
            joined = [step.joined for step in told(attach_state, Step)]  # type: ignore[attr-defined]
            assert {key for packed in joined for key in unpack_u32(packed)} <= keys(attach_state)
    assert len(keys(attach_state)) <= MAX_PAST + 1 + 6 * 10
    assert 0 in keys(attach_state)


def test_a_process_that_never_sees_the_front_end_forgets_at_the_finish() -> None:
    attach_state = AttachState()
    attach_state.observe(
        [Queued(0, 1, "a"), Scheduled(1, 1, 0), Finished(2, 1, "stop"), Released(3, 1)], 4
    )
    attach_state.observe([], LINGER + 2)
    assert keys(attach_state) == set()


def test_a_request_whose_end_was_lost_does_not_haunt_the_screen_for_ever() -> None:
    attach_state = AttachState()
    attach_state.observe([Received(0, 1, "a"), Queued(0, 1, "a"), Finished(0, 1, "stop")], 0)
    attach_state.observe([Received(0, 2, "b"), Queued(0, 2, "b"), Closed(0, 2, -1, -1, True)], 0)
    attach_state.observe([], HALF_OVER - 1)
    assert keys(attach_state) == {1, 2}
    attach_state.observe([], HALF_OVER)
    assert keys(attach_state) == {2}
    attach_state.observe([], HUNG_UP)
    assert keys(attach_state) == set()


def test_a_client_that_hung_up_is_told_while_the_engine_goes_on() -> None:
    attach_state = AttachState()
    attach_state.observe([Received(0, 1, "a"), Queued(0, 1, "a"), Closed(1, 1, 200, 0, True)], 2)
    attach_state.observe([], 60 * S)
    assert keys(attach_state) == {1}
    attach_state.observe([Finished(60 * S, 1, "stop")], 60 * S)
    attach_state.observe([], 60 * S + LINGER)
    assert keys(attach_state) == set()


def test_steps_are_kept_since_the_oldest_live_request_came() -> None:
    attach_state = AttachState()
    for n in range(10):
        if n == 4:
            attach_state.observe([Queued(n * 100 + 50, 1, "a")], 0)
        attach_state.observe(
            [Step(n * 100 + 1, n), StepDevice(n * 100 + 2, n), Roster(n * 100 + 3, n)], 0
        )
    steps = [event.n for event in told(attach_state, Step) if isinstance(event, Step)]
    rosters = [event.n for event in told(attach_state, Roster) if isinstance(event, Roster)]
    assert steps == [5, 6, 7, 8, 9] and rosters[0] == 4
    attach_state.observe([Finished(1000, 1, "stop")], 1000)
    attach_state.observe([Step(2000, 10), Roster(2001, 10), Step(2002, 11)], 10 * S)
    attach_state.observe([Roster(2003, 11)], 10 * S)
    assert [event for event in attach_state.snapshot() if isinstance(event, (Step, Roster))] == [
        Roster(2003, 11)
    ]


def test_a_roster_stands_before_the_steps_that_build_on_it() -> None:
    attach_state = AttachState()
    attach_state.observe(
        [Queued(0, 1, "a"), Step(10, 1), Step(20, 2, end=15), Roster(30, 1), Step(40, 3)], 50
    )
    order = [
        (type(event).__name__, event.n)
        for event in attach_state.snapshot()
        if isinstance(event, (Step, Roster))
    ]
    assert order == [("Step", 1), ("Roster", 1), ("Step", 2), ("Step", 3)]


def test_steps_are_bounded_and_what_is_left_hangs_together() -> None:
    attach_state = AttachState(max_steps=25)
    attach_state.observe([Queued(0, 1, "a")], 0)
    for n in range(100):
        attach_state.observe([Step(n * 10 + 1, n)], 0)
        if n % 10 == 9:
            attach_state.observe([Roster(n * 10 + 5, n)], 0)
    line = [event for event in attach_state.snapshot() if isinstance(event, (Step, Roster))]
    assert isinstance(line[0], Roster)
    numbers = [event.n for event in line if isinstance(event, Step)]
    assert numbers == list(range(line[0].n + 1, 100)) and 10 <= len(numbers) <= 25


def test_a_roster_with_a_hole_after_it_is_not_told() -> None:
    attach_state = AttachState(max_steps=5)
    attach_state.observe(
        [Queued(0, 1, "a"), Step(1, 1), Roster(2, 1), *(Step(3 + n, n) for n in range(2, 12))], 20
    )
    assert told(attach_state, Roster) == []
    assert [event.n for event in attach_state.snapshot() if isinstance(event, Step)] == [
        7,
        8,
        9,
        10,
        11,
    ]


def test_rosters_of_an_engine_that_stands_still_do_not_pile_up() -> None:
    attach_state = AttachState()
    attach_state.observe([Queued(0, 1, "a"), Step(1, 1)], 1)
    for second in range(1000):
        attach_state.observe([Roster(second * S + 2, 1, b"\0" * 24)], second * S)
    assert told(attach_state, Roster) == [Roster(999 * S + 2, 1, b"\0" * 24)]


def test_too_many_live_requests_push_out_the_first_and_are_counted() -> None:
    attach_state = AttachState(max_requests=10, max_events=1000)
    attach_state.observe([Queued(t, t, str(t)) for t in range(25)], 30)
    assert keys(attach_state) == set(range(15, 25))
    assert attach_state.forgotten == 15


def test_too_many_events_push_out_the_first_requests() -> None:
    attach_state = AttachState(max_events=100)
    attach_state.observe([Queued(0, 1, "a")], 0)
    attach_state.observe(
        [Queued(1, 2, "b"), *(Preempted(t, 2, "recompute") for t in range(2, 99))], 100
    )
    assert keys(attach_state) == {1, 2}
    attach_state.observe([Preempted(99, 2, "recompute"), Preempted(100, 2, "recompute")], 100)
    assert keys(attach_state) == {2}


def test_output_of_one_request_is_bounded_and_keeps_its_end() -> None:
    attach_state = AttachState(max_output=100)
    attach_state.observe([Queued(0, 1, "a")], 0)
    for index in range(50):
        attach_state.observe([Output(index, 1, index * 10, "0123456789")], index)
    pieces = [event for event in attach_state.snapshot() if isinstance(event, Output)]
    assert [piece.offset for piece in pieces] == list(range(400, 500, 10))


def test_text_of_all_requests_is_bounded_and_goes_from_the_oldest() -> None:
    attach_state = AttachState(max_text=1000, max_output=1000)
    for key in range(20):
        attach_state.observe(
            [Queued(key, key, str(key)), Prompt(key, key, "x" * 50, 50, b"", 9)], key
        )
        attach_state.observe([Output(key, key, 0, "y" * 50)], key)
    size = sum(
        len(event.text) for event in attach_state.snapshot() if isinstance(event, (Prompt, Output))
    )
    assert size <= 1000
    prompts = [event for event in attach_state.snapshot() if isinstance(event, Prompt)]
    assert (
        len(prompts) == 20
        and prompts[0] == Prompt(0, 0, "", 50, b"", 9)
        and prompts[-1].text == "x" * 50
    )
    assert attach_state.texts_dropped > 0


def test_an_event_without_a_time_is_not_kept() -> None:
    attach_state = AttachState()
    wrong: list[Event] = [Queued(None, 1, "a"), Heartbeat(None), Step(None, 1)]  # type: ignore[arg-type]
    attach_state.observe([*wrong, Queued(5, 2, "b")], 6)
    assert attach_state.snapshot() == [Queued(5, 2, "b")]


_request_events = st.one_of(
    st.builds(Received, st.just(0), st.integers(0, 5), st.just("r")),
    st.builds(Queued, st.just(0), st.integers(0, 5), st.just("r")),
    st.builds(Scheduled, st.just(0), st.integers(0, 5), st.just(0)),
    st.builds(Preempted, st.just(0), st.integers(0, 5), st.just("recompute")),
    st.builds(Finished, st.just(0), st.integers(0, 5), st.just("stop")),
    st.builds(Released, st.just(0), st.integers(0, 5)),
    st.builds(Closed, st.just(0), st.integers(0, 5)),
    st.builds(Sent, st.just(0), st.integers(0, 5), st.just(1), st.just(1)),
    st.builds(Output, st.just(0), st.integers(0, 5), st.just(0), st.text(max_size=8)),
    st.builds(Prompt, st.just(0), st.integers(0, 5), st.text(max_size=8)),
    st.builds(Step, st.just(0), st.integers(0, 9), joined=st.binary(max_size=40)),
    st.builds(StepDevice, st.just(0), st.integers(0, 9)),
    st.builds(Roster, st.just(0), st.integers(0, 9), st.binary(max_size=40)),
)


@given(st.lists(st.tuples(_request_events, st.integers(0, 20 * S)), max_size=60))
def test_bounds_hold_whatever_happens(history: list[tuple[Event, int]]) -> None:
    attach_state = AttachState(
        max_requests=3, max_events=10, max_text=20, max_output=10, max_steps=6, max_step_bytes=1000
    )
    t = 0
    for event, later in history:
        t += later
        event.t = t
        attach_state.observe([event], t)
        snapshot = attach_state.snapshot()
        assert [one.t for one in snapshot if not isinstance(one, Roster)] == sorted(
            one.t for one in snapshot if not isinstance(one, Roster)
        )
        lives = {one.key for one in snapshot if hasattr(one, "key")}
        steps = [one for one in snapshot if isinstance(one, (Step, StepDevice))]
        text = sum(len(one.text) for one in snapshot if isinstance(one, (Output, Prompt)))
        assert len(lives) <= 3 and len(steps) <= 6 and text <= 20
        assert sum(120 + len(one.joined) for one in steps if isinstance(one, Step)) <= 1000

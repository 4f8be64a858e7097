"""Events whose time contradicts the others are set aside: the state is the one without them, and
their number is told.

Every kind of event, every kind of stamp, in every place; through snapshots too. What only looks odd
stays: pauses of days, a clock that jumps back, another host's, what is told to a viewer that comes
late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol import events as kinds
from engine_hooks.protocol.attach_state import AttachState
from engine_hooks.protocol.clock import ClockAnchor
from engine_hooks.protocol.events import (
    Event,
    Gap,
    Heartbeat,
    Scheduled,
    Sent,
    SourceGone,
    Step,
    StepDevice,
    pack_u32,
)
from engine_hooks.protocol.stamps import set_aside_line
from tests.effort import examples, thinned
from tests.recording.story import plain
from tests.recording.tape import tape
from tests.state.traces import START, Trace, simulate
from tracer.state.trace_state import TraceState

S: Final = 1_000_000_000
HOUR: Final = 3_600 * S

Told = list[tuple[str, Event]]

MAKERS: Final[dict[str, Callable[[int], Event]]] = {
    "Engine": lambda t: kinds.Engine(t, "other", num_blocks=7),
    "Coverage": lambda t: kinds.Coverage(t, 4, "unavailable", "", "odd"),
    "EngineStatus": lambda t: kinds.EngineStatus(t, "dead", "odd"),
    "Heartbeat": lambda t: Heartbeat(t, 5, 5),
    "HookFault": lambda t: kinds.HookFault(t, "odd", "odd", 1),
    "Received": lambda t: kinds.Received(t, 9_999, "odd"),
    "Begin": lambda t: kinds.Begin(t, 9_999, 2),
    "End": lambda t: kinds.End(t, 1, 2, 5),
    "Alias": lambda t: kinds.Alias(t, 9_999, "odd"),
    "Prompt": lambda t: kinds.Prompt(t, 1, "odd", 3),
    "Queued": lambda t: kinds.Queued(t, 9_999, "odd", 9),
    "Scheduled": lambda t: Scheduled(t, 9_999, t),
    "Preempted": lambda t: kinds.Preempted(t, 1, "recompute", 4, 4, 99),
    "Finished": lambda t: kinds.Finished(t, 1, "odd", 3),
    "Released": lambda t: kinds.Released(t, 1, 3, 3),
    "Sent": lambda t: Sent(t, 1, 999, 999, 999),
    "Output": lambda t: kinds.Output(t, 1, 0, "odd"),
    "Closed": lambda t: kinds.Closed(t, 1, 500),
    "Params": lambda t: kinds.Params(t, 9_999, 1, "odd"),
    "Step": lambda t: Step(t, 100_000, token=5, end=6, batch=1, joined=pack_u32([9_999]), tokens=9),
    "StepDevice": lambda t: StepDevice(t, 1, 1, 2, 3, 4, 5),
    "Roster": lambda t: kinds.Roster(t, 100_000, pack_u32([9_999, 1, 1, 1, 1, 1])),
    "Evicted": lambda t: kinds.Evicted(t, 5, 500),
}
STAMPS: Final = {
    "zero": 0,
    "negative": -1,
    "far back": -(1 << 62),
    "wall clock": 1_790_000_000 * S,
    "a billion seconds": 10**18,
    "the last instant": (1 << 62) - 1,
    "64 bits": (1 << 63) - 1,
    "in five hours": START + 5 * HOUR,
    "in a year": START + 365 * 24 * HOUR,
}
PLACES: Final = ("first", "middle", "last", "two in a row", "many")
SAYS_NOTHING_ELSE: Final = {Gap, SourceGone}
"""The reader of a stream adds these: they are never set aside."""


def base(seed: int = 3, *, split: bool = False) -> tuple[Trace, Told]:
    """A trace of some requests, with the heartbeats of its sources."""
    trace = simulate(seed, requests=5, split=split, output=30)
    told: Told = []
    for place, (source, event) in enumerate(plain(trace.events)):
        told.append((source, event))
        if place % 9 == 8:
            told.append((source, Heartbeat(event.t, place)))
    return trace, told


def state_of(trace: Trace, told: Iterable[tuple[str, Event]]) -> TraceState:
    state = TraceState()
    for header in trace.headers:
        state.add_source(header)
    for source, event in told:
        state.apply(source, event)
    return state


def strewn(told: Told, make: Callable[[int], Event], t: int, place: str) -> tuple[Told, int]:
    """The trace with strays in it, and how many they are."""
    middle = next(
        at for at in range(len(told) // 2, len(told)) if not told[at - 1][1].t > told[at][1].t
    )
    places = {
        "first": [0], "middle": [middle], "last": [len(told)], "two in a row": [middle, middle],
        "many": list(range(40, len(told), 11)),
    }[place]  # fmt: skip
    odd = list(told)
    for at in sorted(places, reverse=True):
        odd.insert(at, (told[min(at, len(told) - 1)][0], make(t)))
    return odd, len(places)


def forget_strays(state: TraceState) -> str:
    """The digest but for the count of what was set aside."""
    for source in state.sources.values():
        source.stamps.resume([], 0, beats=source.stamps.beats)
    return state.digest()


def test_every_kind_of_event_is_tried() -> None:
    assert {kind.__name__ for kind in set(kinds.EVENT_TYPES) - SAYS_NOTHING_ELSE} == MAKERS.keys()


@pytest.mark.parametrize(
    ("kind", "stamp", "place"),
    thinned([(kind, stamp, place) for place in PLACES for stamp in STAMPS for kind in MAKERS], 13),
)
def test_a_stray_stamp_changes_nothing_and_is_counted(kind: str, stamp: str, place: str) -> None:
    trace, told = base(split=(len(kind) + len(stamp)) % 2 == 0)
    odd, count = strewn(told, MAKERS[kind], STAMPS[stamp], place)
    clean, state = state_of(trace, told), state_of(trace, odd)
    assert state.set_aside() == count
    assert (state.now, state.began, state.unknown) == (clean.now, clean.began, clean.unknown)
    losses = state.snapshot().losses
    assert losses.set_aside == count
    assert forget_strays(state) == clean.digest()


def test_it_is_said_in_words() -> None:
    assert set_aside_line(1) == "1 event set aside: its time contradicts the others"
    assert set_aside_line(1_200) == "1,200 events set aside: their times contradict the others"


FAR: Final = (1 << 62, (1 << 63) - 1, 10**18)
INSIDE: Final = [
    (name, make, value)
    for value in FAR
    for name, make in (
        ("lookup", lambda t, v: Scheduled(t, 1, v)),
        ("token", lambda t, v: Step(t, 100_000, token=v, end=6, batch=1)),
        ("end", lambda t, v: Step(t, 100_000, end=v)),
        ("scheduled", lambda t, v: Step(t, 100_000, v, end=6)),
        ("device", lambda t, v: StepDevice(t, 1, 1, 2, v)),
        ("work", lambda t, v: Sent(t, 1, 5, 5, 5, v)),
    )
]


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [
        *INSIDE,
        ("lookup", lambda t, v: Scheduled(t, 1, v), 0),
        ("lookup", lambda t, v: Scheduled(t, 1, v), -5),
        ("cpu", lambda t, v: Heartbeat(t, v), 1 << 62),
    ],
)
def test_so_is_an_event_in_which_an_instant_or_a_length_cannot_be(
    name: str, make: Callable[[int, int], Event], value: int
) -> None:
    trace = simulate(3, requests=5, output=30)
    for header in trace.headers:  # a machine that runs for hours
        trace.headers[trace.headers.index(header)] = msgspec.structs.replace(
            header, anchor=ClockAnchor(4 * HOUR, 1)
        )
    shift = 4 * HOUR - START
    told = [(source, moved(event, shift)) for source, event in plain(trace.events)]
    middle = len(told) // 2
    source, event = told[middle]
    key = {"work": 1, "lookup": 1}.get(name)
    assert key is None or any(getattr(each, "key", 0) == key for _, each in told[:middle])
    odd = [*told[:middle], (source, make(event.t, value)), *told[middle:]]
    state = state_of(trace, odd)
    assert state.set_aside() == 1
    assert forget_strays(state) == state_of(trace, told).digest()


def moved(event: Event, ns: int) -> Event:
    """The event so much later."""
    later = msgspec.structs.replace(event, t=event.t + ns)
    if type(later) is Scheduled:
        later.lookup += ns
    return later


@pytest.mark.parametrize("pause", [600 * S, 3 * HOUR, 72 * HOUR, 365 * 24 * HOUR])
@pytest.mark.parametrize("at", [0, 30, 57, 100])
@pytest.mark.parametrize("split", [False, True])
def test_a_real_pause_loses_nothing(pause: int, at: int, split: bool) -> None:
    """A process that was stopped for hours, an engine that nobody used over a weekend, whichever
    event comes first."""
    trace, told = base(split=split)
    paused = [*told[:at], *((source, moved(event, pause)) for source, event in told[at:])]
    state, clean = state_of(trace, paused), state_of(trace, told)
    assert (state.set_aside(), state.unknown) == (0, 0)
    assert state.now == clean.now + pause
    assert state.requests.finished_total == clean.requests.finished_total
    assert state.produced.totals() == clean.produced.totals()
    assert [source.batch.count for source in state.sources.values()] == [
        source.batch.count for source in clean.sources.values()
    ]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 32), st.booleans(), st.data())
def test_snapshots_know_what_waits_to_be_believed(
    seed: int, split: bool, data: st.DataObject
) -> None:
    """Pauses and strays between any two events, snapshots between any other two."""
    trace, told = base(seed % 1_000, split=split)
    shift = 0
    odd: Told = []
    for source, event in told:
        what = (
            data.draw(st.sampled_from([""] * 12 + ["pause", "stray"])) if len(odd) % 5 == 0 else ""
        )
        if what == "pause":
            shift += data.draw(st.sampled_from([600 * S, 3 * HOUR, 72 * HOUR]))
        elif what == "stray":
            kind = data.draw(st.sampled_from(sorted(MAKERS)))
            odd.append((source, MAKERS[kind](data.draw(st.sampled_from(sorted(STAMPS.values()))))))
        odd.append((source, moved(event, shift)))
    made = tape(seed, odd, trace.headers, blocks=12)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest
    start = random.Random(seed).randrange(len(made.parts))
    assert made.gone_on(start).digest() == made.digests[-1]


def test_steps_that_waited_are_in_snapshots() -> None:
    """A pause after which steps come first: they wait over the end of a block and are taken in with
    a later one."""
    trace, told = base()
    for at, (_, event) in enumerate(told):
        if type(event) is Step and at > 20:
            odd = [*told[:at], *((source, moved(each, 3 * HOUR)) for source, each in told[at:])]
            for seed in range(5):
                made = tape(seed, odd[: at + 12], trace.headers, blocks=at + 6)
                for number, digest in enumerate(made.digests):
                    assert made.restored(number).digest() == digest
            return
    raise AssertionError("the trace has steps")


def test_what_is_told_to_a_viewer_that_comes_days_later_is_believed() -> None:
    """An engine that announced itself on Monday and is asked on Thursday."""
    trace, told = base()
    days = 72 * HOUR
    facts = [
        (source, event) for source, event in told if type(event) in (kinds.Engine, kinds.Coverage)
    ]
    later = [(source, moved(event, days)) for source, event in told if (source, event) not in facts]
    attach_state = AttachState()
    attach_state.observe([event for _, event in facts], START)
    live = later[: len(later) // 2]
    attach_state.observe([event for _, event in live], live[-1][1].t)
    source = told[0][0]
    state = state_of(
        trace, [*((source, event) for event in attach_state.snapshot()), *later[len(live) :]]
    )
    assert (state.set_aside(), state.unknown) == (0, 0)
    assert state.now == later[-1][1].t
    # The connection breaks, and all is told again.
    again = state_of(
        trace, [*later, *((source, event) for event in attach_state.snapshot()), *later[-3:]]
    )
    assert (again.set_aside(), again.now) == (0, later[-1][1].t)


def test_clocks_that_are_apart_are_believed_each() -> None:
    trace, told = base(split=True)
    for shift in (-3 * S, 3 * S // 2, 200 * 24 * HOUR):
        other = trace.headers[0].source
        headers = [
            msgspec.structs.replace(
                header, anchor=ClockAnchor(header.anchor.monotonic + shift, header.anchor.wall)
            )
            if header.source == other
            else header
            for header in trace.headers
        ]
        state = TraceState()
        for header in headers:
            state.add_source(header)
        for source, event in told:
            state.apply(source, moved(event, shift) if source == other else event)
        assert (state.set_aside(), state.unknown) == (0, 0)


def test_time_may_jump_back() -> None:
    trace, told = base()
    odd = [*told[:60], *((source, moved(event, -3 * S)) for source, event in told[60:])]
    assert state_of(trace, odd).set_aside() == 0


@pytest.mark.parametrize("stamp", STAMPS)
def test_what_a_reader_says_of_its_stream_is_taken_in_whenever_it_says_it_was(stamp: str) -> None:
    trace, told = base()
    clean = state_of(trace, told)
    said = (Gap(STAMPS[stamp], 7, "odd"), SourceGone(STAMPS[stamp], "x"))
    state = state_of(trace, [*told, *(("engine", event) for event in said)])
    assert (state.now, state.began, state.set_aside()) == (clean.now, clean.began, 0)
    assert (state.sources["engine"].missing, state.sources["engine"].gone) == (7, "x")


def test_an_end_hours_later_confirms_what_came_shortly_before_it() -> None:
    trace, told = base()
    last = told[-1][1].t + 3 * HOUR
    state = state_of(
        trace, [*told, ("engine", Heartbeat(last)), ("engine", SourceGone(last + S, "killed"))]
    )
    assert (state.now, state.set_aside()) == (last + S, 0)


def test_a_viewers_clock_can_agree_with_what_waits() -> None:
    """Nothing is called a contradiction while it is as late as it says."""
    trace, told = base()
    last = told[-1][1].t + 3 * HOUR
    state = state_of(trace, [*told, ("engine", Heartbeat(last))])
    assert state.snapshot(now=last).losses.set_aside == 0
    assert state.snapshot().losses.set_aside == 1

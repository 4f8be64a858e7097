"""What is counted beside the timers: whose tokens they are, what ITL depends on, stalls, bounds,
and that reading changes nothing."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import Engine, Event, Queued, Received, Step, pack_u32, unpack_u32
from tests.state.test_properties import fold
from tests.state.traces import simulate
from tests.tui.timeline import ENGINE, Timeline
from tracer.state.metrics.groups import GROUPS
from tracer.state.metrics.numbers import Ask, Curve, Numbers
from tracer.state.metrics.octaves import RANGES, high_of, low_of, range_of
from tracer.state.metrics.slo import SloError, parse
from tracer.state.trace_state import TraceState


def numbers_of(state: TraceState, ask: Ask | None = None, window_s: float = math.inf) -> Numbers:
    numbers = state.snapshot(limit=0, window_s=window_s, numbers=ask or Ask()).numbers
    assert numbers is not None
    return numbers


@given(st.integers(1, 1 << 40))
def test_every_size_is_in_the_range_that_says_so(number: int) -> None:
    place = range_of(number)
    assert 0 <= place < RANGES and low_of(place) <= number
    assert number <= high_of(place) or place == RANGES - 1


def counted_again(
    trace_events: list[tuple[str, Event]], prompts: dict[int, int]
) -> tuple[Counter[int], Counter[int]]:
    """Tokens of members that had one in the step before too, in steps without a prompt: by range of
    batch and of position. A member that joins or is odd has no open run before."""
    members: set[int] = set()
    running: set[int] = set()
    tokens: Counter[int] = Counter()
    by_batch: Counter[int] = Counter()
    by_place: Counter[int] = Counter()
    seen: set[int] = set()
    for _, event in trace_events:
        if not isinstance(event, Step):
            continue
        left, joined = set(unpack_u32(event.left)), set(unpack_u32(event.joined))
        members = (members - left) | joined
        values = unpack_u32(event.odd)
        odd = {
            key: (took, gave)
            for key, took, gave in zip(values[::3], values[1::3], values[2::3], strict=True)
        }
        members |= set(odd)
        running = (running - left - set(odd)) & members
        alone = not any(key not in seen or not gave for key, (_, gave) in odd.items())
        for key in members:
            gave = odd[key][1] if key in odd else 1
            if alone and key in running:
                by_batch[range_of(len(members))] += 1
                by_place[range_of(prompts[key] + tokens[key] + 1)] += 1
            tokens[key] += gave
            if gave:
                seen.add(key)
        running |= members - set(odd)
    return by_batch, by_place


def by_range(curve: Curve) -> dict[int, int]:
    return {range_of(point.low): point.count for point in curve.points}


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_gaps_are_put_down_to_the_batch_and_the_position_that_they_had(seed: int) -> None:
    trace = simulate(seed, requests=24, blocks=300, output=60)
    state = fold(trace.headers, trace.events)
    prompts = {request.keys[0][1]: request.prompt_tokens for request in state.requests.order}
    by_batch, by_place = counted_again(trace.events, prompts)
    numbers = numbers_of(state)
    assert by_range(numbers.by_batch) == by_batch and sum(by_batch.values()) > 100
    assert by_range(numbers.by_position) == by_place


def slow(by: str) -> TraceState:
    """An engine of which each token costs more with the batch, with the position, or always the
    same."""
    state = TraceState()
    state.apply("e", Engine(1, "toy", max_batch=64, max_batch_tokens=64))
    t, n, last = NS_PER_S, 0, [0][:0]
    for size in (1, 2, 4, 8, 16, 32, 64):
        keys = [1000 * size + place for place in range(size)]
        for key in keys:
            state.apply("e", Queued(t, key, f"r{key}", 8))
        for index in range(80):
            length = {"batch": 2 + size / 4, "position": 2 + index / 8, "neither": 6}[
                by
            ] * NS_PER_MS
            odd = pack_u32(value for key in keys for value in (key, 8, 1)) if index == 0 else b""
            state.apply(
                "e",
                Step(
                    t,
                    n,
                    token=int(length),
                    end=int(length),
                    batch=size,
                    tokens=size,
                    joined=pack_u32(keys) if index == 0 else b"",
                    left=pack_u32(last) if index == 0 and n else b"",
                    odd=odd,
                ),
            )
            t, n = t + int(length), n + 1
        last = keys
    return state


@pytest.mark.parametrize(
    ("by", "batch", "position"),
    [("batch", 5.0, 1.0), ("position", 1.0, 3.0), ("neither", 1.0, 1.0)],
)
def test_the_three_causes_of_slow_tokens_are_told_apart(
    by: str, batch: float, position: float
) -> None:
    numbers = numbers_of(slow(by))
    for curve, least in ((numbers.by_batch, batch), (numbers.by_position, position)):
        assert curve.rise is not None
        assert curve.rise >= least if least > 1 else 0.75 < curve.rise < 1.2, (by, curve.rise)


def test_groups_add_up_to_the_whole_and_a_filter_leaves_theirs() -> None:
    trace = simulate(5, requests=30, split=True)
    events = [
        (
            source,
            msgspec.structs.replace(event, tenant="ab"[event.key % 2], route=f"/{event.key % 3}")
            if isinstance(event, Received)
            else event,
        )
        for source, event in trace.events
    ]
    state = fold(trace.headers, events)
    whole = numbers_of(state).windows[-1]
    for dimension, number in (("tenant", 2), ("route", 3), ("engine", 1)):
        groups = whole.groups[dimension]
        assert len({group.name for group in groups if group.name}) == number
        for name, timer in whole.all.timers.items():
            assert sum(group.figures.timers[name].count for group in groups) == timer.count > 0
        assert sum(group.figures.requests for group in groups) == whole.all.requests
        assert sum(group.figures.tokens_out for group in groups) == pytest.approx(
            whole.all.tokens_out
        )
    only = numbers_of(state, Ask(text="/1")).windows[-1]
    (route,) = [group.figures for group in whole.groups["route"] if group.name == "/1"]
    assert only.all == route and {group.name for group in only.groups["route"]} == {"/1"}
    nobody = numbers_of(state, Ask(text="nobody")).windows[-1]
    assert nobody.all.requests == nobody.all.ended == 0 and nobody.all.timers["itl"].p50 is None


def test_tenants_without_end_do_not_grow_the_state() -> None:
    state = TraceState(keep_finished=10)
    for key in range(1, 1_500):
        t = key * NS_PER_MS
        state.apply(
            "e", Received(t, key, f"r{key}", route=f"/{key}", tenant=f"tenant {key} " + "x" * 5_000)
        )
        state.apply("e", Queued(t, key, f"r{key}", 5))
        if key == 300:
            size = len(pickle.dumps(state.counters))
    assert len(state.counters.groups.known) == GROUPS + 1
    numbers = numbers_of(state)
    assert numbers.overflow and numbers.groups == GROUPS
    groups = numbers.windows[-1].groups["tenant"]
    assert sum(group.figures.requests for group in groups) == 1_499
    assert max(len(group.name) for group in groups) <= 64
    assert len(pickle.dumps(state.counters)) < 1.2 * size


def test_a_pause_between_two_steps_is_marked_as_a_stall_when_members_waited() -> None:
    timeline = Timeline(40, rate=8, seed=2)
    steps = [event for event in timeline.events if isinstance(event, Step)]
    late = steps[len(steps) // 2].t
    moved = [
        msgspec.structs.replace(event, t=event.t + 700 * NS_PER_MS) if event.t >= late else event
        for event in timeline.events
    ]
    state = TraceState()
    for event in moved:
        state.apply("e", event)
    stalls = [stretch for stretch in numbers_of(state).history.stretches if stretch.stalled]
    assert len(stalls) == 1 and 690 < stalls[0].wait < 720
    calm = numbers_of(timeline.state()).history.stretches
    assert calm and not any(stretch.stalled for stretch in calm)


def test_asking_for_numbers_changes_nothing() -> None:
    trace = simulate(11, requests=12)
    quiet, asked = TraceState(), TraceState()
    for place, (source, event) in enumerate(trace.events):
        quiet.apply(source, event)
        asked.apply(source, event)
        if place % 40 == 0:
            numbers_of(asked, window_s=10)
    assert quiet.digest() == asked.digest() and numbers_of(quiet) == numbers_of(asked)


def test_budget_use_is_what_was_scheduled_of_what_could_be() -> None:
    timeline = Timeline(30, engine=ENGINE)
    steps = [event for event in timeline.events if isinstance(event, Step)]
    window = numbers_of(timeline.state()).windows[-1]
    assert window.steps == len(steps)
    assert window.budget_use == pytest.approx(
        sum(step.tokens for step in steps) / (256 * len(steps))
    )


def test_goodput_counts_requests_within_all_targets_and_no_others() -> None:
    timeline = Timeline(80, rate=10)
    state = timeline.state()
    views = state.snapshot().requests
    span = (state.now - state.began) / NS_PER_S
    for text in ("ttft=40ms", "e2e=0.9s,tpot=11ms", "queue=1us", "e2e=1h"):
        slo = parse(text)
        met = sum(
            all(
                {
                    "ttft": view.ttft_ms,
                    "e2e": view.e2e_ms,
                    "queue": view.queue_ms,
                    "tpot": view.tpot_ms if view.output_tokens > 1 else 0.0,
                }[name]
                <= ms
                for name, ms in slo.targets
            )
            for view in views
        )
        found = numbers_of(state, Ask(slo=slo)).windows[-1].all.slo
        assert found is not None and (found.met, found.judged, found.unknown) == (met, 80, 0)
        assert found.goodput == pytest.approx(met / span)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ttft=500ms,itl=50ms", "ttft=500ms,itl=50ms"),
        (" itl = 0.05 s ", "itl=50ms"),
        ("e2e<=2min", "e2e=120s"),
        ("", ""),
    ],
)
def test_targets_are_read_in_any_unit(text: str, told: str) -> None:
    assert str(parse(text)) == told


@pytest.mark.parametrize(
    "text",
    [
        "ttft",
        "speed=3ms",
        "itl=fast",
        "itl=-1ms",
        "itl=0",
        "itl=nan",
        "ttft=1ms,ttft=2ms",
        "itl=1e999s",
        "\x1b[2J=1ms",
    ],
)
def test_a_wrong_target_is_told_in_a_sentence(text: str) -> None:
    with pytest.raises(SloError) as caught:
        parse(text)
    assert 10 < len(str(caught.value)) < 120 and "\n" not in str(caught.value)

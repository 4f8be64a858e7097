"""For what a request waits: each limit, in the order in which the engine takes requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Begin,
    Closed,
    Engine,
    Event,
    Finished,
    Preempted,
    Queued,
    Received,
    Released,
    Scheduled,
    SourceGone,
    Step,
    pack_u32,
)
from engine_hooks.protocol.stages import Stage
from tests.effort import examples
from tests.state.story import MS, START
from tests.state.test_properties import fold
from tests.state.traces import simulate
from tracer.analysis.diagnosis.rules import admission as rule
from tracer.analysis.diagnosis.thresholds import TABLE
from tracer.state.engine import admission
from tracer.state.trace_state import TraceState
from tracer.state.view import Limit, Phase, Wait

ENGINE = Engine(
    START,
    "vllm",
    "1",
    "m",
    "bf16",
    "cpu",
    num_blocks=100,
    block_size=16,
    block_bytes=1024,
    max_batch=4,
    max_batch_tokens=64,
    chunked_prefill=1,
    max_context=1600,
)


class Story:
    """An engine with some requests that run and some that wait."""

    def __init__(self, **engine: int | str) -> None:
        self.state = TraceState()
        self.t = START
        self.tell(msgspec.structs.replace(ENGINE, **engine))
        self.n = 0

    def tell(self, *events: Event) -> None:
        for event in events:
            self.t = max(self.t, event.t)
            self.state.apply("engine", event)

    def queue(self, *prompts: int, key: int | None = None) -> list[int]:
        """Requests with these prompts, a ms apart; their keys."""
        keys = []
        for prompt in prompts:
            self.t += MS
            number = key or 100 + len(self.state.requests.order)
            keys.append(number)
            self.tell(
                Received(self.t, number, f"r{number}"),
                Queued(self.t, number, f"r{number}", prompt, 50),
            )
        return keys

    def run(
        self, *keys: int, free: int = 50, cached: int = 0, chunk: int | None = None, **gauges: int
    ) -> None:
        """A step in which `keys` run their prompts (all of it, or `chunk` tokens)."""
        self.t += MS
        odd: list[int] = []
        for key in keys:
            request = self.state.requests.get("engine", key)
            assert request is not None
            if request.lookup is None:
                self.tell(Scheduled(self.t, key, self.t, 0, 0, 1))
                odd += [key, chunk or request.prompt_tokens, 0 if chunk else 1]
        self.n += 1
        source = self.state.sources["engine"]
        members = {*source.batch.members, *keys}
        tokens = sum(odd[1::3]) + len(members) - len(odd) // 3
        joined = pack_u32(key for key in keys if key not in source.batch.members)
        self.tell(
            Step(
                self.t,
                self.n,
                token=MS // 2,
                end=MS,
                batch=len(members),
                tokens=tokens,
                joined=joined,
                odd=pack_u32(odd),
                used=100 - free - cached,
                cached=cached,
                free=free,
                running=gauges.get("running", len(members)),
                waiting=gauges.get("waiting", 0),
            )
        )

    @property
    def waits(self) -> list[Wait]:
        """Who waits, for what."""
        return list(self.state.snapshot(now=self.t + MS).waits)

    @property
    def limits(self) -> list[tuple[str, str]]:
        """Limit of each, and behind whom."""
        return [(wait.limit.value, wait.behind) for wait in self.waits]


def test_slots_keep_waiting_when_all_are_taken() -> None:
    story = Story()
    story.run(*story.queue(8, 8, 8, 8))
    first, second = story.queue(8, 8)
    assert story.limits == [("slots", ""), ("slots", f"r{first}")]
    assert [wait.key for wait in story.waits] == [("engine", first), ("engine", second)]
    assert (story.waits[0].needs, story.waits[0].has, story.waits[0].place) == (1, 0, 1)


def test_the_next_step_takes_as_many_as_there_are_slots() -> None:
    story = Story(max_batch_tokens=4096)
    story.run(*story.queue(8, 8))
    _, _, third, _ = story.queue(8, 8, 8, 8)
    assert story.limits == [("step", ""), ("step", ""), ("slots", ""), ("slots", f"r{third}")]


def test_the_token_budget_keeps_waiting_while_a_long_prompt_is_cut_to_it() -> None:
    story = Story()
    story.run(*story.queue(1000), chunk=64)
    story.queue(10)
    assert story.limits == [("tokens", "")]
    assert story.waits[0].has == 0


def test_prompts_that_come_together_share_the_token_budget_of_the_next_step() -> None:
    story = Story()
    story.run(*story.queue(8))
    story.queue(60, 60, 60)
    assert [limit for limit, _ in story.limits] == ["step", "step", "tokens"]


def test_a_prompt_that_is_not_cut_waits_for_a_step_that_it_fits_into() -> None:
    story = Story(chunked_prefill=0, max_batch_tokens=100)
    story.queue(60, 60)
    assert [limit for limit, _ in story.limits] == ["step", "tokens"]


def test_blocks_keep_waiting_and_whoever_stands_behind_waits_for_the_same() -> None:
    story = Story(max_batch_tokens=4096)
    story.run(*story.queue(8), free=3, cached=2)
    large, small = story.queue(100, 8)
    assert story.limits == [("kv", ""), ("kv", f"r{large}")]
    assert (story.waits[0].needs, story.waits[0].has) == (7, 5)
    assert story.waits[1].key == ("engine", small)
    engine = story.state.snapshot(now=story.t + MS).engines[0]
    assert engine.bound_by is Limit.KV


def test_what_is_only_cached_counts_as_room() -> None:
    story = Story(max_batch_tokens=4096)
    story.run(*story.queue(8), free=0, cached=60)
    story.queue(100)
    assert story.limits == [("step", "")]


def test_a_scheduler_with_a_margin_keeps_its_blocks_for_what_runs() -> None:
    roomy, tight = Story(scheduler="FIFOScheduler"), Story(scheduler="FIFOScheduler")
    roomy.run(*roomy.queue(8), free=20)
    tight.run(*tight.queue(8), free=10)
    roomy.queue(8)
    tight.queue(8)
    assert (roomy.limits, tight.limits) == ([("step", "")], [("kv", "")])


def test_more_blocks_than_exist_are_told_at_once_and_block_only_an_idle_engine() -> None:
    story = Story(max_batch_tokens=4096)
    giant, _ = story.queue(1601, 8)
    assert story.limits == [("never", ""), ("never", f"r{giant}")]
    assert (story.waits[0].needs, story.waits[0].has) == (101, 100)
    other = Story(max_batch_tokens=4096)
    other.run(*other.queue(8))
    other.queue(1601, 8)
    assert other.limits == [("never", ""), ("step", "")]


def test_a_preempted_request_is_taken_first_and_needs_what_it_had_generated_too() -> None:
    story = Story(max_batch_tokens=4096)
    (key,) = story.queue(30)
    story.run(key)
    for _ in range(10):
        story.run(free=5)
    story.queue(8)
    story.t += MS
    story.tell(Preempted(story.t, key, "recompute", 40, 11, 1))
    waits = story.waits
    assert [(wait.key[1], wait.preempted, wait.tokens) for wait in waits] == [
        (key, True, 41),
        (101, False, 8),
    ]
    assert waits[0].since == story.t
    assert story.state.snapshot(now=story.t).requests[0].blocks != 1


def test_one_that_was_passed_over_although_there_was_room_waits_for_a_reason_not_told() -> None:
    story = Story(max_batch_tokens=4096)
    (running,) = story.queue(8)
    story.queue(8)
    story.run(running)
    assert story.limits == [("unknown", "")]


def test_who_found_a_full_step_waits_for_the_budget_though_the_next_has_room() -> None:
    story = Story(max_batch_tokens=64)
    running, waiting = story.queue(64, 8)
    story.run(running)
    assert story.limits == [("tokens", "")]
    assert story.waits[0].key == ("engine", waiting)


def test_blocks_that_came_back_since_the_last_batch_was_chosen_are_room_for_the_next_one() -> None:
    story = Story(max_batch_tokens=4096)
    one, other = story.queue(800, 700)
    story.run(one, other, free=6)
    story.queue(160)
    assert story.limits == [("kv", "")]
    story.tell(Finished(story.t + MS, one, "stop", 1), Released(story.t + MS, one, 40, 10))
    engine = story.state.snapshot(now=story.t + MS).engines[0]
    assert (engine.used, engine.cached, engine.free) == (44, 10, 46)
    assert story.limits == [("step", "")]
    story.run(free=30, cached=26)
    engine = story.state.snapshot(now=story.t + MS).engines[0]
    assert (engine.used, engine.cached, engine.free) == (44, 26, 30)


def test_blocks_given_back_before_a_batch_are_in_its_gauges_in_any_order() -> None:
    """Engines tell a step at its end, after what happened in it."""
    story = Story(max_batch_tokens=4096)
    one, other = story.queue(100, 100)
    story.run(one, other, free=80)
    begin = story.t + 10 * MS
    story.tell(Finished(begin - MS, one, "stop", 1), Released(begin - MS, one, 7, 0))
    story.tell(Finished(begin + 2 * MS, other, "stop", 1), Released(begin + 2 * MS, other, 7, 0))
    story.tell(
        Step(
            begin,
            2,
            scheduled=MS,
            token=3 * MS,
            end=3 * MS,
            batch=1,
            tokens=1,
            left=pack_u32([one]),
            used=13,
            cached=0,
            free=87,
            running=1,
            waiting=0,
        )
    )
    engine = story.state.snapshot(now=begin + 4 * MS).engines[0]
    assert (engine.used, engine.free) == (6, 94)


def test_what_the_engine_did_not_say_is_no_limit() -> None:
    story = Story(num_blocks=-1, block_size=-1, max_batch=-1, max_batch_tokens=-1)
    story.run(*story.queue(8))
    story.queue(100_000)
    assert story.limits == [("step", "")]


def test_a_request_on_its_way_to_the_queue_stands_behind_those_in_it() -> None:
    story = Story()
    story.tell(Received(story.t, 9, "early"), Begin(story.t, 9, int(Stage.ADMISSION)))
    story.queue(8)
    assert [(wait.key[1], wait.limit.value) for wait in story.waits] == [(101, "step"), (9, "hop")]


def test_nobody_waits_at_an_engine_that_is_gone() -> None:
    story = Story()
    story.queue(8)
    story.tell(SourceGone(story.t, "ended"))
    assert story.waits == []


@pytest.mark.parametrize(
    ("step", "limit"),
    [
        ({"batch": 4, "tokens": 4, "free": 50}, Limit.SLOTS),
        ({"batch": 2, "tokens": 60, "free": 50}, Limit.TOKENS),
        ({"batch": 2, "tokens": 2, "free": 4}, Limit.KV),
        ({"batch": 2, "tokens": 2, "free": 50}, None),
    ],
)
def test_a_batch_is_bound_by_what_its_step_used_up_when_nobody_waits(
    step: dict[str, Any], limit: Limit | None
) -> None:
    story = Story()
    story.tell(
        Step(
            story.t,
            1,
            token=1,
            end=MS,
            used=10,
            cached=0,
            running=step["batch"],
            waiting=0,
            joined=pack_u32(range(1, step["batch"] + 1)),
            **step,
        )
    )
    assert story.state.snapshot(now=story.t + MS).engines[0].bound_by is limit


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10_000), part=st.floats(0.1, 1.0), blocks=st.sampled_from([40, 60, 400]))
def test_those_waiting_or_preempted_are_in_line_and_only_behind_a_blocked_one_behind(
    seed: int, part: float, blocks: int
) -> None:
    trace = simulate(seed, requests=12, blocks=blocks, split=seed % 2 == 0)
    state = fold(trace.headers, trace.events[: int(len(trace.events) * part)])
    snapshot = state.snapshot()
    waiting = {
        view.key for view in snapshot.requests if view.phase in (Phase.WAITING, Phase.PREEMPTED)
    }
    assert {wait.key for wait in snapshot.waits} == waiting
    held = None
    places: dict[str, int] = {}
    for wait in snapshot.waits:
        places[wait.engine] = places.get(wait.engine, 0) + 1
        assert wait.place == places[wait.engine]
        if wait.behind:
            assert held is not None and (wait.behind, wait.limit) == (held.id, held.limit)
        elif held is None and wait.limit not in (Limit.STEP, Limit.HOP, Limit.NEVER):
            held = wait
        if wait.limit is Limit.KV and not wait.behind:
            assert wait.needs is not None and wait.has is not None and wait.needs > wait.has


def test_the_diagnosis_goes_by_the_same_arithmetic() -> None:
    assert TABLE["TOKENS_FULL"].value == admission.TOKENS_FULL
    assert TABLE["KV_RECLAIMABLE"].value == admission.KV_RECLAIMABLE
    assert (admission.too_large(1600, 16, 100), admission.too_large(1601, 16, 100)) == (None, 101)
    assert (admission.too_large(1601, 0, 100), admission.too_large(-1, 16, 100)) == (None, None)
    for prompt, need in ((1600, None), (1601, 101)):
        asked = SimpleNamespace(prompt_tokens=prompt)
        assert rule.too_large(SimpleNamespace(num_blocks=100, block_size=16), asked) == need  # type: ignore[arg-type]


def test_the_length_of_finished_ones_is_their_mean_once_nothing_is_under_way() -> None:
    story = Story(max_batch_tokens=4096)
    first, second, later = story.queue(100, 200, 900)
    story.run(first, second, later)
    for key, output in ((first, 20), (second, 40), (later, 1)):
        if key == later:
            story.t += 5 * NS_PER_S
        story.tell(Finished(story.t + 1, key, "stop", output))
        story.tell(Released(story.t + 2, key, 1, 0), Closed(story.t + 3, key, 200))
    assert story.state.snapshot().engines[0].mean_tokens == 180

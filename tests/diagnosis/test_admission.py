"""Stage 4: who waits, for what, and whether there is just too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_hooks.protocol.events import (
    Engine,
    EngineStatus,
    Heartbeat,
    Queued,
    Received,
    Scheduled,
)
from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import found, only, seconds, silent, told
from tests.diagnosis.scenario import Ask, Lab, fold, ns, poisson, steady
from tests.state.story import Story, step
from tests.state.story import ns as story_ns
from tracer.analysis.diagnosis import diagnose
from tracer.cli.target_state import observed

ROOT = Path(__file__).resolve().parents[2]


def test_more_requests_than_can_be_served_are_over_capacity() -> None:
    """Service 185 ms, offered 6 then 10 requests a second: the queue grows, inference stays
    flat."""
    lab = Lab(max_batch=8, decode_ms=lambda batch, context: 22, prefill_ms=0.02)
    arrivals = [*steady(4, 20), *steady(10, 60, begin=20)]
    state = lab.play([Ask(t, 200, 60) for t in arrivals])
    finding = only(state, "over-capacity")
    assert finding.stage is Stage.ADMISSION
    assert (
        "10 requests/s come" in finding.statement
        and "all 8 batch slots are taken" in finding.statement
    )
    assert finding.culprit is None and finding.affected_total > 300
    assert abs(seconds(finding, state)[0] - 20) < 1
    assert any(text.startswith("D1: TTFT") for text in finding.explains)


def test_slots_are_the_limit_while_the_kv_cache_is_nearly_empty() -> None:
    """Running 337, waiting 633, KV 9.5 %: sequences or token budget, not KV."""
    lab = Lab(max_batch=337, blocks=52_000, budget=8192)
    finding = only(lab.play([Ask(0.001 * n, 200, 60) for n in range(970)]), "batch-limit")
    assert finding.stage is Stage.ADMISSION and "all 337 batch slots are taken" in finding.statement
    assert "KV at most" in finding.statement


@pytest.mark.slow
def test_slots_or_budget_are_told_from_kv_where_the_engine_does_not_say_its_limits() -> None:
    lab = Lab(max_batch=337, blocks=52_000, budget=8192, tell_limits=False)
    finding = only(lab.play([Ask(0.001 * n, 200, 60) for n in range(970)]), "batch-limit")
    assert "sequences or tokens a step, not KV" in finding.statement


def test_a_full_kv_cache_is_the_limit() -> None:
    """Running 34, waiting 18, KV 99.2 %."""
    finding = only(
        Lab(max_batch=256, blocks=2000).play([Ask(0.01 * n, 800, 200) for n in range(90)]),
        "kv-blocks",
    )
    assert finding.stage is Stage.ADMISSION and "of 2,000 blocks are held" in finding.statement


def test_kv_blocks_are_the_limit_where_little_is_held_but_the_next_prompt_is_large() -> None:
    state = Lab(blocks=26, prefill_ms=5).play([Ask(t, 240, 10) for t in poisson(1.2, 40)])
    assert found(state, "kv-blocks").stage is Stage.ADMISSION


def test_a_prompt_larger_than_the_pool_can_never_be_admitted() -> None:
    """Pool 1,000 blocks of 16, request of 20,000 tokens, no step ever."""
    state = Lab(blocks=1000).play([Ask(0, 20_000, 5)], until=6)
    finding = only(state, "never-admitted")
    assert finding.stage is Stage.ADMISSION and finding.confidence == 1.0
    assert "need 1,250 KV blocks of 16, the pool has 1,000" in finding.statement
    assert finding.end is None and finding.lost_ms > 5000


def test_who_stands_behind_a_prompt_that_can_never_be_admitted_has_it_as_culprit() -> None:
    state = Lab(blocks=1000).play(
        [Ask(0, 20_000, 5), *(Ask(1 + n, 100, 5) for n in range(12))], until=30
    )
    finding = only(state, "never-admitted")
    assert finding.culprit == "engine-r1" and finding.affected_total == 13


def test_a_large_prompt_that_fits_is_no_fault() -> None:
    silent(Lab(blocks=2000).play([Ask(0, 20_000, 5)]))


def test_admission_that_hangs_with_free_blocks_is_told() -> None:
    story = Story()
    story.tell(
        Engine(story_ns(0), "toy", num_blocks=160, block_size=16),
        EngineStatus(story_ns(0), "ready"),
    )
    for key in range(1, 4):
        story.tell(
            Received(story_ns(10 * key), key, f"r{key}"),
            Queued(story_ns(10 * key + 1), key, f"r{key}", 100),
        )
    story.tell(*(Heartbeat(story_ns(1000 * n)) for n in range(8)))
    finding = only(story.state, "admission-blocked")
    assert (
        finding.stage is Stage.ADMISSION and "3 requests waiting, none running" in finding.statement
    )


def test_a_step_in_progress_does_not_block_admission() -> None:
    story = Story()
    story.tell(
        Engine(story_ns(0), "toy", num_blocks=160, block_size=16),
        EngineStatus(story_ns(0), "ready"),
    )
    story.tell(Received(story_ns(0), 1, "r1"), Queued(story_ns(1), 1, "r1", 2000),
               Scheduled(story_ns(3), 1, story_ns(2)))  # fmt: skip
    story.tell(Received(story_ns(10), 2, "r2"), Queued(story_ns(11), 2, "r2", 100))
    story.tell(*(Heartbeat(story_ns(1000 * n)) for n in range(8)))
    assert told(story.state) == []


def test_the_way_to_the_queue_is_told_from_the_queue() -> None:
    state = Lab(hop_ms=lambda t: 900).play([Ask(t, 100, 20) for t in poisson(2, 40)])
    finding = only(state, "queue-hop")
    assert "between the front end and the engine's queue" in finding.statement


def test_one_engine_of_two_at_its_limit_is_found_while_the_mean_looks_fine() -> None:
    busy = Lab(source="a", max_batch=4, decode_ms=lambda batch, context: 40).record(
        [Ask(t, 100, 60) for t in steady(3, 40)], until=75
    )
    idle = Lab(source="b", max_batch=4, seed=1).record(
        [Ask(t, 100, 20) for t in poisson(0.5, 70)], until=75
    )
    finding = only(fold([busy, idle]), "unequal-engines")
    assert finding.engine == "a" and finding.stage is Stage.ADMISSION
    assert all(request.startswith("a-") for request in finding.affected)


def test_preemption_thrash_names_the_request_that_keeps_losing_its_place() -> None:
    """B: 8,192 tokens scheduled and then preempted, ten times over; A's ITL doubles meanwhile."""
    lab = Lab(budget=2048, blocks=4000, prefill_ms=0.02, kick=lambda key, computed, times: key == 2
              and computed >= 8192 and times < 10)  # fmt: skip
    state = lab.play([Ask(0, 100, 600), Ask(3, 30_000, 20)])
    finding = only(state, "preemption")
    assert finding.stage is Stage.ADMISSION
    assert finding.culprit == "engine-r2" and "engine-r1" in finding.affected
    assert "10 preemptions" in finding.statement and "lost its place 10 times" in finding.statement
    assert "tokens computed again" in finding.statement


def test_preemptions_of_a_cache_that_is_too_small_are_told_with_their_cost() -> None:
    state = Lab(blocks=60).play([Ask(12 * t, 100, 250) for t in range(6) for _ in range(4)])
    finding = only(state, "preemption")
    assert finding.stage is Stage.ADMISSION and "KV at" in finding.statement


def test_preemptions_and_the_longer_queue_for_the_same_blocks_are_one_finding() -> None:
    """97 preemptions of 50 requests: what is admitted cannot grow to its end, however many wait
    beside it."""
    state = Lab(blocks=60).play([Ask(4 * t, 100, 250) for t in range(15) for _ in range(4)])
    finding = only(state, "preemption")
    assert any("KV blocks are used up" in text for text in finding.explains)


def test_one_preemption_is_nobodys_fault() -> None:
    lab = Lab(kick=lambda key, computed, times: key == 3 and computed > 110 and times < 1)
    silent(lab.play([Ask(t, 100, 60) for t in poisson(2, 30)]))


def test_a_second_queueing_is_a_preemption_and_never_a_negative_queue() -> None:
    """QUEUED at 1, SCHEDULED at 2, QUEUED again at 50."""
    story = Story()
    story.tell(Engine(story_ns(0), "toy", num_blocks=160, block_size=16))
    story.tell(
        Received(story_ns(900), 1, "r1"),
        Queued(story_ns(1000), 1, "r1", 64),
        Scheduled(story_ns(2000), 1, story_ns(2000)),
        step(2000, 1, batch=1, joined=(1,), odd=(1, 64, 1), token=30, end=31),
    )
    story.tell(*(step(2040 + 40 * n, 2 + n, batch=1, token=30, end=31) for n in range(20)))
    story.tell(Queued(story_ns(50_000), 1, "r1", 64, resumed=True), Heartbeat(story_ns(50_500)))
    view = story.request()
    assert view.queue_ms == 1000 and view.preemptions == 1
    assert "over-capacity" not in told(story.state)


def test_a_last_token_before_the_first_leaves_an_interval_out_and_alarms_nobody() -> None:
    story = Story()
    story.tell(
        Engine(story_ns(0), "toy"),
        Received(story_ns(100), 1, "r1"),
        Queued(story_ns(100), 1, "r1", 8),
    )
    story.tell(step(100, 1, batch=1, joined=(1,), odd=(1, 8, 1), token=500, end=501))
    assert diagnose(story.state).findings == ()


def test_bursts_at_half_load_are_no_fault() -> None:
    arrivals = sorted(t + 0.01 * n for t in steady(0.2, 60) for n in range(6))
    silent(Lab(max_batch=8).play([Ask(t, 200, 30) for t in arrivals]))


def test_instants_of_the_scenario_are_those_of_the_trace() -> None:
    state = Lab().play([Ask(2.0, 50, 5)])
    assert state.requests.order[0].received == ns(2.0)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recordings").glob("*.trace")), ids=lambda path: path.stem
)
def test_kv_is_ruled_out_only_where_the_pool_was_not_short(path: Path) -> None:
    """Real engines meet several limits by turns: what the panels show as short may not be denied in
    a sentence."""
    state = observed(str(path))
    for finding in diagnose(state).findings:
        if "not KV" not in finding.statement:
            continue
        steps = state.snapshot(limit=0).steps
        pool = next(engine.num_blocks for engine in state.snapshot().engines if engine.num_blocks)
        short = [
            step
            for step in steps
            if step.free is not None and step.free + (step.cached or 0) < 0.05 * pool
        ]
        assert len(short) < len(steps) / 5, finding.statement

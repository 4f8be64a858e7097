"""The KV pool in figures, the age of cached blocks, and how far requests have got."""

from __future__ import annotations

import numpy as np
import pytest

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Engine,
    Evicted,
    Finished,
    Preempted,
    Queued,
    Received,
    Released,
    Scheduled,
)
from tests.state.story import Story, ns, step
from tests.state.test_properties import fold
from tests.state.traces import simulate
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.state.engine.pool import AGES, age_classes, cached_ages, pool_of, prefix_of
from tracer.state.view import EngineView, Phase


def engine(**fields: object) -> EngineView:
    values: dict[str, object] = {
        "source": "e",
        "title": "e",
        "role": "engine",
        "pid": 1,
        "num_blocks": 1000,
        "block_size": 16,
        "block_bytes": 32_768,
        "used": 400,
        "cached": 100,
        "free": 500,
        "facts": (("max_context", 3200),),
        "holders": 20,
        "held": 400,
        "most_held": 50,
        "mean_tokens": 800.0,
    }
    return EngineView(**(values | fields))  # type: ignore[arg-type]


def test_how_many_more_fit_by_the_longest_and_by_the_mean() -> None:
    pool = pool_of(engine())
    assert (pool.available, pool.token_bytes, pool.mean_held) == (600, 2048.0, 20.0)
    assert (pool.longest_blocks, pool.fit_worst) == (200, 3)
    assert (pool.mean_blocks, pool.fit_mean) == (50, 12)


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        ({"free": None}, ("available", "fit_worst", "fit_mean")),
        ({"facts": ()}, ("longest", "fit_worst")),
        ({"block_size": None}, ("token_bytes", "fit_worst", "fit_mean")),
        ({"block_bytes": None}, ("token_bytes",)),
        ({"mean_tokens": None}, ("fit_mean", "mean_blocks")),
        ({"holders": 0, "held": 0}, ("mean_held",)),
    ],
)
def test_what_was_not_told_is_not_known(
    missing: dict[str, object], unknown: tuple[str, ...]
) -> None:
    pool = pool_of(engine(**missing))
    assert all(getattr(pool, name) is None for name in unknown)


def held(story: Story, key: int, blocks: tuple[int, ...], at: float, n: int) -> None:
    story.tell(
        Received(ns(at), key, f"r{key}"),
        Queued(ns(at), key, f"r{key}", 16 * len(blocks), 64),
        Scheduled(ns(at), key, ns(at), 16, 1, len(blocks) - 1),
    )
    story.tell(
        step(
            at,
            n,
            batch=1,
            joined=(key,),
            left=(key - 1,) if key > 1 else (),
            odd=(key, 16, 1),
            token=1,
            end=1,
            blocks=(key, len(blocks)),
            block_ids=(key, 0, len(blocks), *blocks),
        )
    )


def test_cached_blocks_are_told_by_the_time_for_which_nobody_has_held_them() -> None:
    story = Story()
    for key, (begin, end) in enumerate(((0, 1_000), (2_000, 50_000), (60_000, 95_000)), 1):
        held(story, key, (3 * key, 3 * key + 1), begin, key)
        story.tell(Finished(ns(end), key, "stop", 1), Released(ns(end), key, 1, 1))
    snapshot = story.state.snapshot(now=ns(100_000))
    assert cached_ages(snapshot) == (1, 1, 1)
    classes = age_classes(snapshot.kv_blocks, snapshot.kv_since, snapshot.now)
    assert {block: int(classes[block]) for block in (3, 6, 9)} == {3: 2, 6: 1, 9: 0}
    assert int((classes >= 0).sum()) == 3
    assert cached_ages(story.state.snapshot(now=ns(95_000 + AGES[1] / 1e6 + 1))) == (0, 0, 3)


def test_a_block_that_is_held_or_evicted_has_no_age() -> None:
    story = Story()
    held(story, 1, (0, 1, 2), 0, 1)
    story.tell(Finished(ns(10), 1, "stop", 1), Released(ns(10), 1, 0, 3))
    assert cached_ages(story.state.snapshot()) == (3, 0, 0)
    held(story, 2, (1, 5), 20, 2)
    assert cached_ages(story.state.snapshot()) == (2, 0, 0)
    story.tell(Evicted(ns(30), 1, 1))
    snapshot = story.state.snapshot()
    assert cached_ages(snapshot) == (1, 0, 0)
    assert snapshot.engines[0].evicted == 1


def test_without_block_ids_ages_are_not_known() -> None:
    assert cached_ages(Story().state.snapshot()) is None


def test_ages_of_a_map_agree_with_a_plain_loop() -> None:
    state = Timeline(140, rate=9.0).state(START + 9 * NS_PER_S)
    snapshot = state.snapshot(now=START + 60 * NS_PER_S)
    ages = snapshot.now - np.frombuffer(snapshot.kv_since, "<i8")
    expected = [0, 0, 0]
    for block, byte in enumerate(snapshot.kv_blocks[: len(ages)]):
        if byte == 1:
            expected[0 if ages[block] <= AGES[0] else 1 if ages[block] <= AGES[1] else 2] += 1
    assert sum(expected) > 50
    assert cached_ages(snapshot) == tuple(expected)


def test_hits_of_the_prefix_are_the_first_blocks_of_the_prompt() -> None:
    state = Timeline(140, rate=9.0).state(START + 9 * NS_PER_S)
    views = state.snapshot().requests
    for view in views:
        prefix = prefix_of(view, 16)
        if view.reused_tokens is None:
            assert prefix is None
            continue
        assert prefix is not None and view.prompt_tokens is not None
        assert prefix.prompt == -(-view.prompt_tokens // 16)
        assert prefix.hit == view.reused_tokens // 16
        assert prefix.prompt + prefix.grown == -(
            -(view.prompt_tokens + max(0, view.output_tokens - 1)) // 16
        )
        assert prefix.longest is not None and prefix.longest >= prefix.prompt + prefix.grown
    assert any(view.reused_tokens for view in views)
    assert prefix_of(views[0], None) is None


def test_position_and_tokens_of_the_last_step_follow_the_engine() -> None:
    """The timeline's own scheduler says what each request has computed and ran last."""
    timeline = Timeline(60, rate=9.0)
    for at in range(1, 9):
        state = timeline.state(START + at * NS_PER_S)
        last = state.sources["engine-1"].batch.last
        assert last is not None
        running = [
            view
            for view in state.snapshot().requests
            if view.phase in (Phase.PREFILL, Phase.DECODE)
        ]
        assert (
            sum(view.step_tokens or 0 for view in state.snapshot().requests if view.closed is None)
            <= last.tokens
        )
        for view in running:
            assert (
                view.step_tokens is not None
                and view.computed_tokens is not None
                and view.prompt_tokens
            )
            if view.phase is Phase.DECODE:
                assert view.computed_tokens == view.prompt_tokens + view.output_tokens - 1
            else:
                done = (view.cached_tokens or 0) + sum(chunk.tokens for chunk in view.chunks)
                assert view.computed_tokens == done < view.prompt_tokens
            assert view.blocks == -(-view.computed_tokens // 16)


@pytest.mark.parametrize("seed", range(4))
def test_position_grows_to_the_whole_length_whatever_is_preempted(seed: int) -> None:
    trace = simulate(seed, requests=10, blocks=40)
    end = 0
    for part in range(1, 21):
        state = fold(trace.headers, trace.events[: len(trace.events) * part // 20])
        for view in state.snapshot().requests:
            if view.phase in (Phase.DONE, Phase.LOST, Phase.TEARDOWN):
                assert view.computed_tokens is None
                end += 1
            elif view.phase is Phase.PREEMPTED:
                assert view.computed_tokens == 0
            elif view.computed_tokens is not None and view.prompt_tokens is not None:
                assert 0 <= view.computed_tokens <= view.prompt_tokens + view.output_tokens
    assert end


def test_what_was_lost_by_a_preemption_has_to_be_computed_again() -> None:
    story = Story()
    story.tell(Engine(ns(0), "e", num_blocks=10, block_size=16, max_batch=4, max_batch_tokens=64))
    story.tell(
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 100, 50),
        Scheduled(ns(2), 1, ns(2), 32, 2, 5),
    )
    story.tell(step(2, 1, batch=1, joined=(1,), odd=(1, 64, 0), token=1, end=1, blocks=(1, 6)))
    view = story.request()
    assert (view.computed_tokens, view.step_tokens, view.reused_tokens, view.blocks) == (
        96,
        64,
        32,
        6,
    )
    story.tell(Preempted(ns(4), 1, "recompute", 96, 0, 1))
    view = story.request()
    assert (view.computed_tokens, view.blocks) == (0, 0)
    story.tell(Scheduled(ns(6), 1, ns(6), 16, 1, 5, resumed=True))
    story.tell(step(6, 2, batch=1, joined=(1,), odd=(1, 48, 0), token=1, end=1, blocks=(1, 4)))
    view = story.request()
    assert (view.computed_tokens, view.step_tokens, view.reused_tokens, view.blocks) == (
        64,
        48,
        16,
        4,
    )


def test_tokens_of_the_step_are_told_apart_into_prompts_and_decode() -> None:
    timeline = Timeline(60, rate=9.0, engine=ENGINE)
    state = timeline.state(START + 3 * NS_PER_S)
    view, last = state.snapshot().engines[0], state.snapshot().steps[-1]
    assert (view.step_tokens, view.prefill_tokens) == (last.tokens, last.prefill_tokens)
    assert view.held == sum(
        v.blocks or 0 for v in state.snapshot().requests if v.closed is None and v.blocks
    )

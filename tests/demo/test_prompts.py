"""The demo's script: varied, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tracer.demo import prompts
from tracer.demo.prompts import WEIGHTS, Plan, Script


def plans(seed: int, count: int) -> list[Plan]:
    script = Script(seed)
    return [script.next() for _ in range(count)]


def test_the_same_seed_gives_the_same_visits() -> None:
    assert plans(7, 50) == plans(7, 50)
    assert plans(7, 50) != plans(8, 50)


def test_kinds_come_as_often_as_their_weights_say() -> None:
    count = 4_000
    seen = Counter(plan.kind for plan in plans(1, count))
    assert set(seen) == set(WEIGHTS)
    for kind, weight in WEIGHTS.items():
        assert abs(seen[kind] / count - weight / 100) < 0.03, kind


def test_arrivals_are_a_poisson_stream() -> None:
    script = Script(3)
    gaps = [script.gap(2.0) for _ in range(20_000)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert abs(mean - 0.5) < 0.02
    assert abs(spread - mean**2) < 0.02, (
        "of an exponential distribution the variance is the mean squared"
    )


def test_each_turn_but_the_first_is_thought_about() -> None:
    for plan in plans(2, 300):
        assert len(plan.think_s) == len(plan.turns) - 1
        assert plan.max_tokens > 0
        assert (plan.hang_up_after is not None) == (plan.kind == "hang-up")
        assert plan.streaming or plan.kind == "classify"


@pytest.mark.slow
def test_lengths_in_tokens_do_what_the_demo_is_for(model_dir: Path) -> None:
    """Prefix hits, chunked prefill and preemption need prompts of certain lengths, with the model's
    own tokeniser."""
    from transformers import AutoTokenizer

    tokeniser: Any = AutoTokenizer.from_pretrained(model_dir)

    def tokens(text: str) -> int:
        return len(tokeniser(text)["input_ids"])

    assert min(tokens(prompt) for prompt in prompts.SYSTEM_PROMPTS) > 6 * 16, (
        "several blocks to find again"
    )
    documents = [tokens(plan.turns[0]) for plan in plans(4, 400) if plan.kind == "document"]
    assert min(documents) > 256, "more than a step takes"
    assert max(documents) < 160 * 16 // 2, "two fit the cache"
    script = Script(5)
    crowd = [script.burst() for _ in range(script.burst_size())]
    assert sum(tokens(plan.turns[0]) + plan.max_tokens for plan in crowd) > 160 * 16, (
        "a crowd does not fit"
    )

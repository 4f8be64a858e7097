"""Gauges of vLLM's block pool, counted from its own calls."""

from __future__ import annotations

import pytest

from engine_hooks.vllm.blocks import BlockGauge
from tests.hooks.shapes import block, pool


def test_cached_blocks_are_those_with_a_prefix_that_nobody_holds() -> None:
    blocks = [block(hashed=False), block(0), block(1), block(0), block(0, hashed=False)]
    some = pool(blocks, free=3)
    gauge = BlockGauge(some)
    # 5 blocks, less the null block and 3 that nobody holds: 1 used; of the 3, 2 are cached
    assert gauge.counts() == (1, 2, 1)
    without = pool(blocks, free=3, caching=False)
    assert BlockGauge(without).counts() == (1, 0, 3)


def test_blocks_come_and_go() -> None:
    some = pool([block(hashed=False) for _ in range(10)], free=9)
    gauge = BlockGauge(some)
    gauge.kept([block(), block(hashed=False), block()])
    assert gauge.counts() == (0, 2, 7)
    gauge.reused(block(hashed=False))
    assert gauge.cached == 2
    gauge.reused(block())
    assert gauge.cached == 1
    gauge.evict(None, False, block())
    assert (gauge.cached, gauge.evicted) == (1, 0)
    gauge.evict(None, True, block(held=1))
    assert (gauge.cached, gauge.evicted) == (1, 1), "it belonged to somebody"
    gauge.evict(None, True, block(held=0))
    assert (gauge.cached, gauge.evicted) == (0, 2)
    gauge.reused(block())
    gauge.evict(None, True, block(held=0))
    assert (gauge.cached, gauge.evicted) == (0, 3), "never below nothing"


@pytest.mark.parametrize(("emptied", "cached", "left", "evicted"), [
    (True, 3, 0, 3), (True, 1, 0, 1), (True, 0, 0, 0), (False, 3, 3, 0), (True, -1, -1, 0),
])  # fmt: skip
def test_a_reset_evicts_what_was_cached(
    emptied: bool, cached: int, left: int, evicted: int
) -> None:
    some = pool([block()], free=0)
    gauge = BlockGauge(some)
    gauge.cached = cached
    gauge.reset(None, emptied)
    assert (gauge.cached, gauge.evicted) == (left, evicted)


def test_blocks_that_are_not_followed_stay_unknown() -> None:
    some = pool([block() for _ in range(10)], free=4)
    gauge = BlockGauge(some)
    gauge.cached = -1
    gauge.kept([block()])
    gauge.reused(block())
    gauge.evict(None, True, block())
    assert gauge.counts() == (5, -1, 4)

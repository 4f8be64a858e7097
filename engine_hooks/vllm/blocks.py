"""Blocks of vLLM's pool, as gauges: used, reusable, free.

The pool itself only knows which blocks nobody holds. Those of them that hold a reusable prefix are
counted here as they come and go, from the pool's own calls; nothing is walked in a step.
"""

from __future__ import annotations

from typing import Any
from weakref import ref


class BlockGauge:
    """The gauges of one block pool. `cached` blocks hold a prefix and belong to nobody, -1 when
    they are not followed; `evicted` prefixes were dropped so far."""

    def __init__(self, pool: Any) -> None:
        self._pool = ref(pool)
        self.evicted = 0
        self.cached = 0
        if pool.enable_caching:
            self.cached = sum(
                block.ref_cnt == 0 and block.block_hash is not None for block in pool.blocks
            )

    def counts(self) -> tuple[int, int, int]:
        """(used, cached, free) blocks; the null block belongs to none of them."""
        pool: Any = self._pool()
        available = pool.get_num_free_blocks()
        used = pool.num_gpu_blocks - 1 - available
        if self.cached < 0:
            return used, -1, available
        return used, self.cached, available - self.cached

    def kept(self, blocks: list[Any]) -> None:
        """Count blocks that are given back last because they hold a reusable prefix."""
        if self.cached >= 0:
            self.cached += sum(block.block_hash is not None for block in blocks)

    def reused(self, block: Any) -> None:
        """Count a free block that a request shares again."""
        if self.cached > 0 and block.block_hash is not None:
            self.cached -= 1

    def evict(self, _token: Any, evicted: bool, block: Any) -> None:
        if evicted:
            self.evicted += 1
            if self.cached > 0 and block.ref_cnt == 0:
                self.cached -= 1

    def reset(self, _token: Any, emptied: bool) -> None:
        if emptied and self.cached > 0:
            self.evicted += self.cached
            self.cached = 0

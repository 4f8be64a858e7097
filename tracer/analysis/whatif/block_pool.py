"""The KV cache of a simulated engine: blocks held, kept for reuse, and free."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracer.analysis.beside.observed import Settings


@dataclass(slots=True, eq=False)
class Running:
    """One request inside the engine. `computed` tokens in the KV cache, `todo` still to be computed
    before the next token, `left` tokens to yield, `private` blocks and `shared` (named) blocks
    held."""

    index: int
    todo: int
    left: int
    computed: int = 0
    produced: int = 0
    private: int = 0
    shared: list[int] = field(default_factory=list)
    token: float = -1.0
    """Instant of its latest token."""

    @property
    def held(self) -> int:
        return self.private + len(self.shared)


class BlockPool:
    """KV blocks: free, held, or kept for reuse under a name, the least recently used first."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.free = settings.blocks
        self.users: dict[int, int] = {}
        """Name of a block → sequences that hold it."""
        self.kept: dict[int, None] = {}
        """Those that nobody holds, oldest first."""

    @property
    def available(self) -> int:
        """Blocks free or cached: a cached one can be dropped."""
        return self.free + len(self.kept)

    def spare(self) -> int:
        """Return the blocks that can be taken before anything else happens to the pool."""
        if self.settings.evict_all and self.kept:
            return self.free - int(self.settings.margin * self.settings.blocks) - 1
        return self.available

    def steps_until_full(self, running: Sequence[Running], most: int) -> int:
        """Return in how many steps, `most` at most, each of `running` can take a token before
        blocks run short."""
        size, spare = self.settings.block_size, self.spare()
        if len(running) * (most // size + 1) <= spare:
            return most
        slack = [sequence.held * size - sequence.computed for sequence in running]
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            need = sum([-(-(middle - left) // size) for left in slack if left < middle])
            low, high = (middle, high) if need <= spare else (low, middle - 1)
        return low

    def tidy(self) -> bool:
        """Return whether the margin is free, after dropping the whole cache for it if need be."""
        least = self.settings.margin * self.settings.blocks
        if self.free < least and self.settings.evict_all and self.kept:
            self.evict(len(self.kept))
        return self.free >= least

    def evict(self, count: int) -> None:
        """Drop the cached blocks that were not used for longest."""
        for name in list(self.kept)[:count]:
            del self.kept[name], self.users[name]
            self.free += 1

    def match(self, names: Sequence[int], most: int) -> list[int]:
        """Return the blocks at the start of a prompt that are there, `most` at most."""
        return list(itertools.takewhile(self.users.__contains__, names[:most]))

    def hold(self, names: Sequence[int]) -> None:
        """Add these blocks to the table of one more sequence."""
        for name in names:
            self.kept.pop(name, None)
            self.users[name] += 1

    def fits(self, tokens: int, names: Sequence[int]) -> bool:
        """Return whether a new sequence finds blocks for `tokens`, beside those that it shares."""
        need = -(-tokens // self.settings.block_size) - len(names)
        return need <= self.available - sum(name in self.kept for name in names)

    def grow(self, sequence: Running, tokens: int) -> bool:
        """Take blocks for so many more tokens; False when there are none."""
        need = -(-(sequence.computed + tokens) // self.settings.block_size) - sequence.held
        if need > 0:
            if need > self.available:
                return False
            if need > self.free:
                self.evict(need - self.free)
            self.free -= need
            sequence.private += need
        return True

    def publish(self, sequence: Running, names: Sequence[int]) -> None:
        """Share the complete blocks of a prompt from now on."""
        complete = min(len(names), sequence.computed // self.settings.block_size, sequence.held)
        for name in names[len(sequence.shared) : complete]:
            if name in self.users:
                # Computed twice at the same time: one copy is enough.
                self.hold((name,))
                self.free += 1
            else:
                self.users[name] = 1
            sequence.private -= 1
            sequence.shared.append(name)

    def release(self, sequence: Running) -> None:
        """Give all blocks of a sequence back; those with a name are kept for reuse."""
        self.free += sequence.private
        for name in sequence.shared:
            self.users[name] -= 1
            if not self.users[name]:
                self.kept[name] = None
        sequence.private, sequence.shared = 0, []

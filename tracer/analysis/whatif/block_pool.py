"""The KV cache of a simulated engine: who holds how many blocks, which are kept for reuse, which
are free."""

from __future__ import annotations

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
        """Blocks in its table."""
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
        """Blocks that can be had, at worst by dropping cached ones."""
        return self.free + len(self.kept)

    def spare(self) -> int:
        """Blocks that can be taken before anything else happens to the pool."""
        if self.settings.evict_all and self.kept:
            return self.free - int(self.settings.margin * self.settings.blocks) - 1
        return self.available

    def steps_until_full(self, running: Sequence[Running], most: int) -> int:
        """In how many steps, `most` at most, each of `running` can take a token before blocks run
        short."""
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
        """Whether the margin is free, after dropping the whole cache for it where that is the
        way."""
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
        """The blocks at the begin of a prompt that are there, `most` at most."""
        found = []
        for name in names[:most]:
            if name not in self.users:
                break
            found.append(name)
        return found

    def hold(self, names: Sequence[int]) -> None:
        """One more sequence has these blocks in its table."""
        for name in names:
            self.kept.pop(name, None)
            self.users[name] += 1

    def fits(self, tokens: int, names: Sequence[int]) -> bool:
        """Whether a new sequence of so many tokens finds blocks, beside those that it shares."""
        need = -(-tokens // self.settings.block_size) - len(names)
        return need <= self.available - sum(name in self.kept for name in names)

    def grow(self, sequence: Running, tokens: int) -> bool:
        """Blocks for so many more tokens; False when there are none."""
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
        """The blocks of its prompt that are complete can be shared from now on."""
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
        """It gives all its blocks back; those with a name are kept for reuse."""
        self.free += sequence.private
        for name in sequence.shared:
            self.users[name] -= 1
            if not self.users[name]:
                self.kept[name] = None
        sequence.private, sequence.shared = 0, []

"""The KV cache of one engine: gauges, and which request holds which block where block ids are
traced."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

from engine_hooks.protocol.events import unpack_u32
from tracer.state.request.request import Request

FREE: Final = 0
CACHED: Final = 1
FIRST_SLOT: Final = 2
"""A block that a request holds is shown as `FIRST_SLOT` + the request's slot."""
SLOTS: Final = 256 - FIRST_SLOT
BLOCKS_SHOWN: Final = 1 << 20
"""Block ids from here on are not shown: no cache has as many, a hostile event might name one."""


class BlockMap:
    """One byte for each block of the pool, as `Snapshot.kv_blocks` shows it.

    Told by `Step.block_ids` (a request's block table from some place on), `Released` (given back:
    the first `cached` of a request's blocks stay in the prefix cache, in order of the prompt, the
    others are free) and `Evicted` (the longest cached go first: the engine says how many, not
    which).
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._since = array("q")
        """For each block the instant (ns) since which it is cached, where it is."""
        self._holders: dict[int, int] = {}
        """Requests that hold a block, for blocks held by any: the prefix cache shares them."""
        self._held: dict[int, list[int]] = {}
        """Block ids of a request, by its serial."""
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks in the prefix cache that no request holds, longest first."""

    @property
    def traced(self) -> bool:
        """Whether the engine tells block ids."""
        return bool(self._bytes)

    def held(self, request: Request) -> tuple[int, ...]:
        """Block ids that a request holds, in order of its tokens."""
        return tuple(self._held.get(request.serial, ()))

    def assign(self, request: Request, index: int, blocks: list[int]) -> None:
        """The block table of `request` holds `blocks` from `index` on."""
        held = self._held.get(request.serial)
        if held is None:
            held = self._held[request.serial] = []
        elif index < len(held):
            for block in held[index:]:
                if self._let_go(block):
                    self._bytes[block] = FREE
            del held[index:]
        slot = self._slots.get(request.serial)
        if slot is None:
            # With more requests than slots, several share one: the map tells blocks in use, not
            # every owner.
            slot = self._free_slots.pop() if self._free_slots else request.serial % SLOTS
            self._slots[request.serial] = slot
        shown, holders, cached, byte = self._bytes, self._holders, self._cached, FIRST_SLOT + slot
        for block in blocks:
            if block >= len(shown):
                if block >= BLOCKS_SHOWN:
                    continue
                more = block + 1 - len(shown)
                shown.extend(bytes(more))
                self._since.frombytes(bytes(8 * more))
            shown[block] = byte
            holders[block] = holders.get(block, 0) + 1
            if cached:
                cached.pop(block, None)
            held.append(block)

    def release(self, request: Request, cached: int, t: int = 0) -> None:
        """`request` gave its blocks back at `t`; `cached` of them stay for reuse (-1: not known,
        taken as none)."""
        shown, holders, since = self._bytes, self._holders, self._since
        for place, block in enumerate(self._held.pop(request.serial, ())):
            others = holders.pop(block, 1) - 1
            if others > 0:
                holders[block] = others
            elif place < cached:
                shown[block] = CACHED
                since[block] = t
                self._cached[block] = None
            else:
                shown[block] = FREE
        slot = self._slots.pop(request.serial, None)
        if slot is not None and slot not in self._slots.values():
            self._free_slots.append(slot)

    def _let_go(self, block: int) -> bool:
        """One holder less; returns whether none is left."""
        left = self._holders.pop(block, 1) - 1
        if left > 0:
            self._holders[block] = left
        return left <= 0

    def exchange(self, old: Request, new: Request) -> None:
        """`old` was joined with `new`."""
        if old.serial in self._held:
            self._held.setdefault(new.serial, []).extend(self._held.pop(old.serial))
        if old.serial in self._slots:
            self._slots.setdefault(new.serial, self._slots.pop(old.serial))

    def evict(self, blocks: int) -> None:
        """`blocks` cached blocks were dropped from the prefix cache."""
        for _ in range(min(max(blocks, 0), len(self._cached))):
            block, _none = self._cached.popitem(last=False)
            self._bytes[block] = FREE

    def since(self) -> bytes:
        """For each block of the map the instant (packed i64 ns) since which it is cached; empty
        when none is."""
        return self._since.tobytes() if self._cached else b""

    def cached_since(self) -> list[int]:
        """The instants (ns) of the blocks that are only cached, longest first."""
        since = self._since
        return [since[block] for block in self._cached]

    def bytes(self, num_blocks: int | None) -> bytes:
        """The map, padded with free blocks up to the size of the pool when that is known."""
        missing = min(num_blocks or 0, BLOCKS_SHOWN) - len(self._bytes)
        return bytes(self._bytes) + bytes(max(0, missing))


def block_runs(data: bytes) -> list[tuple[int, int, list[int]]]:
    """`Step.block_ids` as (key, index, block ids). A run that claims more ids than there are is
    cut."""
    values = unpack_u32(data).tolist()
    runs: list[tuple[int, int, list[int]]] = []
    at, size = 0, len(values)
    while at + 2 < size:
        end = at + 3 + values[at + 2]
        runs.append((values[at], values[at + 1], values[at + 3 : end]))
        at = end
    return runs

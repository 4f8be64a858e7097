"""Who waits for admission at an engine, for how long, and which of its limits are reached
meanwhile."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.figures import median
from tracer.analysis.diagnosis.records import EngineFacts, Evidence, RequestFacts
from tracer.analysis.diagnosis.steps import Flags, Ints
from tracer.state.engine import admission


@dataclass(frozen=True, slots=True)
class Wait:
    """A request that waited to be admitted from `begin` to `end` (ns); `open`: still waits."""

    request: RequestFacts
    begin: int
    end: int
    open: bool

    @property
    def length(self) -> int:
        return self.end - self.begin


def waits_of(engine: EngineFacts, now: int) -> list[Wait]:
    """Return every wait for admission at one engine by its start, also those given up."""
    waits = []
    for request in engine.requests:
        begin = request.handed
        untold = request.first_token is not None or request.passes
        if begin is None or (request.lookup is None and untold):
            continue  # its admission was not told
        ends = (request.lookup, request.finished, request.closed, request.over)
        ended = [t for t in ends if t is not None]
        end = min(ended, default=now)
        waits.append(Wait(request, begin, max(end, begin), not ended))
    waits.sort(key=lambda wait: wait.begin)
    return waits


def too_large(engine: EngineFacts, request: RequestFacts) -> int | None:
    """Return the blocks that the prompt needs when that is more than the pool has, else None."""
    return admission.too_large(request.prompt_tokens, engine.block_size, engine.num_blocks)


@dataclass(frozen=True, slots=True)
class Episode:
    """A time in which requests were kept waiting, from first arrival to last admission."""

    waits: tuple[Wait, ...]
    begin: int
    end: int

    @property
    def lost(self) -> int:
        return sum(wait.length for wait in self.waits)

    @property
    def requests(self) -> list[RequestFacts]:
        return [wait.request for wait in self.waits]


def queue_episodes(engine: EngineFacts, evidence: Evidence) -> list[Episode]:
    """Return the episodes in which enough requests were kept waiting, by their start.

    A few that come at once and wait for each other are no fault: see `QUEUE_…` in the thresholds.
    """
    waits = [
        wait
        for wait in waits_of(engine, evidence.now)
        if wait.request.lookup is not None or too_large(engine, wait.request) is None
    ]
    table = engine.steps
    step = median(table.duration) if len(table) else 0.0
    floor = max(limit.QUEUE_MS * NS_PER_MS, limit.QUEUE_STEPS * step)
    begins = np.array([wait.begin for wait in waits], np.int64)
    groups: list[list[Wait]] = []
    reached = 0
    for wait in waits:
        if wait.length <= floor:
            continue
        if not groups or wait.begin > reached + limit.QUEUE_REST_S * NS_PER_S:
            groups.append([])
            reached = 0
        groups[-1].append(wait)
        reached = max(reached, wait.end)
    episodes = []
    for group in groups:
        begin, end, last = group[0].begin, max(wait.end for wait in group), group[-1].begin
        episode = Episode(tuple(group), begin, end)
        came = int(((begins >= begin) & (begins <= last)).sum())
        total = episode.lost + sum(request.prefill or 0 for request in episode.requests)
        if (
            len(group) >= max(limit.QUEUED, limit.QUEUE_SHARE * came)
            and end - begin >= limit.QUEUE_S * NS_PER_S
            and episode.lost >= limit.QUEUE_OF_TTFT * total
        ):
            episodes.append(episode)
    return episodes


@dataclass(frozen=True, slots=True)
class LimitsReached:
    """Shares of the waiting time in which each limit was reached; `kv_low` the smallest share of
    the pool that was to be had (free or reclaimable), as the median over the time it was short;
    `need` blocks that the head of the queue needs."""

    kv: float = 0.0
    slots: float = 0.0
    tokens: float = 0.0
    kv_known: bool = False
    kv_low: float = 1.0
    need: float = 0.0


def limits_reached(engine: EngineFacts, episode: Episode) -> LimitsReached:
    """Return which limits the steps ran into meanwhile, weighed by their length."""
    table, pool = engine.steps, engine.num_blocks
    chosen = table.between(episode.begin, episode.end)
    heads = _heads(engine, episode, table.begin[chosen])
    weight = np.where(heads >= 0, table.duration[chosen], 0).astype(float)
    whole = float(weight.sum())
    if whole <= 0:
        return LimitsReached()

    def share(flags: Flags) -> float:
        return float((weight * flags).sum()) / whole

    free, cached = table.column("free")[chosen], table.column("cached")[chosen]
    known = bool(pool > 0 and (free >= 0).any())
    kv, low = 0.0, 1.0
    if known:
        have = np.where(free >= 0, free + np.maximum(cached, 0), pool)
        short = have <= np.maximum(heads, limit.KV_RECLAIMABLE * pool)
        kv = share(short)
        waited = have[heads >= 0]
        low = (median(have[(heads >= 0) & short]) if kv >= 0.5 else float(waited.min())) / pool
    busy = np.maximum(table.column("running")[chosen], table.sizes[chosen])
    slots = share(busy >= engine.max_batch) if engine.max_batch > 0 else 0.0
    full = table.column("tokens")[chosen] >= limit.TOKENS_FULL * engine.max_batch_tokens
    tokens = share(full) if engine.max_batch_tokens > 0 else 0.0
    return LimitsReached(kv, slots, tokens, known, low, median(heads[heads >= 0]))


def _heads(engine: EngineFacts, episode: Episode, begins: Ints) -> Ints:
    """Return for each step the blocks that the head of the queue needs, -1 without one."""
    heads: Ints = np.full(len(begins), -1, np.int64)
    queue: list[tuple[int, int, int]] = []
    at = 0
    for place, t in enumerate(begins.tolist()):
        while at < len(episode.waits) and episode.waits[at].begin <= t:
            wait = episode.waits[at]
            need = admission.blocks_for(wait.request.uncached, engine.blocks_of)
            heapq.heappush(queue, (wait.begin, wait.end, need))
            at += 1
        while queue and queue[0][1] <= t:
            heapq.heappop(queue)
        if queue:
            heads[place] = queue[0][2]
    return heads


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests `offered` and `served` (admitted) a second; `sustained`: an overload, no burst."""

    offered: float
    served: float
    sustained: bool

    @property
    def factor(self) -> float:
        """Offered over served; 0 where that was not sustained."""
        return self.offered / max(self.served, 1e-9) if self.sustained else 0.0


def rates(engine: EngineFacts, episode: Episode) -> Rates:
    """Return the rates over the time in which the requests came that were kept waiting."""
    arrivals = np.array([r.handed for r in engine.requests if r.handed is not None])
    lookups = np.array([r.lookup for r in engine.requests if r.lookup is not None])
    begins = np.array([wait.begin for wait in episode.waits])
    first, last = begins[0], begins[-1]
    seconds = max(last - first, 1) / 1e9
    offered = int(((arrivals >= first) & (arrivals <= last)).sum()) / seconds
    served = int(((lookups > first) & (lookups <= last)).sum()) / seconds
    # Overload: they came for long, or over most of the time in which they waited, and the queue was
    # longest in the end.
    lasting = seconds >= min(limit.SUSTAINED_S, max(2.0, 0.4 * (episode.end - first) / 1e9))
    ends = np.sort([wait.end for wait in episode.waits])
    lengths = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, "right")
    growing = lengths[-1] >= 0.7 * lengths.max()
    more = offered >= limit.OFFERED * max(served, 1e-9)
    return Rates(float(offered), float(served), bool(lasting and growing and more))

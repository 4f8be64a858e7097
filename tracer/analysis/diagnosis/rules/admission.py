"""Stage 4, why requests wait: they can never be admitted, admission is blocked, the way to the
queue is slow, or batch slots, token budget or KV blocks are used up."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import CannotTell, Exhibit
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, median, ms
from tracer.analysis.diagnosis.spell import points
from tracer.analysis.diagnosis.steps import Flags, Ints
from tracer.state.engine import admission

NEVER, BLOCKED, HOP = "never-admitted", "admission-blocked", "queue-hop"
KV, SLOTS, OVER, UNEQUAL = "kv-blocks", "batch-limit", "over-capacity", "unequal-engines"


@dataclass(frozen=True, slots=True)
class Wait:
    """A request and the time it waited to be admitted: `begin` … `end`, `open` when it still
    waits."""

    request: Asked
    begin: int
    end: int
    open: bool

    @property
    def length(self) -> int:
        """ns."""
        return self.end - self.begin


def waits_of(engine: EngineFacts, now: int) -> list[Wait]:
    """Every wait for admission at one engine, by its begin. One that a client gave up on ends
    there."""
    waits = []
    for request in engine.requests:
        begin = request.handed
        if begin is None:
            continue
        ended = [
            t
            for t in (request.lookup, request.finished, request.closed, request.over)
            if t is not None
        ]
        end = min(ended) if ended else now
        if request.lookup is None and (request.first_token is not None or request.passes):
            continue  # its admission was not told
        waits.append(Wait(request, begin, max(end, begin), not ended))
    waits.sort(key=lambda wait: wait.begin)
    return waits


def too_large(engine: EngineFacts, request: Asked) -> int | None:
    """Blocks that the prompt needs when that is more than the pool has, else None."""
    return admission.too_large(request.prompt_tokens, engine.block_size, engine.num_blocks)


# --- never, blocked -------------------------------------------------------------------------------


def never_admitted(case: Case) -> Sequence[Said]:
    """A request whose prompt needs more blocks than exist waits for ever, and whoever stands behind
    it."""
    evidence = case.evidence
    said: list[Said] = []
    for engine in evidence.engines:
        waits = waits_of(engine, evidence.now)
        for wait in waits:
            need = too_large(engine, wait.request)
            if (
                need is None
                or wait.request.lookup is not None
                or wait.length < limit.NEVER_S * NS_PER_S
            ):
                continue
            behind = [
                other for other in waits if other.begin > wait.begin and other.open and wait.open
            ]
            victims = [other for other in behind if too_large(engine, other.request) is None]
            blocked = victims and _stepless(engine, wait.begin, evidence.now)
            affected = [wait.request, *(other.request for other in victims if blocked)]
            said.append(
                found(
                    evidence,
                    NEVER,
                    Stage.ADMISSION,
                    f"{wait.request.name} can never be admitted: its "
                    f"{wait.request.prompt_tokens:,} prompt tokens need "
                    f"{need:,} KV blocks of {engine.block_size}, the pool has {engine.num_blocks:,}"
                    + (
                        f"; {len(affected) - 1} requests stand behind it"
                        if len(affected) > 1
                        else ""
                    ),
                    check=(
                        "raise the number of KV blocks (GPU memory share, context length) or "
                        "reject such prompts"
                    ),
                    lost_ns=wait.length
                    + (sum(other.length for other in victims) if blocked else 0),
                    start=wait.begin,
                    end=wait.end,
                    confidence=1.0,
                    affected=affected,
                    culprit=wait.request if len(affected) > 1 else None,
                    engine=engine,
                    exhibits=[
                        Exhibit(
                            "blocks needed",
                            "blocks",
                            ((wait.begin, float(need)),),
                            f"of {engine.num_blocks:,}",
                        )
                    ],
                )
            )
    return said


def _stepless(engine: EngineFacts, begin: int, end: int) -> bool:
    """Whether no step ran from `begin` on, but for a moment."""
    table = engine.steps
    return not len(table) or int(table.end[-1]) < begin + (end - begin) // 2


def admission_blocked(case: Case) -> Sequence[Said]:
    """Requests wait, nothing runs, and yet no step comes: the engine's admission hangs."""
    evidence = case.evidence
    said: list[Said] = []
    for engine in evidence.engines:
        if engine.gone or engine.status in ("loading", "dead", "stopped"):
            continue
        waits = [wait for wait in waits_of(engine, evidence.now) if wait.open]
        if not waits or any(too_large(engine, wait.request) is not None for wait in waits):
            continue
        if any(r.lookup is not None and r.finished is None and r.over is None and not _preempted(r)
               for r in engine.requests):  # fmt: skip
            continue  # something runs, or a step is in progress
        last = int(engine.steps.end[-1]) if len(engine.steps) else evidence.began
        since = max(last, waits[0].begin)
        if evidence.now - since < limit.BLOCKED_S * NS_PER_S:
            continue
        free = int(engine.steps.column("free")[-1]) if len(engine.steps) else engine.num_blocks
        said.append(
            found(
                evidence,
                BLOCKED,
                Stage.ADMISSION,
                f"admission is blocked for {(evidence.now - since) / 1e9:.1f} s: {len(waits)} "
                "requests wait, nothing runs"
                + (
                    f", {free:,} of {engine.num_blocks:,} blocks are free"
                    if free >= 0 and engine.num_blocks > 0
                    else ""
                ),
                check=(
                    "the engine's scheduler hangs: look at its log, restart it, and report it with "
                    "this trace"
                ),
                lost_ns=sum(evidence.now - max(wait.begin, since) for wait in waits),
                start=since,
                end=None,
                confidence=0.9,
                affected=[wait.request for wait in waits],
                engine=engine,
            )
        )
    return said


def _preempted(request: Asked) -> bool:
    return bool(request.preemptions) and request.preemptions[-1].resumed is None


# --- what is used up ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """The requests of one engine that were kept waiting, from the first one's arrival to the last
    one's admission."""

    waits: tuple[Wait, ...]
    begin: int
    end: int

    @property
    def lost(self) -> int:
        """ns over all of them."""
        return sum(wait.length for wait in self.waits)


def kept_waiting(engine: EngineFacts, evidence: Evidence) -> list[Kept]:
    """The stretches in which requests were kept waiting, where they were enough to speak of, by
    their begin.

    A few that come at once and wait for each other are no fault: see `QUEUE_…` in the thresholds.
    """
    waits = [
        wait
        for wait in waits_of(engine, evidence.now)
        if not (wait.request.lookup is None and too_large(engine, wait.request) is not None)
    ]
    table = engine.steps
    step = float(np.median(table.duration)) if len(table) else 0.0
    floor = max(limit.QUEUE_MS * NS_PER_MS, limit.QUEUE_STEPS * step)
    begins = np.array([wait.begin for wait in waits], np.int64)
    episodes: list[list[Wait]] = []
    reached = 0
    for wait in waits:
        if wait.length <= floor:
            continue
        if episodes and wait.begin <= reached + limit.QUEUE_REST_S * NS_PER_S:
            episodes[-1].append(wait)
        else:
            episodes.append([wait])
            reached = 0
        reached = max(reached, wait.end)
    found_ones = []
    for kept in episodes:
        begin, end, last = kept[0].begin, max(wait.end for wait in kept), kept[-1].begin
        near = int(np.searchsorted(begins, last, "right") - np.searchsorted(begins, begin, "left"))
        lost = sum(wait.length for wait in kept)
        total = sum(wait.length + (wait.request.prefill or 0) for wait in kept)
        if len(kept) < limit.QUEUED or end - begin < limit.QUEUE_S * NS_PER_S:
            continue
        if len(kept) >= limit.QUEUE_SHARE * near and lost >= limit.QUEUE_OF_TTFT * total:
            found_ones.append(Kept(tuple(kept), begin, end))
    return found_ones


def waiting(case: Case) -> Sequence[Said]:
    """Requests wait because a resource is used up, and whether more were offered than can be
    served."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        episodes = kept_waiting(engine, case.evidence)
        if episodes:
            said.extend(_explain(case.evidence, engine, episodes))
    return said


def _explain(evidence: Evidence, engine: EngineFacts, episodes: Sequence[Kept]) -> Sequence[Said]:
    """One finding for all stretches, explained by the one in which most time was lost."""
    worst = max(episodes, key=lambda kept: kept.lost)
    every = tuple(wait for kept in episodes for wait in kept.waits)
    kept = Kept(every, episodes[0].begin, max(kept.end for kept in episodes))
    hop = [(wait.request.queued or wait.begin) - wait.begin for wait in kept.waits]
    requests = [wait.request for wait in kept.waits]
    lengths = np.array([wait.length for wait in kept.waits])
    middle = f"p50 {ms(median(lengths)):,.0f} ms, longest {ms(float(lengths.max())):,.0f} ms"
    series = points(np.array([wait.begin for wait in kept.waits]), lengths / NS_PER_MS)
    queue = Exhibit("queue time", "ms", series, "at the instant of arrival")
    if sum(hop) >= limit.HOP_SHARE * kept.lost:
        return [
            found(
                evidence,
                HOP,
                Stage.ADMISSION,
                f"{len(requests)} requests spend {ms(median(hop)):,.0f} ms (p50) between the front "
                "end and the engine's "
                "queue, which then takes them at once",
                check=(
                    "the channel between front end and engine core: a busy event loop, "
                    "serialisation, a full pipe"
                ),
                lost_ns=sum(hop),
                start=kept.begin,
                end=kept.end,
                confidence=0.8,
                affected=requests,
                engine=engine,
                exhibits=[queue],
            )
        ]
    used = limits_reached(engine, worst)
    offered, served, sustained = rates(engine, worst)
    wait = f"{len(requests)} requests wait for admission ({middle})"
    gauges = _gauges(engine, kept)
    factor = offered / max(served, 1e-9) if sustained else 0.0
    common: dict[str, Any] = {
        "lost_ns": kept.lost,
        "start": kept.begin,
        "end": kept.end,
        "affected": requests,
        "engine": engine,
        "exhibits": [queue, *gauges],
    }
    load = f"{offered:.3g} requests/s come, {served:.3g}/s are served"
    if used.kv >= 0.5:
        return [
            found(
                evidence,
                KV,
                Stage.ADMISSION,
                f"KV blocks are used up: {wait}; {1 - used.kv_low:.1%} of {engine.num_blocks:,} "
                "blocks are held and the "
                "next "
                f"in line needs {used.need:,.0f}" + (f"; {load}" if sustained else ""),
                check=(
                    "more KV blocks (memory share, fp8 cache), shorter contexts, or fewer requests "
                    "at once"
                ),
                confidence=0.9,
                load=max(factor, _relief(engine, used)),
                **common,
            )
        ]
    limits = _limit_words(engine, used)
    turns = _turns(engine, used)
    if not limits and turns and not sustained:
        name, check = (
            (KV, "more KV blocks")
            if used.kv == max(used.kv, used.tokens, used.slots)
            else (SLOTS, "raise the limit that is named")
        )
        return [
            found(
                evidence,
                name,
                Stage.ADMISSION,
                f"{wait}: {turns}",
                check=f"{check} first; lifting one limit alone moves the wait to the next",
                confidence=0.7,
                **common,
            )
        ]
    if turns and not limits:
        limits = f"; {turns}"
    if sustained:
        return [
            found(
                evidence,
                OVER,
                Stage.ADMISSION,
                f"over capacity: {load}; {wait}{limits}",
                check=(
                    "shed or spread load, or add an engine; a larger batch only helps while ITL "
                    "may still grow"
                ),
                confidence=0.9,
                load=factor,
                **common,
            )
        ]
    if (used.kv_known and used.kv < limit.LIMIT_SELDOM) or used.slots >= 0.5 or used.tokens >= 0.5:
        return [found(
            evidence, SLOTS, Stage.ADMISSION,
            f"{wait}{limits or ': the limit is sequences or tokens a step, not KV'}"
            + (f" (KV at most {1 - used.kv_low:.1%} full)" if used.kv_known else ""),
            check="the limits on sequences and tokens a step (max-num-seqs, max-batch-tokens)",
            confidence=0.85 if limits else 0.7, **common,
        )]  # fmt: skip
    if used.kv_known:
        return [
            CannotTell(
                SLOTS,
                f"{wait}; no limit of {engine.title} is reached for most of that time",
                "for longer, while requests wait",
                Stage.ADMISSION,
                symptom=True,
            )
        ]
    return [CannotTell(
        SLOTS, f"{wait}; the trace holds neither KV gauges nor batch limits of {engine.title}",
        "with hooks in the engine's core", Stage.ADMISSION, symptom=True,
    )]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Used:
    """Shares of the waiting time in which a limit was reached; `kv_low` the smallest share of the
    pool that was to be had (free or reclaimable), as the median over the time it was short; `need`
    blocks that the head of the queue needs."""

    kv: float
    slots: float
    tokens: float
    kv_known: bool
    kv_low: float
    need: float


def _relief(engine: EngineFacts, used: Used) -> float:
    """How much faster the engine would have to be for the next in line to fit with a fifth of the
    pool to spare."""
    room = 0.8 * engine.num_blocks - used.need
    return (1 - used.kv_low) * engine.num_blocks / room if room > 0 else math.inf


def limits_reached(engine: EngineFacts, kept: Kept) -> Used:
    """Which limit the steps ran into while requests were kept waiting, weighed by the length of the
    steps."""
    table = engine.steps
    chosen = table.between(kept.begin, kept.end)
    begin, duration = table.begin[chosen], table.duration[chosen].astype(float)
    heads = _heads(engine, kept, begin)
    weight = np.where(heads >= 0, duration, 0.0)
    whole = float(weight.sum())
    if whole <= 0:
        return Used(0.0, 0.0, 0.0, False, 1.0, 0.0)

    def share(flags: Flags) -> float:
        return float((weight * flags).sum()) / whole

    free, cached = table.column("free")[chosen], table.column("cached")[chosen]
    known = bool(engine.num_blocks > 0 and (free >= 0).any())
    kv, low = 0.0, 1.0
    if known:
        have = np.where(free >= 0, free + np.maximum(cached, 0), engine.num_blocks)
        short = have <= np.maximum(heads, limit.KV_RECLAIMABLE * engine.num_blocks)
        kv = share(short)
        picked = have[(heads >= 0) & short] if kv >= 0.5 else have[heads >= 0]
        low = float(np.percentile(picked, 50 if kv >= 0.5 else 0)) / engine.num_blocks
    busy = np.maximum(table.column("running")[chosen], table.sizes[chosen])
    slots = share(busy >= engine.max_batch) if engine.max_batch > 0 else 0.0
    full = table.column("tokens")[chosen] >= limit.TOKENS_FULL * engine.max_batch_tokens
    tokens = share(full) if engine.max_batch_tokens > 0 else 0.0
    return Used(kv, slots, tokens, known, low, median(heads[heads >= 0]))


def _heads(engine: EngineFacts, kept: Kept, begins: Ints) -> Ints:
    """For each step the blocks that the head of the queue needs, -1 when nobody is kept waiting
    then."""
    heads: Ints = np.full(len(begins), -1, np.int64)
    coming = list(kept.waits)
    heap: list[tuple[int, int, int]] = []
    at = 0
    for place, t in enumerate(begins.tolist()):
        while at < len(coming) and coming[at].begin <= t:
            wait = coming[at]
            need = admission.blocks_for(max(0, wait.request.uncached), engine.blocks_of)
            heapq.heappush(heap, (wait.begin, wait.end, need))
            at += 1
        while heap and heap[0][1] <= t:
            heapq.heappop(heap)
        if heap:
            heads[place] = heap[0][2]
    return heads


def rates(engine: EngineFacts, kept: Kept) -> tuple[float, float, bool]:
    """(requests offered a second, requests admitted a second, whether this was sustained overload
    and no burst).

    Both over the time in which the requests came that were kept waiting.
    """
    arrivals = np.sort([r.handed for r in engine.requests if r.handed is not None])
    lookups = np.sort([r.lookup for r in engine.requests if r.lookup is not None])
    first, last = kept.waits[0].begin, kept.waits[-1].begin
    seconds = max(last - first, 1) / 1e9
    offered = int(((arrivals >= first) & (arrivals <= last)).sum()) / seconds
    served = int(((lookups > first) & (lookups <= last)).sum()) / seconds
    # Overload: they came for long, or over most of the time in which they waited, and the queue was
    # longest in the end.
    lasting = seconds >= min(limit.SUSTAINED_S, max(2.0, 0.4 * (kept.end - first) / 1e9))
    begins = np.array([wait.begin for wait in kept.waits])
    ends = np.sort([wait.end for wait in kept.waits])
    lengths = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, "right")
    growing = int(lengths[-1]) >= 0.7 * int(lengths.max())
    return (
        offered,
        served,
        bool(lasting and growing and offered >= limit.OFFERED * max(served, 1e-9)),
    )


def _limit_words(engine: EngineFacts, used: Used) -> str:
    if used.slots >= 0.5:
        return f"; all {engine.max_batch:,} batch slots are taken"
    if used.tokens >= 0.5:
        return f"; the budget of {engine.max_batch_tokens:,} tokens a step is used up"
    return ""


def _turns(engine: EngineFacts, used: Used) -> str:
    """Limits that were reached for a part of the waiting time each, the longest first, in words;
    empty without any."""
    reached = sorted(
        [(used.kv, "KV blocks"), (used.slots, f"the {engine.max_batch:,} batch slots"),
         (used.tokens, f"the budget of {engine.max_batch_tokens:,} tokens a step")], reverse=True,
    )  # fmt: skip
    named = [
        f"{name} {share:.0%} of the time" for share, name in reached if share >= limit.LIMIT_TURNS
    ]
    return f"{'limits take turns: ' if len(named) > 1 else ''}{', '.join(named)}"


def _gauges(engine: EngineFacts, kept: Kept) -> list[Exhibit]:
    table = engine.steps
    chosen = table.between(kept.begin, kept.end)
    times = table.begin[chosen]
    exhibits = []
    for name in ("waiting", "running"):
        values = table.column(name)[chosen]
        if (values >= 0).any():
            exhibits.append(Exhibit(name, "requests", points(times, values)))
    used = table.column("used")[chosen]
    if engine.num_blocks > 0 and (used >= 0).any():
        exhibits.append(
            Exhibit("KV in use", "% of blocks", points(times, 100.0 * used / engine.num_blocks))
        )
    return exhibits


def unequal_engines(case: Case) -> Sequence[Said]:
    """One engine of several is at its limit while another one has room: the mean looks fine."""
    evidence = case.evidence
    engines = [engine for engine in evidence.engines if len(engine.steps) >= limit.STEPS]
    if len(engines) < 2:
        return []
    said: list[Said] = []
    for engine in engines:
        episodes = kept_waiting(engine, evidence)
        if not episodes:
            continue
        kept = max(episodes, key=lambda one: one.lost)
        roomy = [other for other in engines if other is not engine and _has_room(other, kept)]
        if not roomy:
            continue
        requests = [wait.request for wait in kept.waits]
        said.append(
            found(
                evidence,
                UNEQUAL,
                Stage.ADMISSION,
                f"one engine of {len(engines)} is at its limit: {len(requests)} requests wait at "
                f"{engine.title} "
                f"(p50 {ms(median([wait.length for wait in kept.waits])):,.0f} ms) while "
                f"{len(roomy)} other"
                f"{'s have' if len(roomy) > 1 else ' has'} room and nobody waiting",
                check="the router: affinity, weights, health checks",
                lost_ns=kept.lost,
                start=kept.begin,
                end=kept.end,
                confidence=0.85,
                affected=requests,
                engine=engine,
                exhibits=_gauges(engine, kept),
            )
        )
    return said


def _has_room(engine: EngineFacts, kept: Kept) -> bool:
    table = engine.steps
    chosen = table.between(kept.begin, kept.end)
    waiting_now = table.column("waiting")[chosen]
    if len(waiting_now) and median(np.maximum(waiting_now, 0)) > 0:
        return False
    free = table.column("free")[chosen] + np.maximum(table.column("cached")[chosen], 0)
    busy = table.sizes[chosen]
    if engine.max_batch > 0 and len(busy) and median(busy) > 0.7 * engine.max_batch:
        return False
    return (
        engine.num_blocks <= 0
        or not len(free)
        or median(free) >= limit.IMBALANCE_FREE * engine.num_blocks
    )

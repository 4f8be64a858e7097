"""Stage 4, why requests wait: they can never be admitted, admission is blocked, the way to the
queue is slow, or batch slots, token budget or KV blocks are used up."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import QUEUES, Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import counted, median, ms, percent, series
from tracer.analysis.diagnosis.finding import CannotTell, Exhibit, events
from tracer.analysis.diagnosis.queueing import (
    Episode,
    LimitsReached,
    Rates,
    limits_reached,
    queue_episodes,
    rates,
    too_large,
    waits_of,
)
from tracer.analysis.diagnosis.records import EngineFacts, RequestFacts

NEVER: Final = Cause(
    "never-admitted",
    Stage.ADMISSION,
    1.0,
    "raise the number of KV blocks (GPU memory share, context length) or reject such prompts",
    explains=(*QUEUES, "admission-blocked", "clients-hang-up"),
    exact=True,
)
BLOCKED: Final = Cause(
    "admission-blocked",
    Stage.ADMISSION,
    0.9,
    "the engine's scheduler hangs: look at its log, restart it, and report it with this trace",
    explains=(*QUEUES, "clients-hang-up"),
    exact=True,
)
KV: Final = Cause(
    "kv-blocks",
    Stage.ADMISSION,
    0.9,
    "more KV blocks (memory share, fp8 cache), shorter contexts, or fewer requests at once",
    explains=("prefix-evicted", "prefix-no-hit"),
)
SLOTS: Final = Cause(
    "batch-limit",
    Stage.ADMISSION,
    0.85,
    "the limits on sequences and tokens a step (max-num-seqs, max-batch-tokens)",
)
OVER: Final = Cause(
    "over-capacity",
    Stage.ADMISSION,
    0.9,
    "shed or spread load, or add an engine; a larger batch only helps while ITL may still grow",
)
HOP: Final = Cause(
    "queue-hop",
    Stage.ADMISSION,
    0.8,
    "the channel between front end and engine core: a busy event loop, serialisation, a full pipe",
)
UNEQUAL: Final = Cause(
    "unequal-engines",
    Stage.ADMISSION,
    0.85,
    "the router: affinity, weights, health checks",
    explains=QUEUES,
)


@rule(NEVER, each_engine=True)
def never_admitted(case: Case, engine: EngineFacts) -> Results:
    """A prompt needs more blocks than exist: it waits for ever, and all behind it."""
    now, ends = case.evidence.now, engine.steps.end
    waits, last = waits_of(engine, now), int(ends[-1]) if len(ends) else 0
    for wait in waits:
        request = wait.request
        need = too_large(engine, request)
        if need is None or request.lookup is not None or wait.length < limit.NEVER_S * NS_PER_S:
            continue
        behind = [w for w in waits if w.begin > wait.begin and w.open and wait.open]
        victims = [w for w in behind if too_large(engine, w.request) is None]
        if last >= wait.begin + (now - wait.begin) // 2:
            victims = []  # steps went on: it keeps nobody waiting
        others = f"; {counted(len(victims), 'request')} behind it" if victims else ""
        yield NEVER.finding(
            f"{request.name} can never be admitted: its {request.prompt_tokens:,} prompt tokens "
            f"need {need:,} KV blocks of {engine.block_size}, the pool has {engine.num_blocks:,}"
            f"{others}",
            (wait.begin, wait.end),
            [request, *(other.request for other in victims)],
            wait.length + sum(other.length for other in victims),
            events("blocks needed", "blocks", [(wait.begin, need)], f"of {engine.num_blocks:,}"),
            culprit=request if victims else None,
        )


@rule(BLOCKED, each_engine=True)
def admission_blocked(case: Case, engine: EngineFacts) -> Results:
    """Requests wait, nothing runs, and yet no step comes: the engine's admission hangs."""
    now, table = case.evidence.now, engine.steps
    if engine.gone or engine.status in ("loading", "dead", "stopped"):
        return
    waits = [wait for wait in waits_of(engine, now) if wait.open]
    if not waits or any(too_large(engine, wait.request) is not None for wait in waits):
        return
    if any(map(_runs, engine.requests)):
        return
    last = int(table.end[-1]) if len(table) else case.evidence.began
    since = max(last, waits[0].begin)
    if now - since < limit.BLOCKED_S * NS_PER_S:
        return
    free = int(table.column("free")[-1]) if len(table) else engine.num_blocks
    known = free >= 0 and engine.num_blocks > 0
    yield BLOCKED.finding(
        f"admission is blocked for {(now - since) / NS_PER_S:.1f} s: "
        f"{counted(len(waits), 'request')} waiting, none running"
        + (f", {free:,} of {engine.num_blocks:,} blocks free" if known else ""),
        (since, None),
        [wait.request for wait in waits],
        sum(now - max(wait.begin, since) for wait in waits),
    )


def _runs(request: RequestFacts) -> bool:
    """Return True for a request that runs, or is part of a step in progress."""
    if request.lookup is None or request.finished is not None or request.over is not None:
        return False
    return not request.preemptions or request.preemptions[-1].resumed is not None


@rule(KV, SLOTS, OVER, HOP, each_engine=True)
def waiting(case: Case, engine: EngineFacts) -> Results:
    """Requests wait because a resource is used up, or because more are offered than can be served.
    One finding for all episodes, explained by the one in which most time was lost."""
    episodes = queue_episodes(engine, case.evidence)
    if not episodes:
        return
    worst = max(episodes, key=lambda episode: episode.lost)
    whole = Episode(
        tuple(wait for episode in episodes for wait in episode.waits),
        episodes[0].begin,
        max(episode.end for episode in episodes),
    )
    where = (whole.begin, whole.end), whole.requests
    arrivals, lengths = zip(*((wait.begin, wait.length) for wait in whole.waits), strict=True)
    queue = series(
        "queue time", "ms", arrivals, np.array(lengths) / NS_PER_MS, "at the instant of arrival"
    )
    hop = [(wait.request.queued or wait.begin) - wait.begin for wait in whole.waits]
    if sum(hop) >= limit.HOP_SHARE * whole.lost:
        yield HOP.finding(
            f"{len(hop)} requests spend {ms(median(hop)):,.0f} ms (p50) between the front end and "
            "the engine's queue, which then takes them at once",
            *where,
            sum(hop),
            queue,
        )
        return
    used = limits_reached(engine, worst)
    wait = (
        f"{len(lengths)} requests wait for admission (p50 {ms(median(lengths)):,.0f} ms, longest "
        f"{ms(max(lengths)):,.0f} ms)"
    )
    answer = _bound_by(engine, used, rates(engine, worst), wait)
    if answer is not None:
        cause, statement, fields = answer
        yield cause.finding(statement, *where, whole.lost, queue, *_gauges(engine, whole), **fields)
        return
    reason = f"no limit of {engine.title} is reached for most of that time"
    record = "for longer, while requests wait"
    if not used.kv_known:
        reason = f"the trace holds neither KV gauges nor batch limits of {engine.title}"
        record = "with hooks in the engine's core"
    yield CannotTell(SLOTS.name, f"{wait}; {reason}", record, Stage.ADMISSION, symptom=True)


def _bound_by(
    engine: EngineFacts, used: LimitsReached, rates: Rates, wait: str
) -> tuple[Cause, str, dict[str, Any]] | None:
    """Return the cause of a wait, its statement, and fields of the finding; None if unknown."""
    taken, turns = _taken(engine, used), _turns(engine, used)
    full = percent(1 - used.kv_low, 1)
    load = f"{rates.offered:.3g} requests/s come, {rates.served:.3g}/s are served"
    if used.kv >= 0.5:
        statement = (
            f"KV blocks are used up: {wait}; {full} of {engine.num_blocks:,} blocks are held and "
            f"the next in line needs {used.need:,.0f}" + (f"; {load}" if rates.sustained else "")
        )
        return KV, statement, {"load": max(rates.factor, _relief(engine, used))}
    if rates.sustained:
        limits = "".join(f"; {words}" for words in (taken or turns,) if words)
        return OVER, f"over capacity: {load}; {wait}{limits}", {"load": rates.factor}
    if turns and not taken:
        memory = used.kv >= max(used.tokens, used.slots)
        first = "more KV blocks" if memory else "raise the limit that is named"
        check = f"{first} first; lifting one limit alone moves the wait to the next"
        fields = {"check": check, "confidence": 0.7}
        return (KV if memory else SLOTS), f"{wait}: {turns}", fields
    if not taken and not (used.kv_known and used.kv < limit.LIMIT_SELDOM):
        return None
    limits = f"; {taken}" if taken else ": the limit is sequences or tokens a step, not KV"
    kv = f" (KV at most {full} full)" if used.kv_known else ""
    return SLOTS, f"{wait}{limits}{kv}", {} if taken else {"confidence": 0.7}


def _relief(engine: EngineFacts, used: LimitsReached) -> float:
    """Return how much faster the engine must be for the next in line to fit with room."""
    room = 0.8 * engine.num_blocks - used.need
    return (1 - used.kv_low) * engine.num_blocks / room if room > 0 else math.inf


def _taken(engine: EngineFacts, used: LimitsReached) -> str:
    """Return, in words, the limit of a batch that was reached for most of the waiting time."""
    if used.slots >= 0.5:
        return f"all {engine.max_batch:,} batch slots are taken"
    if used.tokens >= 0.5:
        return f"the budget of {engine.max_batch_tokens:,} tokens a step is used up"
    return ""


def _turns(engine: EngineFacts, used: LimitsReached) -> str:
    """Return, in words, the limits that were reached for a part of the time each."""
    reached = (
        (used.kv, "KV blocks"),
        (used.slots, f"{engine.max_batch:,} batch slots"),
        (used.tokens, f"budget of {engine.max_batch_tokens:,} tokens a step"),
    )
    named = [
        f"{name} ({percent(share)} of the time)"
        for share, name in sorted(reached, reverse=True)
        if share >= limit.LIMIT_TURNS
    ]
    return f"limits alternate: {', '.join(named)}" if len(named) > 1 else "".join(named)


def _gauges(engine: EngineFacts, episode: Episode) -> list[Exhibit]:
    table = engine.steps
    chosen = table.between(episode.begin, episode.end)
    times = table.begin[chosen]
    gauges = [
        series(name, "requests", times, table.column(name)[chosen])
        for name in ("waiting", "running")
    ]
    if engine.num_blocks > 0:
        used = 100.0 * table.column("used")[chosen] / engine.num_blocks
        gauges.append(series("KV in use", "% of blocks", times, used))
    return [gauge for gauge in gauges if any(value >= 0 for _, value in gauge.points)]


@rule(UNEQUAL)
def unequal_engines(case: Case) -> Results:
    """One engine of several is at its limit while another one has room: the mean looks fine."""
    evidence = case.evidence
    engines = [engine for engine in evidence.engines if len(engine.steps) >= limit.STEPS]
    for engine in engines:
        episodes = queue_episodes(engine, evidence)
        if not episodes:
            continue
        worst = max(episodes, key=lambda episode: episode.lost)
        roomy = sum(_has_room(other, worst) for other in engines if other is not engine)
        if not roomy:
            continue
        yield UNEQUAL.finding(
            f"one engine of {len(engines)} is at its limit: {len(worst.waits)} requests wait at "
            f"{engine.title} (p50 {ms(median([wait.length for wait in worst.waits])):,.0f} ms) "
            f"while {roomy} other{'s have' if roomy > 1 else ' has'} room and an empty queue",
            (worst.begin, worst.end),
            worst.requests,
            worst.lost,
            *_gauges(engine, worst),
            engine=engine.source,
        )


def _has_room(engine: EngineFacts, episode: Episode) -> bool:
    table = engine.steps
    chosen = table.between(episode.begin, episode.end)
    if median(np.maximum(table.column("waiting")[chosen], 0)) > 0:
        return False
    if engine.max_batch > 0 and median(table.sizes[chosen]) > 0.7 * engine.max_batch:
        return False
    free = median(table.column("free")[chosen] + np.maximum(table.column("cached")[chosen], 0))
    return engine.num_blocks <= 0 or not free < limit.IMBALANCE_FREE * engine.num_blocks

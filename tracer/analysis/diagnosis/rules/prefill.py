"""Stage 7: somebody else's long prompt, a tenant's long prompts, prompts that grew or reuse that
stopped, warm-up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import climb, counted, median, ms, percent, series, shown
from tracer.analysis.diagnosis.finding import Exhibit, events
from tracer.analysis.diagnosis.records import EngineFacts, RequestFacts

LONG_PROMPT: Final = Cause(
    "long-prompt",
    Stage.PREFILL,
    0.95,
    "chunked prefill with a smaller token budget, so that decoding goes on beside it; or "
    "other workers for long prompts",
    explains=("tenant-prompts", "longer-prompts"),
)
TENANT: Final = Cause(
    "tenant-prompts",
    Stage.PREFILL,
    0.85,
    "this tenant's prompts: what makes them long, and why they are not found in the prefix cache",
    explains=("longer-prompts",),
)
LONGER: Final = Cause("longer-prompts", Stage.PREFILL, 0.8, "what changed in the prompts then")
REUSE: Final = Cause(
    "reuse-stopped", Stage.KV_ALLOC, 0.8, "what changed at the start of the prompts then"
)
WARM_UP: Final = Cause(
    "warm-up",
    Stage.PREFILL,
    0.9,
    "send a request of each usual shape before traffic comes; leave the first one out of "
    "measurements",
)


class Hole(NamedTuple):
    """A pause in the stream of `victim`, `begin` … `end`, that the prefill of `owner` filled."""

    begin: int
    end: int
    victim: int
    owner: int


@rule(LONG_PROMPT, each_engine=True)
def long_prompt(case: Case, engine: EngineFacts) -> Results:
    """Streams stop while another request's prompt is computed."""
    evidence, table = case.evidence, engine.steps
    usual = table.typical or _usual_itl(engine)
    if not len(table) or not usual:
        return
    holes = _holes(engine, evidence.now, usual)
    if not holes:
        return
    harm: dict[int, int] = defaultdict(int)
    by_victim: dict[int, int] = defaultdict(int)
    for hole in holes:
        excess = int(hole.end - hole.begin - usual)
        harm[hole.owner] += excess
        by_victim[hole.victim] += excess
    owner = max(harm, key=lambda index: harm[index])
    culprit = evidence.requests[owner]
    mine = [hole for hole in holes if hole.owner == owner]
    longest = max(hole.end - hole.begin for hole in mine)
    chunks = sum(ran.tokens > 1 for ran in culprit.passes)
    others = f"; {len(harm) - 1} more prompts do the same" if len(harm) > 1 else ""
    begin, end = min(hole.begin for hole in holes), max(hole.end for hole in holes)
    first = min(hole.begin for hole in mine) if culprit.lookup is None else culprit.lookup
    yield LONG_PROMPT.finding(
        f"the prefill of {culprit.name} ({culprit.uncached:,} tokens in "
        f"{counted(chunks, 'step')}) stops "
        f"{counted(len({hole.victim for hole in mine}), 'stream')} for up to {ms(longest):,.0f} "
        f"ms, where a token takes {ms(usual):,.1f} ms{others}",
        (begin, end),
        [evidence.requests[v] for v in sorted(by_victim, key=lambda v: -by_victim[v])],
        sum(harm.values()),
        series("prompt tokens a step", "tokens", table.begin, table.prefill),
        series("ITL", "ms", table.tokens_at, table.interval / NS_PER_MS),
        events("culprit scheduled, prompt", "tokens", [(first, culprit.prompt_tokens)]),
        culprit=culprit,
        slowdown=_slowdown(engine, begin, end),
    )


def _usual_itl(engine: EngineFacts) -> float:
    """Return the median gap between tokens over all requests, where no step only decodes."""
    gaps = [np.diff(request.tokens) for request in engine.requests if len(request.tokens) >= 3]
    return median(np.concatenate(gaps)) if gaps else 0.0


def _holes(engine: EngineFacts, now: int, usual: float) -> list[Hole]:
    floor = max(limit.HOLE_MS * NS_PER_MS, limit.HOLE_ITL * usual)
    holes = []
    for victim in engine.requests:
        if len(victim.tokens) < 3:
            continue
        for place in np.flatnonzero(np.diff(victim.tokens) >= floor):
            begin, end = int(victim.tokens[place]), int(victim.tokens[place + 1])
            if any(p.begin < end and (p.resumed or now) > begin for p in victim.preemptions):
                continue
            owner = _owner(engine, begin, end, victim)
            if owner is not None:
                holes.append(Hole(begin, end, victim.index, owner))
    return holes


def _owner(engine: EngineFacts, begin: int, end: int, victim: RequestFacts) -> int | None:
    """Return whose prefill filled most of `begin` … `end`, if it was a prefill and a large one."""
    table = engine.steps
    chosen = slice(*np.searchsorted(table.tokens_at, [begin, end], "right"))
    owners, prefill = table.owner[chosen], table.prefill[chosen]
    busy = (prefill > 0) & (owners >= 0) & (owners != victim.index)
    if not busy.any() or int(prefill[busy].sum()) < limit.HOLE_TOKENS:
        return None
    spans = table.span[chosen][busy]
    if spans.sum() < 0.6 * (end - begin):
        return None
    return int(np.argmax(np.bincount(owners[busy], weights=spans.astype(float))))


def _slowdown(engine: EngineFacts, begin: int, end: int) -> float:
    """Return how much longer a step of this stretch takes than a usual one."""
    spans = engine.steps.span[engine.steps.between(begin, end)]
    return float(spans.sum()) / max(len(spans) * engine.steps.typical, 1.0) if len(spans) else 1.0


@rule(TENANT, each_engine=True)
def tenant_prompts(case: Case, engine: EngineFacts) -> Results:
    """One tenant waits long for first tokens because its prompts are long."""
    known = [r for r in engine.requests if r.prefill is not None and r.prompt_tokens > 0]
    for tenant in dict.fromkeys(request.tenant for request in known):
        group = [request for request in known if request.tenant == tenant]
        rest = [request for request in known if request.tenant != tenant]
        if len(group) < limit.SAMPLES or len(rest) < limit.SAMPLES:
            continue
        mine, theirs = median([r.prefill for r in group]), median([r.prefill for r in rest])
        if mine < limit.TENANT * theirs or mine - theirs < limit.TENANT_MS * NS_PER_MS:
            continue
        tokens, their_tokens = median(_uncached(group)), median(_uncached(rest))
        if tokens < limit.TENANT * their_tokens:
            continue
        yield TENANT.finding(
            f"tenant {shown(tenant) or '(none)'} alone is slow: prefill p50 {ms(mine):,.0f} ms "
            f"against {ms(theirs):,.0f} ms, for {tokens:,.0f} against {their_tokens:,.0f} prompt "
            "tokens to compute",
            (group[0].begin, group[-1].first_token),
            group,
            float(sum(max(0.0, (r.prefill or 0) - theirs) for r in group)),
            _to_compute(group),
        )


def _uncached(requests: Sequence[RequestFacts]) -> list[int]:
    return [request.uncached for request in requests]


def _to_compute(requests: Sequence[RequestFacts]) -> Exhibit:
    times = [request.begin for request in requests]
    return series("prompt tokens to compute", "tokens", times, _uncached(requests))


@rule(LONGER, REUSE, each_engine=True)
def prefill_grew(case: Case, engine: EngineFacts) -> Results:
    """From some instant on prefill takes longer, for longer prompts or less reuse."""
    known = [r for r in engine.requests if r.prefill is not None and r.prompt_tokens > 0]
    known.sort(key=lambda request: request.begin)
    took = np.array([request.prefill for request in known], float)
    turn = climb(took, limit.GREW_SAMPLES, limit.GREW, limit.GREW_MS)
    if turn is None:
        return
    before, after = known[: turn.at], known[turn.at :]
    if median(_uncached(after)) < 0.75 * limit.GREW * median(_uncached(before)):
        return  # the same work takes longer: not a matter of the prompts
    length, length_before = (median([r.prompt_tokens for r in part]) for part in (after, before))
    cached, cached_before = _cached_share(after), _cached_share(before)
    longer = length >= 0.75 * limit.GREW * length_before
    if not longer and cached > cached_before - 0.2:
        return
    why = (
        f"prompts grew from {length_before:,.0f} to {length:,.0f} tokens (p50)"
        if longer
        else f"the cached share of prompts fell from {percent(cached_before)} to {percent(cached)}"
    )
    yield (LONGER if longer else REUSE).finding(
        f"prefill takes {ms(turn.after):,.0f} ms instead of {ms(turn.before):,.0f} ms (p50): {why}",
        (after[0].begin, after[-1].first_token),
        after,
        float(np.maximum(took[turn.at :] - turn.before, 0).sum()),
        series("prefill", "ms", [r.begin for r in known], took / NS_PER_MS),
        _to_compute(known),
    )


def _cached_share(requests: Sequence[RequestFacts]) -> float:
    whole = sum(request.prompt_tokens for request in requests)
    return sum(max(0, request.cached_tokens) for request in requests) / whole if whole else 0.0


@rule(WARM_UP, each_engine=True)
def warm_up(case: Case, engine: EngineFacts) -> Results:
    """The first request, or the first step of each shape, is much slower than its like."""
    first = list(_first_request(engine))
    yield from first or _first_shapes(engine)


def _computing(engine: EngineFacts, request: RequestFacts) -> int:
    """Return ns of the steps in which its prompt ran; 0 when they are not kept."""
    places = [ran.place for ran in request.passes]
    return int(engine.steps.duration[places].sum()) if places and min(places) >= 0 else 0


def _first_request(engine: EngineFacts) -> Results:
    ran = [
        r
        for r in engine.requests
        if r.first_token is not None and r.lookup is not None and r.uncached > 0
    ]
    ran.sort(key=lambda request: request.lookup or 0)
    if len(ran) <= limit.SAMPLES or not len(engine.steps):
        return
    first, rest = ran[0], ran[1:]
    if first.passes and first.passes[0].place > 2:
        return  # not the engine's first work in this trace
    took = _computing(engine, first)
    alike = [r for r in rest if 0.5 * first.uncached <= r.uncached <= 2 * first.uncached]
    peers = [cost for r in alike if (cost := _computing(engine, r)) > 0]
    if len(peers) < limit.SAMPLES:
        return
    usual = median(peers)
    if took < limit.WARM_UP * usual or took - usual < limit.WARM_UP_MS * NS_PER_MS:
        return
    end = first.first_token or 0
    affected = [first, *(r for r in rest if r.handed is not None and r.handed < end)]
    yield WARM_UP.finding(
        f"warm-up: the first prefill ({first.name}) takes {ms(took):,.0f} ms, the next "
        f"{len(peers)} of its length {ms(usual):,.0f} ms (p50)",
        (first.lookup or first.begin, end),
        affected,
        (took - usual) * len(affected),
        events("prefill", "ms", ((r.lookup, ms(_computing(engine, r))) for r in ran[:100])),
        slowdown=took / usual,
    )


def _first_shapes(engine: EngineFacts) -> Results:
    table = engine.steps
    slow: list[int] = []
    lost = 0.0
    shapes = table.sizes * 4096 + np.minimum(table.prefill, 4095)
    for shape in np.unique(shapes[table.sizes > 0]):
        places = np.flatnonzero(shapes == shape)
        if len(places) <= limit.SAMPLES:
            continue
        usual = median(table.duration[places[1:]])
        took = float(table.duration[places[0]])
        if took >= limit.SHAPE * usual and took - usual >= limit.STALL_MS * NS_PER_MS:
            slow.append(int(places[0]))
            lost += (took - usual) * float(table.sizes[places[0]])
    if len(slow) < limit.SHAPES:
        return
    slow.sort()
    begin, end = table.window(slow[0], slow[-1])
    sizes = ", ".join(str(size) for size in table.sizes[slow[:6]])
    yield WARM_UP.finding(
        f"warm-up: the first step of each of {len(slow)} shapes (batch {sizes}) takes up to "
        f"{ms(float(table.duration[slow].max())):,.0f} ms, later ones "
        f"{ms(median(table.duration[table.sizes > 0])):,.1f} ms (p50)",
        (begin, end),
        engine.decoding(begin, end),
        lost,
        series("first steps", "ms", table.begin[slow], table.duration[slow] / NS_PER_MS),
        stage=Stage.DECODE,
        check="run every batch size once before traffic comes (capture, compile, autotune)",
        confidence=0.75,
    )

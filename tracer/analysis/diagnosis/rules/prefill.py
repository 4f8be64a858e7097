"""Stage 7: somebody else's long prompt, a tenant's long prompts, prompts that grew or reuse that
stopped, warm-up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, median, ms, shown
from tracer.analysis.diagnosis.spell import change, points

LONG_PROMPT, TENANT, LONGER, REUSE, WARM_UP = (
    "long-prompt", "tenant-prompts", "longer-prompts", "reuse-stopped", "warm-up"
)  # fmt: skip


# --- a long prompt of somebody else ---------------------------------------------------------------


@dataclass(slots=True)
class _Harm:
    """What the prefill of one request did to the streams of others (ns)."""

    lost: int = 0
    longest: int = 0
    begin: int = 1 << 62
    end: int = 0
    holes: int = 0
    victims: dict[int, int] = field(default_factory=dict)


def long_prompt(case: Case) -> Sequence[Said]:
    """Streams stop while another request's prompt is computed: in one long step, or in steps that
    decode nothing."""
    return [
        said for engine in case.evidence.engines for said in _long_prompt(case.evidence, engine)
    ]


def _long_prompt(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    usual = table.typical or _usual_itl(engine)
    if not len(table) or not usual:
        return []
    floor = max(limit.HOLE_MS * NS_PER_MS, limit.HOLE_ITL * usual)
    harm: dict[int, _Harm] = defaultdict(_Harm)
    for victim in engine.requests:
        if len(victim.tokens) < 3:
            continue
        gaps = np.diff(victim.tokens)
        for place in np.flatnonzero(gaps >= floor):
            begin, end = int(victim.tokens[place]), int(victim.tokens[place + 1])
            if any(
                lost.begin < end and (lost.resumed or evidence.now) > begin
                for lost in victim.preemptions
            ):
                continue
            owner = _owner(engine, begin, end, victim)
            if owner is not None:
                _add(harm[owner], victim, begin, end, usual)
    if not harm:
        return []
    index, worst = max(harm.items(), key=lambda item: item[1].lost)
    culprit = evidence.requests[index]
    victims = sorted(
        {v for one in harm.values() for v in one.victims},
        key=lambda v: -sum(one.victims.get(v, 0) for one in harm.values()),
    )
    chunks = sum(1 for ran in culprit.passes if ran.tokens > 1)
    lost = sum(one.lost for one in harm.values())
    begin, end = min(one.begin for one in harm.values()), max(one.end for one in harm.values())
    others = f"; {len(harm) - 1} more prompts do the same" if len(harm) > 1 else ""
    first = next((t for t in (culprit.lookup, worst.begin) if t is not None), worst.begin)
    return [
        found(
            evidence,
            LONG_PROMPT,
            Stage.PREFILL,
            f"the prefill of {culprit.name} ({culprit.uncached:,} tokens in {chunks} "
            f"step{'s' if chunks != 1 else ''}) "
            "stops "
            f"{len(worst.victims)} stream{'s' if len(worst.victims) > 1 else ''} for up to "
            f"{ms(worst.longest):,.0f} ms, "
            f"where a token takes {ms(usual):,.1f} ms{others}",
            check="chunked prefill with a smaller token budget, so that decoding goes on beside "
            "it; or other workers for "
            "long prompts",
            lost_ns=lost,
            start=begin,
            end=end,
            confidence=0.95,
            affected=[evidence.requests[v] for v in victims],
            culprit=culprit,
            engine=engine,
            exhibits=[
                Exhibit("prompt tokens a step", "tokens", points(table.begin, table.prefill)),
                Exhibit("ITL", "ms", points(table.tokens_at, table.interval / NS_PER_MS)),
                Exhibit(
                    "culprit scheduled, prompt", "tokens", ((first, float(culprit.prompt_tokens)),)
                ),
            ],
            slowdown=_slowdown(engine, begin, end),
        )
    ]


def _usual_itl(engine: EngineFacts) -> float:
    """Median gap between tokens over all requests, where no step only decodes."""
    gaps = [np.diff(request.tokens) for request in engine.requests if len(request.tokens) >= 3]
    return median(np.concatenate(gaps)) if gaps else 0.0


def _owner(engine: EngineFacts, begin: int, end: int, victim: Asked) -> int | None:
    """Whose prefill filled most of `begin` … `end`, if it was a prefill and a large one; None
    otherwise."""
    table = engine.steps
    low = int(np.searchsorted(table.tokens_at, begin, "right"))
    high = int(np.searchsorted(table.tokens_at, end, "right"))
    chosen = slice(low, high)
    busy = (
        (table.prefill[chosen] > 0)
        & (table.owner[chosen] >= 0)
        & (table.owner[chosen] != victim.index)
    )
    if not busy.any() or int(table.prefill[chosen][busy].sum()) < limit.HOLE_TOKENS:
        return None
    spans = np.where(busy, table.span[chosen], 0)
    if spans.sum() < 0.6 * (end - begin):
        return None
    owners = table.owner[chosen][busy]
    shares = np.bincount(owners, weights=spans[busy].astype(float))
    return int(np.argmax(shares))


def _add(harm: _Harm, victim: Asked, begin: int, end: int, usual: float) -> None:
    excess = int(end - begin - usual)
    harm.lost += excess
    harm.holes += 1
    harm.longest = max(harm.longest, end - begin)
    harm.begin, harm.end = min(harm.begin, begin), max(harm.end, end)
    harm.victims[victim.index] = harm.victims.get(victim.index, 0) + excess


def _slowdown(engine: EngineFacts, begin: int, end: int) -> float:
    """How much longer a step of this stretch takes than a usual one."""
    chosen = engine.steps.between(begin, end)
    count = chosen.stop - chosen.start
    return (
        float(engine.steps.span[chosen].sum()) / max(count * engine.steps.typical, 1.0)
        if count
        else 1.0
    )


# --- tenants --------------------------------------------------------------------------------------


def tenant_prompts(case: Case) -> Sequence[Said]:
    """One tenant waits long for its first tokens because its prompts are long, the others do
    not."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        groups: dict[str, list[Asked]] = defaultdict(list)
        for request in engine.requests:
            if request.prefill is not None and request.prompt_tokens > 0:
                groups[request.tenant].append(request)
        if len(groups) < 2:
            continue
        for tenant, group in groups.items():
            rest = [
                request
                for other, requests in groups.items()
                if other != tenant
                for request in requests
            ]
            if len(group) < limit.SAMPLES or len(rest) < limit.SAMPLES:
                continue
            mine, theirs = _prefills(group), _prefills(rest)
            tokens, their_tokens = (
                median([r.uncached for r in group]),
                median([r.uncached for r in rest]),
            )
            longer = (mine - theirs) / NS_PER_MS
            if (
                mine < limit.TENANT * theirs
                or longer < limit.TENANT_MS
                or tokens < limit.TENANT * their_tokens
            ):
                continue
            said.append(
                found(
                    case.evidence,
                    TENANT,
                    Stage.PREFILL,
                    f"tenant {shown(tenant) or '(none)'} alone is slow: prefill p50 "
                    f"{ms(mine):,.0f} ms against "
                    f"{ms(theirs):,.0f} ms, for {tokens:,.0f} against {their_tokens:,.0f} prompt "
                    "tokens to compute",
                    check=(
                        "this tenant's prompts: what makes them long, and why they are not found "
                        "in the prefix cache"
                    ),
                    lost_ns=float(sum(max(0.0, (r.prefill or 0) - theirs) for r in group)),
                    start=group[0].begin,
                    end=group[-1].first_token,
                    confidence=0.85,
                    affected=group,
                    engine=engine,
                    exhibits=[
                        Exhibit(
                            "prompt tokens to compute",
                            "tokens",
                            points(
                                np.array([r.begin for r in group]),
                                np.array([r.uncached for r in group]),
                            ),
                        )
                    ],
                )
            )
    return said


def _prefills(requests: Sequence[Asked]) -> float:
    return median([request.prefill for request in requests if request.prefill is not None])


# --- prompts that grew, reuse that stopped --------------------------------------------------------


def prefill_grew(case: Case) -> Sequence[Said]:
    """From some instant on prefill takes longer, because prompts are longer or because less of them
    is cached."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        asked = sorted(
            (r for r in engine.requests if r.prefill is not None and r.prompt_tokens > 0),
            key=lambda request: request.begin,
        )
        values = np.array([request.prefill for request in asked], float)
        turn = change(values, limit.GREW_SAMPLES)
        if turn is None or turn.order < limit.GREW_ORDER or turn.after < limit.GREW * turn.before:
            continue
        if turn.after - turn.before < limit.GREW_MS * NS_PER_MS:
            continue
        before, after = asked[: turn.at], asked[turn.at :]
        todo, todo_before = (
            median([r.uncached for r in after]),
            median([r.uncached for r in before]),
        )
        if todo < 0.75 * limit.GREW * todo_before:
            continue  # the same work takes longer: not a matter of the prompts
        length, length_before = (
            median([r.prompt_tokens for r in after]),
            median([r.prompt_tokens for r in before]),
        )
        longer = length >= 0.75 * limit.GREW * length_before
        cached, cached_before = _cached_share(after), _cached_share(before)
        if not longer and cached > cached_before - 0.2:
            continue
        rule, stage = (LONGER, Stage.PREFILL) if longer else (REUSE, Stage.KV_ALLOC)
        why = (
            f"prompts grew from {length_before:,.0f} to {length:,.0f} tokens (p50)"
            if longer
            else f"the cached share of prompts fell from {cached_before:.0%} to {cached:.0%}"
        )
        said.append(
            found(
                case.evidence,
                rule,
                stage,
                f"prefill takes {ms(turn.after):,.0f} ms instead of {ms(turn.before):,.0f} ms "
                f"(p50): {why}",
                check="what changed in the prompts then"
                if longer
                else "what changed at the start of the prompts then",
                lost_ns=float(sum(max(0.0, (r.prefill or 0) - turn.before) for r in after)),
                start=after[0].begin,
                end=after[-1].first_token,
                confidence=0.8,
                affected=after,
                engine=engine,
                exhibits=[
                    Exhibit(
                        "prefill",
                        "ms",
                        points(np.array([r.begin for r in asked]), values / NS_PER_MS),
                    ),
                    Exhibit(
                        "prompt tokens to compute",
                        "tokens",
                        points(
                            np.array([r.begin for r in asked]),
                            np.array([r.uncached for r in asked]),
                        ),
                    ),
                ],
            )
        )
    return said


def _cached_share(requests: Sequence[Asked]) -> float:
    whole = sum(request.prompt_tokens for request in requests)
    return sum(max(0, request.cached_tokens) for request in requests) / whole if whole else 0.0


# --- warm-up --------------------------------------------------------------------------------------


def warm_up(case: Case) -> Sequence[Said]:
    """The first request, or the first step of each shape, is much slower than all that are like
    it."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        first = _first_request(case.evidence, engine)
        said.extend(first or _first_shapes(case.evidence, engine))
    return said


def _computing(engine: EngineFacts, request: Asked) -> int:
    """Time of the steps in which its prompt ran, without the gaps between them (ns); 0 when they
    are not kept."""
    places = [ran.place for ran in request.passes]
    if not places or min(places) < 0:
        return 0
    return int(engine.steps.duration[places].sum())


def _first_request(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    ran = [
        r
        for r in engine.requests
        if r.first_token is not None and r.lookup is not None and r.uncached > 0
    ]
    ran.sort(key=lambda request: request.lookup or 0)
    if len(ran) <= limit.SAMPLES or not len(engine.steps):
        return []
    first, rest = ran[0], ran[1:]
    if first.passes and first.passes[0].place > 2:
        return []  # not the engine's first work in this trace
    took = _computing(engine, first)
    peers = [cost for r in rest if 0.5 * first.uncached <= r.uncached <= 2 * first.uncached
             and (cost := _computing(engine, r)) > 0]  # fmt: skip
    usual = median(peers) if len(peers) >= limit.SAMPLES else 0.0
    if not usual or took < limit.WARM_UP * usual or took - usual < limit.WARM_UP_MS * NS_PER_MS:
        return []
    end = first.first_token
    behind = [r for r in rest if r.handed is not None and end is not None and r.handed < end]
    lost = (took - usual) * (1 + len(behind))
    return [
        found(
            evidence,
            WARM_UP,
            Stage.PREFILL,
            f"warm-up: the first prefill ({first.name}) takes {ms(took):,.0f} ms, the next "
            f"{len(peers)} of its length "
            f"{ms(usual):,.0f} ms (p50)",
            check=(
                "send a request of each usual shape before traffic comes; leave the first one out "
                "of measurements"
            ),
            lost_ns=lost,
            start=first.lookup or first.begin,
            end=end,
            confidence=0.9,
            affected=[first, *behind],
            engine=engine,
            exhibits=[
                Exhibit(
                    "prefill",
                    "ms",
                    tuple((r.lookup or 0, round(ms(_computing(engine, r)), 3)) for r in ran[:100]),
                )
            ],
            slowdown=took / usual,
        )
    ]


def _first_shapes(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    slow: list[int] = []
    lost = 0.0
    shapes = table.sizes * 4096 + np.minimum(table.prefill, 4095)
    for shape in np.unique(shapes[table.sizes > 0]):
        places = np.flatnonzero(shapes == shape)
        if len(places) <= limit.SAMPLES:
            continue
        usual = float(np.median(table.duration[places[1:]]))
        took = float(table.duration[places[0]])
        if took >= limit.SHAPE * usual and took - usual >= limit.STALL_MS * NS_PER_MS:
            slow.append(int(places[0]))
            lost += (took - usual) * float(table.sizes[places[0]])
    if len(slow) < limit.SHAPES:
        return []
    slow.sort()
    begin, end = int(table.begin[slow[0]]), int(table.end[slow[-1]])
    touched = [
        r for r in engine.requests if len(r.tokens) and r.tokens[0] <= end and r.tokens[-1] >= begin
    ]
    times = ", ".join(f"{int(table.sizes[place])}" for place in slow[:6])
    return [
        found(
            evidence,
            WARM_UP,
            Stage.DECODE,
            f"warm-up: the first step of each of {len(slow)} shapes (batch {times}) takes up to "
            f"{ms(float(table.duration[slow].max())):,.0f} ms, later ones "
            f"{ms(median(table.duration[table.sizes > 0])):,.1f} ms (p50)",
            check="run every batch size once before traffic comes (capture, compile, autotune)",
            lost_ns=lost,
            start=begin,
            end=end,
            confidence=0.75,
            affected=touched,
            engine=engine,
            exhibits=[
                Exhibit(
                    "first steps", "ms", points(table.begin[slow], table.duration[slow] / NS_PER_MS)
                )
            ],
        )
    ]

"""Stage 5, why prompts are computed again: identical prefixes that do not hit, prefixes that were
evicted, and prompts that would share but for a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import CannotTell, Exhibit
from tracer.analysis.diagnosis.prefixes import (
    Difference,
    Reuse,
    differences,
    kind_of,
    place_in_text,
    reusable,
)
from tracer.analysis.diagnosis.records import EngineFacts, Evidence, median

NO_HIT, EVICTED, DIFFERENCE = "prefix-no-hit", "prefix-evicted", "prefix-differs"


def no_hit(case: Case) -> Sequence[Said]:
    """Prompts that begin like one that was computed before, and are computed again from the
    start."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        if engine.prefix_caching != 1:
            continue
        chances = [reuse for reuse in reusable(engine) if reuse.blocks >= limit.MISS_BLOCKS]
        if not chances:
            continue
        missed = [reuse for reuse in chances if reuse.got < (1 - limit.MISS_SHARE) * reuse.blocks]
        for rule, group in (
            (EVICTED, [m for m in missed if m.evicted]),
            (NO_HIT, [m for m in missed if not m.evicted]),
        ):
            said.extend(_misses(case.evidence, engine, rule, group, chances))
    return said


def _misses(
    evidence: Evidence, engine: EngineFacts, rule: str, missed: list[Reuse], chances: list[Reuse]
) -> Sequence[Said]:
    size = engine.blocks_of
    tokens = size * sum(reuse.blocks - reuse.got for reuse in missed)
    whole = size * sum(reuse.blocks for reuse in chances)
    least = limit.SAMPLES if rule == EVICTED else 2
    if len(missed) < least or tokens < max(limit.MISS_TOKENS, limit.MISS_SHARE * whole):
        return []
    requests = [reuse.request for reuse in missed]
    lost = tokens * prefill_cost(engine)
    start, end = requests[0].lookup or requests[0].begin, requests[-1].first_token or evidence.now
    first = missed[0]
    exhibits = [
        Exhibit(
            "tokens that a cache would have had",
            "tokens",
            tuple((r.request.lookup or 0, float(size * r.blocks)) for r in missed[:100]),
        ),
        Exhibit(
            "cached tokens",
            "tokens",
            tuple((r.request.lookup or 0, float(r.request.cached_tokens)) for r in missed[:100]),
        ),
    ]
    if rule == EVICTED:
        return [
            found(
                evidence,
                EVICTED,
                Stage.KV_ALLOC,
                f"{len(missed)} of {len(chances)} prompts that begin like an earlier one find "
                "their prefix evicted: "
                f"{tokens:,} tokens computed again",
                check="more KV blocks: the prefix cache lives in what running requests leave free",
                lost_ns=lost,
                start=start,
                end=end,
                confidence=0.8,
                affected=requests,
                engine=engine,
                exhibits=exhibits,
            )
        ]
    same = all(reuse.request.prompt_ids == reuse.earlier.prompt_ids for reuse in missed)
    what = "identical prompts are" if same else "prompts that begin like an earlier one are"
    return [
        found(
            evidence,
            NO_HIT,
            Stage.KV_ALLOC,
            f"{what} not found in the prefix cache: {len(missed)} of {len(chances)} requests reuse "
            f"{sum(reuse.got for reuse in missed) * size:,} of "
            f"{sum(reuse.blocks for reuse in missed) * size:,} tokens "
            f"({first.request.name} begins like {first.earlier.name} and has "
            f"{max(0, first.request.cached_tokens):,} "
            "cached)",
            check=(
                "whether blocks are written to the cache at all: its settings, cache salts, "
                "per-request options"
            ),
            lost_ns=lost,
            start=start,
            end=end,
            confidence=0.85,
            affected=requests,
            engine=engine,
            exhibits=exhibits,
        )
    ]


def prefill_cost(engine: EngineFacts) -> float:
    """ns that one prompt token takes here: from steps, else from requests."""
    if engine.steps.prefill_cost:
        return engine.steps.prefill_cost
    costs = [
        r.prefill / r.uncached
        for r in engine.requests
        if r.prefill is not None and r.uncached >= 16
    ]
    return median(costs) if costs else 0.0


def first_difference(case: Case) -> Sequence[Said]:
    """Prompts that are equal but for a short stretch that changes with each request: everything
    after it is computed again."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        if engine.prefix_caching == 0:
            continue
        pairs = differences(engine)
        if len(pairs) >= limit.DIFFER_REQUESTS:
            said.extend(_difference(case.evidence, engine, pairs))
    return said


def _difference(evidence: Evidence, engine: EngineFacts, pairs: list[Difference]) -> Sequence[Said]:
    middle = int(np.median([pair.at for pair in pairs]))
    same = [pair for pair in pairs if abs(pair.at - middle) <= 8]
    if len(same) < max(limit.DIFFER_REQUESTS, len(pairs) // 2):
        return []
    # The stretch must be another one nearly every time: of two variants each would soon be cached.
    values = {pair.request.prompt_ids[4 * pair.at : 4 * (pair.at + pair.span)] for pair in same}
    if len(values) < max(limit.DIFFER_REQUESTS - 1, len(same) // 2):
        return []
    size = engine.blocks_of
    tails = [pair.tail // size * size for pair in same]
    lost = float(sum(tails)) * prefill_cost(engine)
    requests = [pair.request for pair in same]
    at, length = (
        min(pair.at for pair in same),
        median([pair.request.prompt_tokens for pair in same]),
    )
    places = [place for place in (place_in_text(pair) for pair in same) if place is not None]
    where = f"token {at + 1:,} of {length:,.0f}"
    if places:
        kind = kind_of([place.mine for place in places])
        example = places[-1]
        cited = f": “{example.mine}” here, “{example.theirs}” there" if evidence.quotes else ""
        where = f"{example.part}, at {where}{cited}" + (f" ({kind})" if kind else "")
        check = f"move what changes out of {example.part}, to the end of the prompt"
    else:
        where += " (the text there was not recorded)"
        check = (
            "what changes at that place: record with --with-text to read it; move it to the end of "
            "the prompt"
        )
    return [
        found(
            evidence,
            DIFFERENCE,
            Stage.TEMPLATE,
            f"{len(same)} prompts are equal but for a few tokens in {where}; the "
            f"{median(tails):,.0f} tokens after it "
            "are computed again each time",
            check=check,
            lost_ns=lost,
            start=min(pair.begin for pair in same),
            end=requests[-1].first_token or evidence.now,
            confidence=0.9 if places else 0.75,
            affected=requests,
            engine=engine,
            exhibits=[
                Exhibit(
                    "first differing token",
                    "token",
                    tuple((p.request.begin, float(p.at)) for p in same[:100]),
                ),
                Exhibit(
                    "equal tokens after it",
                    "tokens",
                    tuple((p.request.begin, float(p.tail)) for p in same[:100]),
                ),
                Exhibit(
                    "cached tokens",
                    "tokens",
                    tuple(
                        (
                            p.request.lookup or p.request.begin,
                            float(max(0, p.request.cached_tokens)),
                        )
                        for p in same[:100]
                    ),
                ),
            ],
        )
    ]


def unseen_prompts(case: Case) -> Sequence[Said]:
    """Without token ids nobody can say where prompts differ: told when reuse looks as if it had
    stopped somewhere."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        asked = [
            r
            for r in engine.requests
            if r.lookup is not None and r.prompt_tokens > 0 and r.cached_tokens >= 0
        ]
        if (
            engine.prefix_caching != 1
            or len(asked) < 2 * limit.SAMPLES
            or any(r.prompt_ids for r in asked)
        ):
            continue
        cached = np.array([r.cached_tokens for r in asked])
        lengths = np.array([r.prompt_tokens for r in asked])
        usual = float(np.median(cached))
        # Cached stays constant and small while prompts are long and grow: something differs at one
        # place.
        constant = float(np.mean(np.abs(cached - usual) <= engine.blocks_of)) >= 0.8
        if (
            constant
            and 0 < usual <= 0.25 * median(lengths)
            and float(lengths.max()) >= 2 * float(lengths.min())
        ):
            said.append(
                CannotTell(
                    DIFFERENCE,
                    f"{usual:,.0f} tokens are found in the prefix cache whatever the prompt's "
                    "length (p50 "
                    f"{median(lengths):,.0f}); whether prompts differ early cannot be seen without "
                    "them",
                    "with --with-text",
                    Stage.TEMPLATE,
                )
            )
    return said

"""Stage 5, why prompts are computed again: identical prefixes that do not hit, prefixes that were
evicted, and prompts that would share but for a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import counted, median
from tracer.analysis.diagnosis.finding import CannotTell, events
from tracer.analysis.diagnosis.prefixes import Reuse, differences, kind_of, place_in_text, reusable
from tracer.analysis.diagnosis.records import EngineFacts

NO_HIT: Final = Cause(
    "prefix-no-hit",
    Stage.KV_ALLOC,
    0.85,
    "whether blocks are written to the cache at all: its settings, cache salts, per-request "
    "options",
    explains=("reuse-stopped",),
)
EVICTED: Final = Cause(
    "prefix-evicted",
    Stage.KV_ALLOC,
    0.8,
    "more KV blocks: the prefix cache lives in what running requests leave free",
)
DIFFERENCE: Final = Cause(
    "prefix-differs",
    Stage.TEMPLATE,
    0.9,
    "what changes at that place: record with --with-text to read it; move it to the end of "
    "the prompt",
    explains=("prefix-no-hit", "prefix-evicted", "reuse-stopped"),
)

SHOWN: Final = 100
"""Requests whose figures stand as evidence."""


def prefill_cost(engine: EngineFacts) -> float:
    """Return ns that one prompt token takes here: from steps, else from requests."""
    if engine.steps.prefill_cost:
        return engine.steps.prefill_cost
    computed = [r for r in engine.requests if r.prefill is not None and r.uncached >= 16]
    return median([(r.prefill or 0) / r.uncached for r in computed]) if computed else 0.0


@rule(NO_HIT, EVICTED, each_engine=True)
def no_hit(case: Case, engine: EngineFacts) -> Results:
    """Prompts that begin like one that was computed before are computed again from the start."""
    if engine.prefix_caching != 1:
        return
    chances = [reuse for reuse in reusable(engine) if reuse.blocks >= limit.MISS_BLOCKS]
    missed = [reuse for reuse in chances if reuse.got < (1 - limit.MISS_SHARE) * reuse.blocks]
    size = engine.blocks_of
    whole = size * sum(reuse.blocks for reuse in chances)
    for cause, least in ((EVICTED, limit.SAMPLES), (NO_HIT, 2)):
        group = [reuse for reuse in missed if reuse.evicted == (cause is EVICTED)]
        tokens = size * sum(reuse.blocks - reuse.got for reuse in group)
        if len(group) < least or tokens < max(limit.MISS_TOKENS, limit.MISS_SHARE * whole):
            continue
        requests = [reuse.request for reuse in group]
        yield cause.finding(
            f"{len(group)} of {len(chances)} prompts that begin like an earlier one find their "
            f"prefix evicted: {counted(tokens, 'token')} computed again"
            if cause is EVICTED
            else _never_written(group, len(chances), size),
            (requests[0].lookup or 0, requests[-1].first_token or case.evidence.now),
            requests,
            tokens * prefill_cost(engine),
            events(
                "tokens that a cache would have had",
                "tokens",
                [(reuse.request.lookup, size * reuse.blocks) for reuse in group[:SHOWN]],
            ),
            events(
                "cached tokens", "tokens", [(r.lookup, r.cached_tokens) for r in requests[:SHOWN]]
            ),
        )


def _never_written(missed: Sequence[Reuse], chances: int, size: int) -> str:
    same = all(reuse.request.prompt_ids == reuse.earlier.prompt_ids for reuse in missed)
    what = "identical prompts are" if same else "prompts that begin like an earlier one are"
    first = missed[0]
    return (
        f"{what} not found in the prefix cache: {len(missed)} of {chances} requests reuse "
        f"{sum(reuse.got for reuse in missed) * size:,} of "
        f"{sum(reuse.blocks for reuse in missed) * size:,} tokens ({first.request.name} begins "
        f"like {first.earlier.name} and has {max(0, first.request.cached_tokens):,} cached)"
    )


@rule(DIFFERENCE, each_engine=True)
def first_difference(case: Case, engine: EngineFacts) -> Results:
    """Prompts are equal but for a short stretch: all after it is computed again."""
    pairs = [] if engine.prefix_caching == 0 else differences(engine)
    if len(pairs) < limit.DIFFER_REQUESTS:
        return
    middle = int(np.median([pair.at for pair in pairs]))
    same = [pair for pair in pairs if abs(pair.at - middle) <= 8]
    if len(same) < max(limit.DIFFER_REQUESTS, len(pairs) // 2):
        return
    # The stretch must be another one nearly every time: of two variants each would soon be cached.
    values = {pair.request.prompt_ids[4 * pair.at : 4 * (pair.at + pair.span)] for pair in same}
    if len(values) < max(limit.DIFFER_REQUESTS - 1, len(same) // 2):
        return
    requests = [pair.request for pair in same]
    size = engine.blocks_of
    tails = [pair.tail // size * size for pair in same]
    length = median([request.prompt_tokens for request in requests])
    where = f"token {min(pair.at for pair in same) + 1:,} of {length:,.0f}"
    check, confidence = DIFFERENCE.check, DIFFERENCE.confidence
    places = [place for place in map(place_in_text, same) if place is not None]
    if places:
        kind = kind_of([place.mine for place in places])
        last = places[-1]
        cited = f": “{last.mine}” here, “{last.theirs}” there" if case.evidence.quotes else ""
        where = f"{last.part}, at {where}{cited}" + (f" ({kind})" if kind else "")
        check = f"move what changes out of {last.part}, to the end of the prompt"
    else:
        where += " (the text there was not recorded)"
        confidence = 0.75
    shown, cached = same[:SHOWN], requests[:SHOWN]
    yield DIFFERENCE.finding(
        f"{len(same)} prompts are equal but for a few tokens in {where}; the "
        f"{median(tails):,.0f} tokens after it are computed again each time",
        (min(pair.begin for pair in same), requests[-1].first_token or case.evidence.now),
        requests,
        float(sum(tails)) * prefill_cost(engine),
        events("first differing token", "token", [(p.request.begin, p.at) for p in shown]),
        events("equal tokens after it", "tokens", [(p.request.begin, p.tail) for p in shown]),
        events("cached tokens", "tokens", [(r.lookup, max(0, r.cached_tokens)) for r in cached]),
        check=check,
        confidence=confidence,
    )


@rule(each_engine=True)
def unseen_prompts(case: Case, engine: EngineFacts) -> Results:
    """Reuse looks as if it stopped at one place, and prompts were not recorded."""
    asked = [
        request
        for request in engine.requests
        if request.lookup is not None and request.prompt_tokens > 0 and request.cached_tokens >= 0
    ]
    if engine.prefix_caching != 1 or len(asked) < 2 * limit.SAMPLES:
        return
    if any(request.prompt_ids for request in asked):
        return
    cached = np.array([request.cached_tokens for request in asked])
    lengths = np.array([request.prompt_tokens for request in asked])
    usual = median(cached)
    # Cached stays constant and small while prompts are long and grow: something differs at one
    # place.
    constant = float(np.mean(np.abs(cached - usual) <= engine.blocks_of)) >= 0.8
    grows = lengths.max() >= 2 * lengths.min()
    if constant and grows and 0 < usual <= 0.25 * median(lengths):
        yield CannotTell(
            DIFFERENCE.name,
            f"{usual:,.0f} tokens are found in the prefix cache whatever the prompt's length (p50 "
            f"{median(lengths):,.0f}); without the prompts it cannot be seen where they differ",
            "with --with-text",
            Stage.TEMPLATE,
        )

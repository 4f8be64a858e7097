"""What prompts have in common: what a prefix cache without a limit would have reused, and where two
prompts that should have shared first differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.records import EngineFacts, RequestFacts
from tracer.analysis.diagnosis.steps import Ints
from tracer.format.text import clean

HASHED_BLOCKS: Final = 512
"""Blocks of a prompt that are looked up: all of the token ids that hooks keep (8,192 of them in
blocks of 16)."""
PAIRED: Final = 300
"""Requests that are compared with earlier ones; of more, every n-th."""
LOOK_BACK: Final = 4
"""Earlier requests that each is compared with."""
DECODED: Final = 64
"""Prompts whose ids are kept decoded meanwhile."""
_GRAM: Final = 6
"""Tokens that must agree in a row for two prompts to be in step again after a difference."""
_EXCERPT: Final = 40
"""Characters of differing text that are cited."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """A request whose prompt begins like that of an `earlier` one: `blocks` full blocks could have
    been reused, `got` were; `evicted`: the cache was emptied in between."""

    request: RequestFacts
    earlier: RequestFacts
    blocks: int
    got: int
    evicted: bool


def reusable(engine: EngineFacts) -> list[Reuse]:
    """Return what a prefix cache without a limit would have found at this engine."""
    size = engine.blocks_of
    width = 4 * size
    known: dict[int, tuple[int, RequestFacts]] = {}
    """Hash of a prompt up to the end of a block → when it was first in the cache, and whose it
    was."""
    out: list[Reuse] = []
    requests = [
        (request.lookup, request)
        for request in engine.requests
        if request.prompt_ids and request.lookup is not None and request.cached_tokens >= 0
    ]
    requests.sort(key=lambda pair: pair[0])
    for lookup, request in requests:
        ids = request.prompt_ids
        # Engines write blocks to the cache when they are computed or when they are given back: take
        # the later.
        written = request.over if request.first_token is not None else None
        # The last token is always computed: its logits are wanted.
        most = max(0, request.prompt_tokens - 1) // size
        chain, blocks, since = 0, 0, 0
        earlier: RequestFacts | None = None
        for block in range(min(len(ids) // width, HASHED_BLOCKS)):
            chain = hash((chain, ids[block * width : (block + 1) * width]))
            entry = known.get(chain)
            if entry is not None and entry[0] <= lookup and block == blocks < most:
                blocks, earlier, since = block + 1, entry[1], max(since, entry[0])
            if written is not None and (entry is None or entry[0] > written):
                known[chain] = (written, request)
        if earlier is not None:
            evicted = bool(((engine.evictions >= since) & (engine.evictions <= lookup)).any())
            got = min(blocks, request.cached_tokens // size)
            out.append(Reuse(request, earlier, blocks, got, evicted))
    return out


@dataclass(frozen=True, slots=True)
class Difference:
    """Two prompts part at token `at`; after `span` tokens of `request` and `passed` of `other` they
    agree again for `tail` tokens."""

    request: RequestFacts
    other: RequestFacts
    at: int
    span: int
    tail: int
    passed: int

    @property
    def begin(self) -> int:
        """When the first of the two that has something in that place came (ns). What replaces
        nothing may still change how a neighbouring token is cut."""
        return self.other.begin if 2 * self.passed >= self.span else self.request.begin


def differences(engine: EngineFacts) -> list[Difference]:
    """Return for each request the earlier prompt that shares most but for a short stretch."""
    candidates = [
        request
        for request in sorted(engine.requests, key=lambda request: request.begin)
        if len(request.prompt_ids) >= 4 * limit.DIFFER_TOKENS and request.lookup is not None
    ]
    chosen = [
        place
        for place, request in enumerate(candidates)
        if place and request.uncached >= limit.DIFFER_TOKENS
    ]
    if len(chosen) > PAIRED:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, PAIRED).astype(int)]

    @lru_cache(DECODED)
    def ids(place: int) -> Ints:
        return candidates[place].ids

    out: list[Difference] = []
    for place in chosen:
        found = [
            _compare(candidates[place], ids(place), candidates[other], ids(other))
            for other in range(place - 1, max(-1, place - 1 - LOOK_BACK), -1)
        ]
        best = max(filter(None, found), key=lambda difference: difference.tail, default=None)
        if best is not None:
            out.append(best)
    return out


def _compare(
    request: RequestFacts, mine: Ints, other: RequestFacts, theirs: Ints
) -> Difference | None:
    """Return where two prompts part and meet again; None when too little follows."""
    at = _apart(mine, theirs)
    if at == min(len(mine), len(theirs)):
        return None
    if request.cached_tokens > at + 16 * 4:
        return None  # found beyond the difference, from another prompt
    span = limit.DIFFER_SPAN
    # Were they in step again after at most `span` tokens, for longer than that, then these tokens
    # would stand in both.
    sure = mine[at + span : at + span + _GRAM].astype("<u4").tobytes()
    if len(sure) < 4 * _GRAM:
        return None
    if other.prompt_ids.find(sure, 4 * at, 4 * (at + 2 * span + _GRAM)) < 0:
        return None
    ahead: dict[bytes, int] = {}
    for shift in range(min(span, len(theirs) - at - _GRAM) + 1):
        ahead.setdefault(theirs[at + shift : at + shift + _GRAM].tobytes(), shift)
    for skipped in range(span + 1):
        met = ahead.get(mine[at + skipped : at + skipped + _GRAM].tobytes())
        if met is None or (skipped == 0 and met == 0):
            continue
        tail = _apart(mine[at + skipped :], theirs[at + met :])
        if tail >= max(limit.DIFFER_TOKENS, limit.DIFFER_SHARE * len(mine)):
            return Difference(request, other, at, max(1, skipped), tail, met)
        return None
    return None


def _apart(mine: Ints, theirs: Ints) -> int:
    """Return how many ids are equal from the start."""
    shortest = min(len(mine), len(theirs))
    unequal = np.flatnonzero(mine[:shortest] != theirs[:shortest])
    return int(unequal[0]) if len(unequal) else shortest


_MARKERS: Final = re.compile(
    r"<\|im_start\|>(\w+)|<\|start_header_id\|>(\w+)<\|end_header_id\|>|<start_of_turn>(\w+)"
    r"|<\|(system|user|assistant|tool)\|>|(\[INST\])|(<<SYS>>)"
)
_ROLE_WORDS: Final = {"[INST]": "user", "<<SYS>>": "system", "model": "assistant"}
_KINDS: Final = (
    ("a time", r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\d{10,13}\b"),
    ("an id", r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}|[0-9a-fA-F]{12,}"),
    ("a number", r"\d"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where two rendered prompts first differ: an excerpt of each, and the part of the template."""

    mine: str
    theirs: str
    part: str


def place_in_text(difference: Difference) -> Place | None:
    """Return the first difference in the rendered texts, made fit for a terminal; None when a text
    was not kept or they do not differ."""
    mine, theirs = difference.request.prompt_text, difference.other.prompt_text
    if not mine or not theirs or mine == theirs:
        return None
    shortest = min(len(mine), len(theirs))
    at = next((i for i in range(shortest) if mine[i] != theirs[i]), shortest)
    begin = at
    while begin > 0 and at - begin < _EXCERPT // 2 and not mine[begin - 1].isspace():
        begin -= 1
    return Place(_excerpt(mine, begin, at), _excerpt(theirs, begin, at), template_part(mine, at))


def _excerpt(text: str, begin: int, at: int) -> str:
    end = at
    while end < len(text) and end - begin < _EXCERPT and not text[end].isspace():
        end += 1
    return clean(text[begin:end])


def template_part(text: str, at: int) -> str:
    """Return the part of a rendered prompt that `at` is in: a message, or the whole."""
    roles = [next(filter(None, m.groups())) for m in _MARKERS.finditer(text) if m.start() <= at]
    if not roles:
        return "the prompt"
    role = _ROLE_WORDS.get(roles[-1], roles[-1])
    if role == "system":
        return "the system prompt"
    return f"message {len(roles)} ({clean(role)[:20]})"


def kind_of(values: Sequence[str]) -> str:
    """Return what sort of text changes from request to request; empty when unknown."""
    for kind, pattern in _KINDS:
        if values and all(re.search(pattern, value) for value in values):
            return kind
    return ""

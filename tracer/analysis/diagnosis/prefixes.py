"""What prompts have in common: what a prefix cache without a limit would have reused, and where two
prompts that should have shared first differ."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.records import Asked, EngineFacts
from tracer.analysis.diagnosis.steps import Ints
from tracer.format.text import clean

HASHED_BLOCKS: Final = 512
"""Blocks of a prompt that are looked up: all of the token ids that hooks keep (8,192 of them in
blocks of 16)."""
PAIRED: Final = 300
"""Requests that are compared with earlier ones; of more, every n-th."""
LOOK_BACK: Final = 4
"""Earlier requests that each is compared with."""
_GRAM: Final = 6
"""Tokens that must agree in a row for two prompts to be in step again after a difference."""
_EXCERPT: Final = 40
"""Characters of differing text that are told."""

_MARKERS: Final = re.compile(
    r"<\|im_start\|>(\w+)|<\|start_header_id\|>(\w+)<\|end_header_id\|>|<start_of_turn>(\w+)|<\|(system|user|assistant|tool)\|>"
    r"|(\[INST\])|(<<SYS>>)"
)
_ROLE_WORDS: Final = {"[INST]": "user", "<<SYS>>": "system", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class Reuse:
    """A request whose prompt begins like an earlier one's. `blocks` full blocks could have been
    reused from `earlier` requests that had computed them, `got` were; `evicted` whether the cache
    was emptied in between."""

    request: Asked
    earlier: Asked
    blocks: int
    got: int
    evicted: bool


def reusable(engine: EngineFacts) -> list[Reuse]:
    """What a prefix cache without a limit would have found at this engine, for every request that
    tells its ids."""
    size = engine.blocks_of
    width = 4 * size
    known: dict[int, tuple[int, Asked]] = {}
    out: list[Reuse] = []
    requests = [
        r for r in engine.requests if r.prompt_ids and r.lookup is not None and r.cached_tokens >= 0
    ]
    requests.sort(key=lambda request: request.lookup or 0)
    for request in requests:
        assert request.lookup is not None
        ids = request.prompt_ids
        written = request.over if request.first_token is not None else None
        # The last token is always computed: its logits are wanted.
        most = min(len(ids) // width, max(0, request.prompt_tokens - 1) // size, HASHED_BLOCKS)
        chain, blocks = 0, 0
        earlier: Asked | None = None
        written_at = 0
        matching = True
        for block in range(min(len(ids) // width, HASHED_BLOCKS)):
            chain = hash((chain, ids[block * width : (block + 1) * width]))
            entry = known.get(chain)
            if matching and entry is not None and entry[0] <= request.lookup and block < most:
                blocks, earlier, written_at = block + 1, entry[1], max(written_at, entry[0])
            else:
                matching = False
            # Engines write blocks to the cache when they are computed or when they are given back:
            # take the later.
            if written is not None and (entry is None or entry[0] > written):
                known[chain] = (written, request)
        if earlier is not None and blocks:
            evicted = bool(
                ((engine.evictions >= written_at) & (engine.evictions <= request.lookup)).any()
            )
            out.append(
                Reuse(request, earlier, blocks, min(blocks, request.cached_tokens // size), evicted)
            )
    return out


# --- the first difference -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Two prompts part at token `at`; after `span` tokens of `request` and `passed` of `other` they
    agree again for `tail` tokens."""

    request: Asked
    other: Asked
    at: int
    span: int
    tail: int
    passed: int

    @property
    def begin(self) -> int:
        """When the first of the two that has something in that place came (ns). What replaces
        nothing may still change how a neighbouring token is cut."""
        return self.other.begin if 2 * self.passed >= self.span else self.request.begin


def ids_of(request: Asked) -> Ints:
    """Its prompt's token ids, as far as they were kept."""
    return np.frombuffer(request.prompt_ids[: len(request.prompt_ids) // 4 * 4], "<u4").astype(
        np.int64
    )


def differences(engine: EngineFacts) -> list[Difference]:
    """For requests with much to compute: the earlier prompt that they would share most with but for
    a short stretch."""
    candidates = [
        request for request in sorted(engine.requests, key=lambda request: request.begin)
        if len(request.prompt_ids) >= 4 * limit.DIFFER_TOKENS and request.lookup is not None
    ]  # fmt: skip
    chosen = [place for place, request in enumerate(candidates)
              if place and request.uncached >= limit.DIFFER_TOKENS]  # fmt: skip
    if len(chosen) > PAIRED:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, PAIRED).astype(int)]
    decoded: OrderedDict[int, Ints] = OrderedDict()

    def ids(place: int) -> Ints:
        if place not in decoded:
            decoded[place] = ids_of(candidates[place])
            if len(decoded) > 64:
                decoded.popitem(last=False)
        return decoded[place]

    out: list[Difference] = []
    for place in chosen:
        best: Difference | None = None
        for back in range(1, LOOK_BACK + 1):
            if place - back < 0:
                break
            found = _compare(
                candidates[place], ids(place), candidates[place - back], ids(place - back)
            )
            if found is not None and (best is None or found.tail > best.tail):
                best = found
        if best is not None:
            out.append(best)
    return out


def _compare(request: Asked, mine: Ints, other: Asked, theirs: Ints) -> Difference | None:
    """Where two prompts part and meet again; None when they do not, or do so for too short a
    stretch to matter."""
    shortest = min(len(mine), len(theirs))
    unequal = np.flatnonzero(mine[:shortest] != theirs[:shortest])
    if not len(unequal):
        return None
    at = int(unequal[0])
    if request.cached_tokens > at + 16 * 4:
        return None  # found beyond the difference, from another prompt
    span = limit.DIFFER_SPAN
    # Were they in step again after at most `span` tokens, for longer than that, then these tokens
    # would stand in both.
    sure = mine[at + span : at + span + _GRAM].astype("<u4").tobytes()
    if (
        len(sure) < 4 * _GRAM
        or other.prompt_ids.find(sure, 4 * at, 4 * (at + 2 * span + _GRAM)) < 0
    ):
        return None
    ahead: dict[bytes, int] = {}
    for shift in range(span + 1):
        gram = theirs[at + shift : at + shift + _GRAM]
        if len(gram) < _GRAM:
            break
        ahead.setdefault(gram.tobytes(), shift)
    for skipped in range(span + 1):
        gram = mine[at + skipped : at + skipped + _GRAM]
        if len(gram) < _GRAM:
            return None
        met = ahead.get(gram.tobytes())
        if met is None or (skipped == 0 and met == 0):
            continue
        a, b = mine[at + skipped :], theirs[at + met :]
        length = min(len(a), len(b))
        apart = np.flatnonzero(a[:length] != b[:length])
        tail = int(apart[0]) if len(apart) else length
        if tail >= max(limit.DIFFER_TOKENS, limit.DIFFER_SHARE * len(mine)):
            return Difference(request, other, at, max(1, skipped), tail, met)
        return None
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where two rendered prompts first differ: what stands there in each, and in which part of the
    template."""

    mine: str
    theirs: str
    part: str
    character: int


def place_in_text(difference: Difference) -> Place | None:
    """The first difference in the rendered texts; None when a text was not kept or they do not
    differ.

    Both excerpts are made fit for a terminal.
    """
    mine, theirs = difference.request.prompt_text, difference.other.prompt_text
    if not mine or not theirs:
        return None
    shortest = min(len(mine), len(theirs))
    at = next((i for i in range(shortest) if mine[i] != theirs[i]), shortest)
    if at == shortest == max(len(mine), len(theirs)):
        return None
    begin = at
    while begin > 0 and at - begin < _EXCERPT // 2 and not mine[begin - 1].isspace():
        begin -= 1
    return Place(
        _excerpt(mine, begin, at), _excerpt(theirs, begin, at), template_part(mine, at), at
    )


def _excerpt(text: str, begin: int, at: int) -> str:
    end = at
    while end < len(text) and end - begin < _EXCERPT and not text[end].isspace():
        end += 1
    return clean(text[begin:end])


def template_part(text: str, at: int) -> str:
    """Which part of a rendered prompt the character `at` is in: the message, by its number and
    role, or the whole."""
    role, number = "", 0
    for match in _MARKERS.finditer(text):
        if match.start() > at:
            break
        word = next(group for group in match.groups() if group)
        role, number = _ROLE_WORDS.get(word, word), number + 1
    if not role:
        return "the prompt"
    if role == "system":
        return "the system prompt"
    return f"message {number} ({clean(role)[:20]})"


def kind_of(values: Sequence[str]) -> str:
    """What sort of text changes from request to request, in a word or two; empty when it is none
    that we know."""
    if not values:
        return ""
    if all(re.search(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\d{10,13}\b", value) for value in values):
        return "a time"
    if all(
        re.search(r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}|[0-9a-fA-F]{12,}", value) for value in values
    ):
        return "an id"
    if all(re.search(r"\d", value) for value in values):
        return "a number"
    return ""

"""The figures of a recorded trace counted again from its events alone, in plain Python and without
the fold.

Only for traces that lost nothing: a request is whatever shares an id; who is a member of a step
follows from the deltas; times are subtracted, sorted and ranked. Slow, short and obvious is the
point.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_hooks.protocol import events as ev
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import unpack_u32
from tracer.recording.trace_file import TraceFile

SLOTS = {10.0: (10, NS_PER_S), 60.0: (12, 5 * NS_PER_S), 600.0: (20, 30 * NS_PER_S)}
"""Number and length of the slots of each window, as docs/numbers.md has them."""


@dataclass
class Told:
    """One request as its events tell it."""

    engine: str = ""
    route: str = ""
    tenant: str = ""
    at: dict[str, int] = field(default_factory=dict)
    """Instants by name, the first one told."""
    prompt: int = -1
    cached: int = -1
    output: int = -1
    reason: str = ""
    status: int = -1
    disconnected: bool = False
    offline: bool = False
    preemptions: list[int] = field(default_factory=list)
    waits: bool = False
    """Preempted, and not scheduled since."""
    tokens: list[int] = field(default_factory=list)
    """Instants of its output tokens."""

    def first(self, name: str, t: int) -> None:
        """Note an instant unless it was told before."""
        self.at.setdefault(name, t)


class Recount:
    """A trace, told by its events in the order of the file."""

    def __init__(self, path: Path) -> None:
        self.requests: list[Told] = []
        self.now = self.began = 0
        self.steps: list[tuple[int, int, int]] = []
        """(begin, tokens scheduled, token budget or -1)."""
        self.last_step: dict[str, Any] = {}
        self.lost = 0
        self._by_key: dict[tuple[str, int], Told] = {}
        self._by_rid: dict[str, Told] = {}
        self._members: dict[str, set[int]] = defaultdict(set)
        self._token: dict[str, int] = {}
        self._given_back: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._budget: dict[str, int] = {}
        with TraceFile(path) as trace:
            for delivery in trace.deliveries():
                for event in delivery.events:
                    self.now = max(self.now, event.t)
                    self.began = min(self.began or event.t, event.t)
                    self._take(delivery.source, event)

    # --- events

    def _of(self, source: str, key: int) -> Told:
        told = self._by_key.get((source, key))
        if told is None:
            told = self._by_key[source, key] = Told()
            self.requests.append(told)
        return told

    def _known_as(self, source: str, key: int, rid: str) -> None:
        mine, other = self._of(source, key), self._by_rid.get(rid)
        if not rid:
            return
        if other is None or other is mine:
            self._by_rid[rid] = mine
            return
        for name, t in mine.at.items():
            other.first(name, t)
        other.engine, other.route = other.engine or mine.engine, other.route or mine.route
        other.tenant = other.tenant or mine.tenant
        other.prompt = max(other.prompt, mine.prompt)
        other.tokens = other.tokens or mine.tokens
        self.requests.remove(mine)
        self._by_key = {
            known: other if told is mine else told for known, told in self._by_key.items()
        }

    def _take(self, source: str, event: Any) -> None:
        kind = type(event)
        if kind is ev.Gap or kind is ev.SourceGone:
            self.lost += kind is ev.Gap
        elif kind is ev.Engine:
            self._budget[source] = event.max_batch_tokens
        elif kind is ev.Step:
            self._step(source, event)
        elif hasattr(event, "key"):
            self._request(source, event, self._of(source, event.key))

    def _request(self, source: str, event: Any, told: Told) -> None:
        t = event.t
        match event:
            case ev.Received():
                told.first("received", t)
                told.route, told.offline = told.route or event.route, told.offline or event.offline
                told.tenant = told.tenant or event.tenant
                self._known_as(source, event.key, event.rid)
            case ev.Params():
                told.tenant = told.tenant or event.tenant
            case ev.Alias():
                self._known_as(source, event.key, event.rid)
            case ev.Begin(stage=4):
                told.first("handed", t)
            case ev.End(stage=3):
                told.prompt = event.units if told.prompt < 0 else told.prompt
            case ev.End(stage=10):
                told.first("handed_out", t)
            case ev.Prompt():
                told.prompt = event.tokens if told.prompt < 0 else told.prompt
            case ev.Queued():
                told.engine = told.engine or source
                told.first("queued", t)
                told.prompt = event.prompt_tokens if event.prompt_tokens >= 0 else told.prompt
                self._known_as(source, event.key, event.rid)
            case ev.Scheduled():
                told.waits = False
                if "lookup" not in told.at and not event.resumed:
                    told.at["lookup"], told.cached = event.lookup, event.cached_tokens
            case ev.Preempted():
                if not told.waits:  # told again before it was scheduled again: still the same one
                    told.preemptions.append(t)
                told.waits = True
            case ev.Finished():
                told.at["finished"] = min(t, told.at.get("finished", t))
                told.reason = event.reason if told.reason in ("", "cancelled") else told.reason
                told.output = max(told.output, event.output_tokens)
                told.prompt = event.prompt_tokens if event.prompt_tokens >= 0 else told.prompt
            case ev.Released():
                if "released" not in told.at:
                    self._given_back[source].append((t, event.freed, event.cached))
                told.first("released", t)
            case ev.Closed():
                told.first("closed", t)
                told.status, told.disconnected = (
                    event.status,
                    told.disconnected or event.disconnected,
                )

    def _step(self, source: str, event: Any) -> None:
        members = self._members[source]
        members.difference_update(unpack_u32(event.left))
        members.update(unpack_u32(event.joined))
        values = unpack_u32(event.odd)
        odd = dict(zip(values[::3], values[2::3], strict=False))
        members.update(odd)
        offset = (
            event.token if event.token >= 0 else event.sampled if event.sampled >= 0 else event.end
        )
        token = self._token[source] = max(event.t + offset, self._token.get(source, 0))
        for key in members:
            told = self._of(source, key)
            told.engine = told.engine or source
            told.tokens += [token] * odd.get(key, 1)
        self.steps.append((event.t, event.tokens, self._budget.get(source, -1)))
        self.last_step[source] = event

    def blocks(self) -> tuple[int, int, int]:
        """Blocks used, cached and free now: what the last step told, and what was given back since
        it was chosen."""
        used = cached = free = 0
        for source, step in self.last_step.items():
            back = [
                given
                for given in self._given_back[source]
                if given[0] > step.t + max(0, step.scheduled)
            ]
            freed, kept = sum(given[1] for given in back), sum(given[2] for given in back)
            used, cached, free = (
                used + step.used - freed - kept,
                cached + step.cached + kept,
                free + step.free + freed,
            )
        return used, cached, free

    # --- figures

    def since(self, window_s: float) -> int:
        """From when on samples are in a window."""
        if math.isinf(window_s):
            return 0
        number, length = SLOTS[window_s]
        return int((self.now // length - number + 1) * length)

    def latencies(self, of: list[Told]) -> dict[str, list[tuple[int, float]]]:
        """(instant, ns) of each sample of each latency."""
        names = ("queue", "prefill", "ttft", "itl", "tpot", "e2e")
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}

        def add(name: str, begin: int | None, end: int | None, t: int | None = None) -> None:
            if begin is not None and end is not None and end >= begin:
                found[name].append((end if t is None else t, end - begin))

        for told in of:
            at = told.at
            first = told.tokens[0] if told.tokens else None
            add("queue", at.get("handed", at.get("queued")), at.get("lookup"))
            add("prefill", at.get("lookup"), first)
            if told.offline or told.tokens or told.output > 0:  # else what went out was no token
                add("ttft", at.get("received"), first if told.offline else at.get("handed_out"))
            found["itl"] += gaps(told.tokens)
            if self.over(told) is None:
                continue
            n = told.output if told.output >= 0 else len(told.tokens)
            if 2 <= n <= len(told.tokens):
                last = told.tokens[n - 1]
                found["tpot"].append((max(last, at["finished"]), (last - told.tokens[0]) / (n - 1)))
            if (
                self.reason(told) not in ("failed", "rejected", "cancelled")
                and not told.disconnected
            ):
                add("e2e", at.get("received"), self.closed(told))
        return found

    def closed(self, told: Told) -> int | None:
        """End of E2E."""
        if not told.offline and "received" in told.at:
            return told.at.get("closed")
        last = (
            max([told.at["finished"], *told.tokens[: max(0, told.output)]])
            if "finished" in told.at
            else None
        )
        return told.at.get(
            "closed", max(told.at["released"], last or 0) if "released" in told.at else last
        )

    def over(self, told: Told) -> int | None:
        """When nothing more was to come of it."""
        at = told.at
        engaged = "queued" in at or "lookup" in at or bool(told.tokens)
        if not told.offline and "received" in at:
            return at.get("closed") if "finished" in at or not engaged else None
        return at.get("released") if "finished" in at and "released" in at else None

    def reason(self, told: Told) -> str:
        """How it ended."""
        if told.status >= 400 and not told.disconnected and told.reason != "cancelled":
            return "failed" if told.status >= 500 else "rejected"
        return told.reason.lower() or ("cancelled" if told.disconnected else "unknown")

    def own_itl(self, told: Told) -> float | None:
        """99th percentile of its own gaps."""
        if not told.output <= len(told.tokens) or len(told.tokens) < 2:
            return None
        return rank(
            [
                gap
                for _, gap in gaps(told.tokens[: told.output] if told.output >= 0 else told.tokens)
            ],
            0.99,
        )


def gaps(tokens: list[int]) -> list[tuple[int, float]]:
    """(instant, gap) for each token but the first; tokens of one instant share the gap before
    it."""
    found: list[tuple[int, float]] = []
    counts = Counter(tokens)
    instants = sorted(counts)
    if instants:
        found += [(instants[0], 0.0)] * (counts[instants[0]] - 1)
    for before, instant in itertools.pairwise(instants):
        found += [(instant, (instant - before) / counts[instant])] * counts[instant]
    return found


def rank(values: list[Any], share: float) -> Any:
    """Nearest-rank quantile; None without values."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1] if values else None

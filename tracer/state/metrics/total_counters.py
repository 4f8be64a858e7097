"""What has been counted since the trace began: how requests ended, their tokens, their latencies,
their stages.

A timer (`tracer.state.metrics.timers`) forgets what is older than its windows, and a request is
dropped when it is old; what a counter or a histogram of a metrics endpoint says must never shrink.
So each request is counted here once, by the engine that had it and the route that it came by: a
latency as soon as it is known, the rest a little after it is over. One that was given up as lost
stays counted as that, whatever is heard of it later.

Histograms have few, fixed buckets (those that the GenAI semantic conventions ask for, where they
name any) and an exact sum. What a client can choose freely is bounded: beyond `ROUTES` routes or
`REASONS` reasons it is ``other``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.state.request.outcome import FAILED, error_of, reason_of
from tracer.state.request.request import Request
from tracer.state.request.waterfall import stage_lengths

_STAGES: Final = tuple(stage.id for stage in Stage)

OTHER: Final = "other"
ROUTES: Final = 16
REASONS: Final = 16
SOURCES: Final = 32
GRACE_NS: Final = 2 * NS_PER_S
"""What processes tell of a request comes together within this time."""
SETTLED_NS: Final = NS_PER_S // 4
"""Mostly within this: a figure that is read may have it, though it is not yet written down."""
LABEL: Final = 64
"""Characters of a route, reason or source that are told apart."""


def _ns(*seconds: float) -> tuple[int, ...]:
    return tuple(round(each * NS_PER_S) for each in seconds)


TTFT_BOUNDS: Final = _ns(
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
)
TOKEN_BOUNDS: Final = _ns(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BOUNDS: Final = _ns(
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92
)
USAGE_BOUNDS: Final = tuple(4**power for power in range(14))
"""The four above: upper bounds (inclusive; ns, tokens) as the GenAI semantic conventions have
them."""
WAIT_BOUNDS: Final = _ns(
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)
"""For queue and stages: from what a tokeniser takes to what a full queue does."""

BOUNDS: Final[dict[str, tuple[int, ...]]] = {
    "queue": WAIT_BOUNDS,
    "prefill": TTFT_BOUNDS,
    "ttft": TTFT_BOUNDS,
    "itl": TOKEN_BOUNDS,
    "tpot": TOKEN_BOUNDS,
    "e2e": REQUEST_BOUNDS,
    "stage": WAIT_BOUNDS,
    "input": USAGE_BOUNDS,
    "output": USAGE_BOUNDS,
}
"""By what is counted: latencies by name, ``stage``, and prompt and output tokens of requests that
are over."""

_MOST: Final = 1 << 62
"""What a sum may reach: what a hostile source adds up to is cut there."""

Key = tuple[str, str, str, str]
"""(engine's source, route, what, detail): the detail of ``stage`` is its id, that of ``e2e`` the
error, else empty."""
ITL: Final[Key] = ("", "", "itl", "")
"""All gaps between tokens: they are of batches, not of requests."""


class Distribution:
    """A histogram: `counts` for each of its bounds and one above them, and the exact `total` of all
    values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value (ns or tokens) `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total = min(self.total + round(value * weight), _MOST)

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)


class TotalCounters:
    """See the module. `ended` counts requests that are over by (source, route, reason)."""

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str, str], int] = {}
        self.distributions: dict[Key, Distribution] = {}
        self.pending: dict[int, Request] = {}
        """Requests that are over and wait to be counted, by serial."""
        self.routes: list[str] = []
        self.reasons: list[str] = []
        self.sources: list[str] = []

    def latency(self, request: Request, name: str, ns: float) -> None:
        """A latency of the request has become known."""
        source, route = self._series(request)
        self.distribution((source, route, name, error_of(request) if name == "e2e" else "")).add(ns)

    def expect(self, request: Request, now: int) -> None:
        """The request is over as of `now` (ns). It is counted `GRACE_NS` later, when nothing more
        about it is under way; those whose time has come are counted now, and so is one that is
        lost, of which nobody tells more."""
        if request.lost:
            self.end(request)
        elif not request.in_totals:
            self.pending[request.serial] = request
        while self.pending:
            first = next(iter(self.pending.values()))
            if first.over is not None and first.over > now - GRACE_NS:
                return
            del self.pending[first.serial]
            if first.over is not None and not first.dropped:
                self.end(first)

    def end(self, request: Request) -> None:
        """Count how the request ended, unless it has been. Device times that come later are not in
        its stages."""
        if request.in_totals:
            return
        request.in_totals = True
        self.pending.pop(request.serial, None)
        self._count(request)

    def whole(self, now: int | None = None) -> TotalCounters:
        """A copy that has those that wait to be counted too: all of them once the trace is over
        (None), before that, at `now` (ns), those that have been over for `SETTLED_NS`."""
        until = None if now is None else now - SETTLED_NS
        made = TotalCounters()
        made.sources, made.routes, made.reasons = [*self.sources], [*self.routes], [*self.reasons]
        made.ended = dict(self.ended)
        for key, each in self.distributions.items():
            copy = made.distribution(key)
            copy.counts, copy.total = [*each.counts], each.total
        for request in self.pending.values():
            if (
                request.over is not None
                and not request.dropped
                and (until is None or request.over <= until)
            ):
                made._count(request)
        return made

    def _count(self, request: Request) -> None:
        source, route = self._series(request)
        key = (source, route, _bounded(reason_of(request), self.reasons, REASONS))
        self.ended[key] = self.ended.get(key, 0) + 1
        if request.prompt_tokens >= 0:
            self.distribution((source, route, "input", "")).add(request.prompt_tokens)
        if request.engaged:
            self.distribution((source, route, "output", "")).add(request.output_tokens)
        for stage, length in zip(_STAGES, stage_lengths(request), strict=True):
            if length >= 0:
                self.distribution((source, route, "stage", stage)).add(length)

    def entries(
        self,
    ) -> tuple[list[tuple[str, str, str, int]], list[tuple[str, str, str, str, int, list[int]]]]:
        """All that is counted, as plain rows in order of appearance: `ended` with its counts, and
        of each histogram its key, total and counts."""
        return (
            [(*key, count) for key, count in self.ended.items()],
            [(*key, each.total, each.counts) for key, each in self.distributions.items()],
        )

    def failed(self) -> int:
        """Requests that ended with an error so far, those included that wait to be counted."""
        waiting = sum(
            1
            for request in self.pending.values()
            if not request.dropped and reason_of(request) in FAILED
        )
        return waiting + sum(
            count for (_, _, reason), count in self.ended.items() if reason in FAILED
        )

    def mean_tokens(self, source: str) -> float | None:
        """Mean length, prompt and output together, of the requests of an engine that are counted;
        None without any."""
        tokens = requests = 0
        for (name, _, what, _), each in self.distributions.items():
            if name == source and what in ("input", "output"):
                tokens += each.total
                requests += each.count if what == "input" else 0
        return tokens / requests if requests else None

    def distribution(self, key: Key) -> Distribution:
        """The histogram of a key, made if need be. Raises KeyError when nothing of that name is
        counted."""
        found = self.distributions.get(key)
        if found is None:
            found = self.distributions[key] = Distribution(BOUNDS[key[2]])
        return found

    def _series(self, request: Request) -> tuple[str, str]:
        source = request.engine or request.keys[0][0]
        return _bounded(source, self.sources, SOURCES), _bounded(request.route, self.routes, ROUTES)


def _bounded(word: str, known: list[str], most: int) -> str:
    """`word`, shortened, if it is one of the first `most`; else ``other``."""
    word = word[:LABEL]
    if word in known:
        return word
    if len(known) >= most:
        return OTHER
    known.append(word)
    return word

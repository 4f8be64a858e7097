"""What has been counted since the trace began: how requests ended, their tokens, their latencies, their stages.

A timer (`tracer.state.timers`) forgets what is older than its windows, and a request is dropped when it is old; what
a counter or a histogram of a metrics endpoint says must never shrink. So each request is counted here once, by the
engine that had it and the route that it came by: a latency as soon as it is known, the rest when the request is over.
One that was given up as lost stays counted as that, whatever is heard of it later.

Histograms have few, fixed buckets (those that the GenAI semantic conventions ask for, where they name any) and an exact
sum. What a client can choose freely is bounded: beyond `ROUTES` routes or `REASONS` reasons it is ``other``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from tracer.clock import NS_PER_S
from tracer.state.requests import Request
from tracer.state.view import RequestView, Status

OTHER: Final = "other"
ROUTES: Final = 16
REASONS: Final = 16
SOURCES: Final = 32
LABEL: Final = 64
"""Characters of a route, reason or source that are told apart."""


def _ns(*seconds: float) -> tuple[int, ...]:
    return tuple(round(each * NS_PER_S) for each in seconds)


TTFT_BOUNDS: Final = _ns(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_BOUNDS: Final = _ns(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BOUNDS: Final = _ns(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
USAGE_BOUNDS: Final = tuple(4**power for power in range(14))
"""The four above: upper bounds (inclusive; ns, tokens) as the GenAI semantic conventions have them."""
WAIT_BOUNDS: Final = _ns(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""For queue and stages: from what a tokeniser takes to what a full queue does."""

BOUNDS: Final[dict[str, tuple[int, ...]]] = {
    "queue": WAIT_BOUNDS, "prefill": TTFT_BOUNDS, "ttft": TTFT_BOUNDS, "itl": TOKEN_BOUNDS, "tpot": TOKEN_BOUNDS,
    "e2e": REQUEST_BOUNDS, "stage": WAIT_BOUNDS, "input": USAGE_BOUNDS, "output": USAGE_BOUNDS,
}  # fmt: skip
"""By what is counted: latencies by name, ``stage``, and prompt and output tokens of requests that are over."""

Key = tuple[str, str, str, str]
"""(engine's source, route, what, detail): the detail of ``stage`` is its id, that of ``e2e`` the error, else empty."""


class Distribution:
    """A histogram: `counts` for each of its bounds and one above them, and the exact `total` of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: float) -> None:
        """Count one value (ns or tokens)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += round(value)

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)


class Tally:
    """See the module. `ended` counts requests that are over by (source, route, reason)."""

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str, str], int] = {}
        self.distributions: dict[Key, Distribution] = {}
        self.routes: list[str] = []
        self.reasons: list[str] = []
        self.sources: list[str] = []

    def latency(self, request: Request, name: str, ns: float) -> None:
        """A latency of the request has become known."""
        self._of(request, name, error_of(request) if name == "e2e" else "").add(ns)

    def end(self, request: Request, view: RequestView) -> None:
        """The request is over; `view` is what is known of it."""
        request.tallied = True
        source, route = self._series(request)
        key = (source, route, _bounded(reason_of(request), self.reasons, REASONS))
        self.ended[key] = self.ended.get(key, 0) + 1
        if view.prompt_tokens is not None:
            self._of(request, "input", "").add(view.prompt_tokens)
        if view.prompt_tokens is not None or view.output_tokens:
            self._of(request, "output", "").add(view.output_tokens)
        for row in view.stages:
            if row.begin is not None and row.end is not None and row.status is not Status.MISSING:
                self._of(request, "stage", row.stage.id).add(row.end - row.begin)

    def entries(self) -> tuple[list[tuple[str, str, str, int]], list[tuple[str, str, str, str, int, list[int]]]]:
        """All that is counted, as plain rows in order of appearance: `ended` with its counts, and of each histogram its
        key, total and counts."""
        return (
            [(*key, count) for key, count in self.ended.items()],
            [(*key, each.total, each.counts) for key, each in self.distributions.items()],
        )

    def distribution(self, key: Key) -> Distribution:
        """The histogram of a key, made if need be. Raises KeyError when nothing of that name is counted."""
        found = self.distributions.get(key)
        if found is None:
            found = self.distributions[key] = Distribution(BOUNDS[key[2]])
        return found

    def _of(self, request: Request, what: str, detail: str) -> Distribution:
        source, route = self._series(request)
        return self.distribution((source, route, what, detail))

    def _series(self, request: Request) -> tuple[str, str]:
        source = request.engine or request.keys[0][0]
        return _bounded(source, self.sources, SOURCES), _bounded(request.route, self.routes, ROUTES)


def reason_of(request: Request) -> str:
    """How a request that is over ended, in a word."""
    if request.finish_reason:
        return request.finish_reason.lower()
    if request.status_code >= 400:
        return "rejected"
    return "lost" if request.lost else "cancelled" if request.disconnected else "unknown"


def error_of(request: Request) -> str:
    """The kind of error that it ended with: an HTTP status, ``failed`` or ``lost``; empty when it did not."""
    if 400 <= request.status_code <= 599:
        return str(request.status_code)
    if request.finish_reason == "failed":
        return "failed"
    return "lost" if request.lost else ""


def _bounded(word: str, known: list[str], most: int) -> str:
    """`word`, shortened, if it is one of the first `most`; else ``other``."""
    word = word[:LABEL]
    if word in known:
        return word
    if len(known) >= most:
        return OTHER
    known.append(word)
    return word

"""The six latencies that are watched over windows: queue, prefill, TTFT, ITL, TPOT and E2E.

Each request is counted once in each, as soon as the latency is known (`latency` says what it is);
ITL is counted by the batch, one sample a token, where the tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final, NamedTuple

from tracer.state.metrics.counters import Counters
from tracer.state.metrics.gap_counter import TIMERS as TIMERS
from tracer.state.metrics.histogram import Quantiles
from tracer.state.metrics.total_counters import TotalCounters
from tracer.state.request import latency
from tracer.state.request.request import Request


class _Figure(NamedTuple):
    bit: int
    """In `Request.counted`."""
    name: str
    value: Callable[[Request], float | None]
    instant: Callable[[Request], int | None]
    """When it was known: the window that it falls into."""
    final: bool
    """Whether it is only known once the request is over."""


_FIGURES: Final = (
    _Figure(1, "queue", latency.queue, attrgetter("lookup"), False),
    _Figure(2, "prefill", latency.prefill, attrgetter("first_token"), False),
    _Figure(4, "ttft", latency.ttft, lambda r: r.first_token if r.offline else r.stream_end, False),
    _Figure(8, "tpot", latency.tpot, latency.last_token, True),
    _Figure(16, "e2e", latency.answer, latency.closed, True),
)
_ALL: Final = sum(figure.bit for figure in _FIGURES)


class Timers:
    """Counts each latency of a request once, in `counters` and in `totals`."""

    def __init__(self, counters: Counters, totals: TotalCounters) -> None:
        self._books, self._totals = counters, totals

    def count(self, request: Request) -> None:
        """Count the latencies of the request that have become known."""
        counted = request.counted
        if counted == _ALL:
            return
        if (
            request.lookup is None
            and request.first_token is None
            and request.stream_end is None
            and (request.over is None)
        ):
            return  # none of them has its end: so it is for the first half of a request's events
        for bit, name, figure, instant, final in _FIGURES:
            if counted & bit or (final and request.over is None):
                continue
            value = figure(request)
            if value is not None:
                t = instant(request) or 0
                self._books.sample(request, name, t, value)
                self._totals.latency(request, name, value)
                counted |= bit
            elif name == "e2e" and (spent := latency.e2e(request)) is not None:
                self._totals.latency(request, name, spent)  # apart from the answers: by its error
                counted |= bit
        request.counted = counted

    def quantiles(self, now: int, window_s: float) -> dict[str, Quantiles]:
        """Each latency over the window nearest to `window_s` that ends at `now` (ns)."""
        return dict(zip(TIMERS, self._books.counts.sums().quantiles(now, window_s), strict=True))

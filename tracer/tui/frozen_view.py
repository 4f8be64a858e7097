"""The state as the screens see it: the present, or one instant at which it was frozen.

Pausing freezes what is shown while the state goes on receiving events. A frozen view keeps one
snapshot of all requests and answers every query from it, so that a paused screen can still be
scrolled, sorted and searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tracer.state.metrics.numbers import Ask, Numbers
from tracer.state.view import Phase, RequestDetail, RequestView, Snapshot
from tracer.tui.feed import Feed
from tracer.tui.listing import Query

ALL = 1_000_000
"""More requests than a state keeps."""


class FrozenView:
    """Answers the screens' queries of the state, now or at the instant at which it was frozen."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.window_s = 60.0
        self._frozen: Snapshot | None = None
        self._details: dict[str, RequestDetail | None] = {}
        self._numbers: dict[tuple[Ask, float], Numbers | None] = {}

    @property
    def paused(self) -> bool:
        return self._frozen is not None

    def toggle(self) -> None:
        """Freeze what is shown, or show the present again."""
        self._details.clear()
        self._numbers.clear()
        self._frozen = None if self.paused else self._snapshot(Query(limit=ALL))

    def snapshot(self, query: Query) -> Snapshot:
        """Return the requests of a query, with everything else that a screen shows."""
        if self._frozen is None:
            return self._snapshot(query)
        chosen = select(self._frozen.requests, query)
        return replace(
            self._frozen,
            requests=chosen[query.offset : query.offset + query.limit],
            total=len(chosen),
        )

    def numbers(self, ask: Ask) -> Snapshot:
        """Return a snapshot with the figures of `ask` and without requests; while paused, the
        figures are those of the first query."""
        frozen = self._frozen
        if frozen is None:
            return self.feed.state.snapshot(
                now=self.feed.now(), window_s=self.window_s, limit=0, numbers=ask
            )
        key = (ask, self.window_s)
        if key not in self._numbers:
            at = self.feed.state.snapshot(
                now=frozen.now, window_s=self.window_s, limit=0, numbers=ask
            )
            self._numbers[key] = at.numbers
        return replace(frozen, requests=(), numbers=self._numbers[key])

    def detail(self, request_id: str) -> RequestDetail | None:
        """Return all about one request; while paused, as of the first query."""
        if self._frozen is None:
            return self.feed.state.detail(request_id, now=self.feed.now())
        if request_id not in self._details:
            self._details[request_id] = self.feed.state.detail(request_id, now=self._frozen.now)
        return self._details[request_id]

    def _snapshot(self, query: Query) -> Snapshot:
        return self.feed.state.snapshot(
            now=self.feed.now(),
            window_s=self.window_s,
            sort=query.sort,
            reverse=query.reverse,
            text=query.text,
            live_only=query.live_only,
            limit=query.limit,
            offset=query.offset,
        )


def select(requests: Sequence[RequestView], query: Query) -> list[RequestView]:
    """Return what `TraceState.snapshot` would choose of these; they come newest first."""
    text = query.text.lower()
    chosen = [
        view
        for view in requests
        if (not query.live_only or view.closed is None) and (not text or text in _searched(view))
    ]
    if query.sort == "received":
        return chosen if query.reverse else chosen[::-1]
    known = [(value, view) for view in chosen if (value := _value(view, query.sort)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=query.reverse)
    unknown = [view for view in chosen if _value(view, query.sort) is None]
    return [view for _, view in known] + unknown


def _searched(view: RequestView) -> str:
    return "\n".join(
        (view.id, view.client_id, view.route, view.tenant, view.finish_reason, view.phase)
    ).lower()


def _value(view: RequestView, sort: str) -> float | None:
    values: dict[str, float | None] = {
        "e2e": view.e2e_ms,
        "ttft": view.ttft_ms,
        "itl": view.tpot_ms,
        "queue": view.queue_ms,
        "prompt": view.prompt_tokens,
        "output": view.output_tokens,
        "phase": list(Phase).index(view.phase),
        "blocks": max(0, view.blocks or 0) if view.closed is None else None,
        "step": view.step_tokens,
    }
    return values.get(sort)

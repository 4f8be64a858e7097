"""What the screens see of the state: the present, or one instant at which it was frozen.

Pausing freezes what is shown while the state goes on taking events in. A frozen lens keeps one
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


class Lens:
    """Answers the screens' questions about the state, now or as it was when it was frozen."""

    def __init__(self, feed: Feed, window_s: float = 60.0) -> None:
        self.feed = feed
        self.window_s = window_s
        self._frozen: Snapshot | None = None
        self._details: dict[str, RequestDetail | None] = {}
        self._numbers: dict[tuple[Ask, float], Numbers | None] = {}

    @property
    def paused(self) -> bool:
        """Whether what is shown stands still."""
        return self._frozen is not None

    def pause(self) -> None:
        """Freeze what is shown."""
        if self._frozen is None:
            self._details.clear()
            self._numbers.clear()
            self._frozen = self._take(Query(limit=ALL))

    def resume(self) -> None:
        """Show the present again."""
        self._frozen = None
        self._details.clear()

    def snapshot(self, query: Query) -> Snapshot:
        """The requests of a query, with everything else that a screen shows."""
        if self._frozen is None:
            return self._take(query)
        chosen = select(self._frozen.requests, query)
        return replace(
            self._frozen,
            requests=chosen[query.offset : query.offset + query.limit],
            total=len(chosen),
        )

    def numbers(self, ask: Ask) -> Snapshot:
        """Every figure that is asked for, with the rest of a snapshot but no request; of a paused
        one what was known when it was first asked for."""
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
        """All about one request; of a paused one what was known when it was first asked for."""
        if self._frozen is None:
            return self.feed.state.detail(request_id, now=self.feed.now())
        if request_id not in self._details:
            self._details[request_id] = self.feed.state.detail(request_id, now=self._frozen.now)
        return self._details[request_id]

    def _take(self, query: Query) -> Snapshot:
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
    """What `TraceState.snapshot` would choose out of these, which are in order of arrival, newest
    first."""
    text = query.text.lower()
    chosen = [
        view for view in requests
        if (not query.live_only or view.closed is None) and (not text or text in _searched(view))
    ]  # fmt: skip
    if query.sort == "received":
        return chosen if query.reverse else chosen[::-1]
    known = [(value, view) for view in chosen if (value := _value(view, query.sort)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=query.reverse)
    return [view for _, view in known] + [
        view for view in chosen if _value(view, query.sort) is None
    ]


def _searched(view: RequestView) -> str:
    return "\n".join(
        (view.id, view.client_id, view.route, view.tenant, view.finish_reason, view.phase)
    ).lower()


def _value(view: RequestView, sort: str) -> float | None:
    """The figure that an order goes by."""
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

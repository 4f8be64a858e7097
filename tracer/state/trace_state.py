"""The state of a trace as screens and reports read it."""

from __future__ import annotations

from typing import Any, Final

from tracer.state import digest, overview
from tracer.state.fold import Fold
from tracer.state.metrics.numbers import Ask
from tracer.state.request.request import Request
from tracer.state.snapshot import Listing, Views, detail_of
from tracer.state.view import RequestDetail, Snapshot

_MADE: Final = frozenset({"_views", "_listing"})


class TraceState(Fold):
    """What the events of a trace amount to. See `Fold` for its arguments."""

    quotes = True
    """Whether findings may quote prompt text. Off for printed or exported output unless
    --with-text."""

    def __init__(self, *, keep_finished: int = 2000, keep_steps: int = 4096) -> None:
        super().__init__(keep_finished=keep_finished, keep_steps=keep_steps)
        self._views = Views()
        self._listing = Listing(self.requests, self._views)

    def snapshot(
        self,
        *,
        now: int | None = None,
        window_s: float = 60.0,
        sort: str = "received",
        reverse: bool = False,
        text: str = "",
        limit: int | None = None,
        offset: int = 0,
        live_only: bool = False,
        engine: str | None = None,
        numbers: Ask | None = None,
    ) -> Snapshot:
        """The state at `now` (ns; the viewer's clock, so that bars grow between events; default:
        the latest event).

        `window_s` is what figures are taken over; timers take the nearest of 10 s, 1 min, 10 min
        and all. `sort` is one of received, ttft, e2e, itl, queue, prompt, output, phase. `text`
        keeps requests whose id, route, tenant, finish reason or phase contains it, in any case.
        `engine` keeps those that this source has a part in. `Snapshot.total` counts the requests
        that match, before `offset` and `limit`. With `numbers` the snapshot has that view too,
        which costs more than all else.
        """
        at = self.now if now is None else max(now, self.began)
        chosen, total = self._listing.choose(
            at, sort, reverse, text, limit, offset, live_only, engine
        )
        view_of, coverage_of = self._views.of, self._coverage_of
        views = tuple([view_of(request, at, coverage_of) for request in chosen])
        return overview.snapshot(self, at, window_s, views, total, numbers)

    def detail(self, request_id: str, *, now: int | None = None) -> RequestDetail | None:
        """One request by `RequestView.id`, or by its full or client's id. None when it is not
        kept."""
        request = self.requests.find(request_id)
        if request is None:
            return None
        source = self.sources.get(request.engine)
        at = self.now if now is None else max(now, self.began)
        view = self._views.of(request, at, self._coverage_of, running_shares=True)
        return detail_of(request, view, source.blocks if source else None)

    def request_ids(self) -> list[str]:
        """Ids of the requests that are kept, in order of receipt."""
        return [request.id for request in self.requests.order]

    def digest(self) -> str:
        """Hash of the whole state: equal after the same events, whatever was read in between."""
        return digest.of(self)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not what was made of it to be read."""
        return {name: value for name, value in vars(self).items() if name not in _MADE}

    def __setstate__(self, found: dict[str, Any]) -> None:
        vars(self).update(found)
        self._views = Views()
        self._listing = Listing(self.requests, self._views)

    def _exchanged(self, old: Request, new: Request) -> None:
        super()._exchanged(old, new)
        self._views.forget(old)

    def _forgotten(self, request: Request) -> None:
        super()._forgotten(request)
        self._views.forget(request)

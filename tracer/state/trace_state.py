"""The state of a trace as screens and reports read it."""

from __future__ import annotations

from tracer.state import digest, overview
from tracer.state.fold import Fold
from tracer.state.metrics.numbers import Ask
from tracer.state.snapshot import Listing, detail_of, view_of
from tracer.state.view import RequestDetail, Snapshot


class TraceState(Fold):
    """What the events of a trace amount to. See `Fold` for its arguments."""

    quotes = True
    """Whether findings may quote prompt text. Off for printed or exported output unless
    --with-text."""

    def __init__(self, *, keep_finished: int = 2000, keep_steps: int = 4096) -> None:
        super().__init__(keep_finished=keep_finished, keep_steps=keep_steps)
        self._listing = Listing(self.requests)

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
        views = tuple([view_of(request, at, self._coverage_of) for request in chosen])
        return overview.snapshot(self, at, window_s, views, total, numbers)

    def detail(self, request_id: str, *, now: int | None = None) -> RequestDetail | None:
        """One request by `RequestView.id`, or by its full or client's id. None when it is not
        kept."""
        request = self.requests.find(request_id)
        if request is None:
            return None
        source = self.sources.get(request.engine)
        at = self.now if now is None else max(now, self.began)
        return detail_of(request, at, self._coverage_of, source.blocks if source else None)

    def request_ids(self) -> list[str]:
        """Ids of the requests that are kept, in order of receipt."""
        return [request.id for request in self.requests.order]

    def digest(self) -> str:
        """Hash of the whole state: equal after the same events, whatever was read in between."""
        return digest.of(self)

"""All requests that are kept: found by key or id, joined across processes, ordered, and dropped
when they are old.

A process names a request by a number of its own; what a front end and an engine call by the same
string id is one request. Two records are joined when they share an id and nothing speaks against
it: same host and run (else their clocks or ids mean nothing to each other), not both received by a
client, not both in an engine's queue, and neither was over when the other began.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final

from tracer.state.request import decode, latency
from tracer.state.request.request import Request

LIVE_ROOM: Final = 20_000
"""Requests that may be live at once; beyond it the oldest is given up as lost (its end never
came)."""
ID_LENGTH: Final = 20
"""Characters of an id that are shown before it is shortened."""
_SHORT_ID: Final = 10
_TEXT_BUDGET: Final = 64_000_000
"""Characters of prompt and output kept over all requests that are over; the oldest lose theirs
first."""
_TOKEN_BUDGET: Final = 4_000_000
"""Token instants kept over all requests that are over, 12 bytes each; likewise. Counts and sums
stay."""
_NAMES: Final = 64
"""Ids that one request may have, and requests of one id that are considered for joining."""
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "request-", "req-", "req_")

_order = attrgetter("order")

_FRONT: Final = (
    "received",
    "receive_end",
    "template_begin",
    "template_end",
    "tokenise_begin",
    "tokenise_end",
    "admission_begin",
    "stream_end",
    "closed",
    "queued",
    "lookup",
    "scheduled",
    "first_token",
    "finished",
    "released",
    "prompt_text",
)
_MEASURES: Final = (
    "streaming",
    "body_bytes",
    "status_code",
    "sent_bytes",
    "sent_chunks",
    "sent_tokens",
    "sent_work",
    "prompt_tokens",
    "messages",
    "cached_tokens",
    "max_tokens",
    "final_tokens",
    "freed",
    "kept",
    "blocks",
    "prompt_chars",
)
_WORDS: Final = (
    "route",
    "client_id",
    "tenant",
    "model",
    "engine",
    "finish_reason",
    "error",
    "prompt_ids",
)
_STEPS: Final = (
    "batch",
    "spans",
    "open_since",
    "passes",
    "redo",
    "holes",
    "produced",
    "unseen",
    "last_index",
    "last_seen",
    "last_given",
    "last_batch",
    "settled",
    "absences",
)


class RequestTable:
    """See the module. `related` says whether two sources may know the same request; `exchanged` is
    told when one request was merged into another, `forgotten` when one is dropped."""

    def __init__(
        self,
        keep_finished: int,
        related: Callable[[str, str], bool],
        exchanged: Callable[[Request, Request], None],
        forgotten: Callable[[Request], None],
    ) -> None:
        self.order: list[Request] = []
        """All that are kept, by `Request.order`."""
        self.live: dict[int, Request] = {}
        """Those not over, by serial."""
        self.over: OrderedDict[int, Request] = OrderedDict()
        """Those over and kept, in the order in which that happened."""
        self.finished_total = 0
        self.dropped_incomplete = 0
        self.over_incomplete = 0
        self.changes = 0
        """Rises whenever a request becomes over, comes back or is dropped."""
        self._keep = max(0, keep_finished)
        self._related = related
        self._exchanged = exchanged
        self._forgotten = forgotten
        self._by_key: dict[tuple[str, int], Request] = {}
        self._by_name: dict[str, list[Request]] = {}
        self._by_id: dict[str, Request] = {}
        self._serial = 0
        self._texts = 0
        self._tokens = 0
        self._weighty: OrderedDict[int, tuple[Request, int, int]] = OrderedDict()

    # --- finding ----------------------------------------------------------------------------------

    def get(self, source: str, key: int) -> Request | None:
        """The request that `source` calls `key`, or None."""
        return self._by_key.get((source, key))

    def find(self, name: str) -> Request | None:
        """The request shown as `name`, or known by that full id or client's id."""
        request = self._by_id.get(name)
        if request is None:
            named = self._by_name.get(name)
            request = named[0] if named else None
        if request is None and name:
            request = next((r for r in self.order if r.client_id == name), None)
        return request

    def of_source(self, source: str) -> Iterator[Request]:
        """Live requests that `source` has a part in."""
        for request in list(self.live.values()):
            if any(key[0] == source for key in request.keys):
                yield request

    # --- making and joining -----------------------------------------------------------------------

    def obtain(self, source: str, key: int, t: int) -> Request:
        """The request that `source` calls `key`; a new one, first seen at `t` (ns), if there is
        none."""
        request = self._by_key.get((source, key))
        if request is None:
            self._serial += 1
            request = Request(self._serial, t)
            request.keys.append((source, key))
            self._by_key[source, key] = request
            self._show_as(request, f"#{key}")
            self.live[request.serial] = request
            self._insert(request)
            if len(self.live) > LIVE_ROOM:
                oldest = next(iter(self.live.values()))
                oldest.lost = oldest.incomplete = True
                self.settle(oldest, t)
        request.version += 1
        return request

    def name(self, request: Request, name: str) -> Request:
        """Note that `request` is known as `name`, and join it with the one that already is. Returns
        the one that stands for both."""
        if not name or name in request.names or len(request.names) >= _NAMES:
            return request
        peers = self._by_name.setdefault(name, [])
        for peer in peers[-_NAMES:]:
            if self._same(peer, request):
                fronted = peer.received is None and request.received is not None
                merged = self._merge(peer, request)
                if fronted and merged.names[0] != name and not request.names:
                    # what the front end calls it is what its client knows
                    merged.names.remove(name)
                    merged.names.insert(0, name)
                    self._show_as(merged, _shorten(name))
                return merged
        peers.append(request)
        request.names.append(name)
        if len(request.names) == 1:
            self._show_as(request, _shorten(name))
        return request

    def place(self, request: Request, received: int) -> None:
        """Set when it was received, and move it to its place in the order."""
        self._remove(request)
        request.received = received
        self._insert(request)

    def _same(self, one: Request, other: Request) -> bool:
        if one is other:
            return True
        if one.received is not None and other.received is not None:
            return False
        if one.batch is not None and other.batch is not None:
            return False
        if one.queued is not None and other.queued is not None:
            return False
        sources, others = {key[0] for key in one.keys}, {key[0] for key in other.keys}
        if sources & others or not all(self._related(a, b) for a in sources for b in others):
            return False
        return not any(
            a.over is not None
            and not a.lost
            and a.over < (b.first_seen if b.received is None else b.received)
            for a, b in ((one, other), (other, one))
        )

    def _merge(self, one: Request, other: Request) -> Request:
        """Move what `other` knows into `one`."""
        for request in (one, other):
            self._remove(request)
            self._unmark(request)
        if one.received is None and other.received is not None and other.names:
            one.id = other.id  # what the front end calls it is what its client knows
            one.names = list(dict.fromkeys([*other.names, *one.names]))
        one.first_seen = min(one.first_seen, other.first_seen)
        for name in _FRONT:
            if getattr(one, name) is None:
                setattr(one, name, getattr(other, name))
        for name in _MEASURES:
            if getattr(one, name) == -1:
                setattr(one, name, getattr(other, name))
        for name in _WORDS:
            setattr(one, name, getattr(one, name) or getattr(other, name))
        if other.batch is not None or (one.batch is None and other.unseen):
            for name in _STEPS:
                setattr(one, name, getattr(other, name))
        for name in ("offline", "logprobs", "disconnected", "incomplete", "in_totals"):
            setattr(one, name, getattr(one, name) or getattr(other, name))
        one.preemptions = sorted(one.preemptions + other.preemptions, key=attrgetter("begin"))
        if not one.output:
            one.output, one.output_chars = other.output, other.output_chars
        one.attempts = max(one.attempts, other.attempts)
        one.counted |= other.counted
        one.version += other.version + 1
        one.lost, one.over = one.lost and other.lost, None
        for key in other.keys:
            self._by_key[key] = one
            one.keys.append(key)
        one.names = list(dict.fromkeys([*one.names, *other.names]))
        for name in one.names:
            peers = self._by_name.setdefault(name, [])
            peers[:] = dict.fromkeys(one if r is other else r for r in peers)
            if one not in peers:
                peers.append(one)
        for shown in other.ids:
            self._by_id[shown] = one
            one.ids.append(shown)
        other.dropped = True
        self.live[one.serial] = one
        self._insert(one)
        self._exchanged(other, one)
        return one

    # --- the end of a request ---------------------------------------------------------------------

    def settle(self, request: Request, t: int) -> None:
        """Work out whether the request is over, and file it accordingly. `t`: instant of the event
        at hand (ns)."""
        if request.dropped:
            return
        if (
            request.closed is None
            and request.finished is None
            and request.over is None
            and not request.lost
        ):
            return
        over = _over(request, t)
        if (over is None) == (request.over is None):
            if over is not None and not request.lost:
                request.over = over
            return
        self.changes += 1
        if over is None:
            self._unmark(request)
            request.over = None
            self.live[request.serial] = request
            return
        request.over = over
        self.live.pop(request.serial, None)
        self.over[request.serial] = request
        self.finished_total += 1
        self.over_incomplete += request.incomplete
        self._weigh(request)
        while len(self.over) > self._keep:
            self._drop(next(iter(self.over.values())))

    def revive(self, request: Request) -> None:
        """A request that was given up as lost is heard of again."""
        if request.lost:
            request.lost = False
            self.settle(request, request.first_seen)

    def _unmark(self, request: Request) -> None:
        """Take it out of the live or the finished ones."""
        self.live.pop(request.serial, None)
        if self.over.pop(request.serial, None) is not None:
            self.finished_total -= 1
            self.over_incomplete -= request.incomplete
            _, texts, tokens = self._weighty.pop(request.serial, (request, 0, 0))
            self._texts -= texts
            self._tokens -= tokens

    def _drop(self, request: Request) -> None:
        """Forget a finished request; the totals stay."""
        self._unmark(request)
        self.finished_total += 1
        self.dropped_incomplete += request.incomplete
        self._remove(request)
        request.dropped = True
        self.changes += 1
        for key in request.keys:
            self._by_key.pop(key, None)
        for name in request.names:
            peers = [r for r in self._by_name.get(name, ()) if r is not request]
            if peers:
                self._by_name[name] = peers
            else:
                self._by_name.pop(name, None)
        for shown in request.ids:
            self._by_id.pop(shown, None)
        self._forgotten(request)

    def _weigh(self, request: Request) -> None:
        """Keep the texts and token instants of finished requests within their budgets."""
        texts = (
            len(request.prompt_text or "") + sum(map(len, request.output)) + len(request.prompt_ids)
        )
        tokens = request.output_tokens
        self._weighty[request.serial] = (request, texts, tokens)
        self._texts += texts
        self._tokens += tokens
        while (self._texts > _TEXT_BUDGET or self._tokens > _TOKEN_BUDGET) and len(
            self._weighty
        ) > 1:
            _, (oldest, texts, tokens) = self._weighty.popitem(last=False)
            self._texts -= texts
            self._tokens -= tokens
            oldest.prompt_text, oldest.prompt_ids, oldest.output = None, b"", []
            decode.forget_times(oldest)

    # --- the order --------------------------------------------------------------------------------

    def _insert(self, request: Request) -> None:
        if not self.order or self.order[-1].order < request.order:
            self.order.append(request)
        else:
            insort(self.order, request, key=_order)

    def _remove(self, request: Request) -> None:
        at = bisect_left(self.order, request.order, key=_order)
        if at < len(self.order) and self.order[at] is request:
            del self.order[at]

    def _show_as(self, request: Request, wanted: str) -> None:
        """Give it an id that no other one has."""
        shown, number = wanted, 1
        while self._by_id.get(shown, request) is not request:
            number += 1
            shown = f"{wanted}~{number if number < 10 else request.serial + number - 10}"
        request.id = shown
        request.ids.append(shown)
        self._by_id[shown] = request


def _over(request: Request, t: int) -> int | None:
    """Instant at which nothing more was to be expected of it, or None while something is."""
    if request.lost:
        return t if request.over is None else request.over
    if request.fronted:
        if request.closed is None or request.awaited:
            return None
        return request.closed
    if request.closed is None and (request.finished is None or request.released is None):
        return None
    return latency.released(request) or t


def _shorten(name: str) -> str:
    """An id as it is shown: whole when short, else without a customary prefix and cut."""
    if len(name) <= ID_LENGTH:
        return name
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name if len(name) <= ID_LENGTH else name[:_SHORT_ID]

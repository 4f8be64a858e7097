"""The fold: events in, state out.

`Fold.apply` takes one event of one source. It reads no clock and does no I/O, so that the same
events give the same state wherever they come from, and it never raises: an event that makes no
sense is counted as unknown. Events may come late, twice, for requests never heard of, or not at
all; what is lost is marked, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Alias,
    Begin,
    Closed,
    Coverage,
    End,
    Engine,
    EngineStatus,
    Event,
    Evicted,
    Finished,
    Gap,
    Header,
    Heartbeat,
    HookFault,
    Output,
    Params,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Roster,
    Scheduled,
    Sent,
    SourceGone,
    Step,
    StepDevice,
    unpack_u32,
)
from engine_hooks.protocol.stages import Stage
from engine_hooks.protocol.stamps import LEAP, SOUND
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.state.engine.kv import block_runs
from tracer.state.engine.source import Source
from tracer.state.engine.steps import Batch
from tracer.state.metrics.counters import Counters
from tracer.state.metrics.rates import RateLog
from tracer.state.metrics.timers import Timers
from tracer.state.metrics.total_counters import ITL, TotalCounters
from tracer.state.request import milestones
from tracer.state.request.request import ABSENT_ROSTERS, Request
from tracer.state.request.table import RequestTable

_RELEASE_GRACE_NS: Final = 5 * NS_PER_S
"""An offline request whose blocks' release is not told this long after its last token is taken as
over: not every engine tells it."""
_FORGOTTEN_ROSTERS: Final = 30
"""Likewise, before a request whose response was not closed is given up: a slow client may still be
reading."""
_RANKS: Final = {"measured": 0, "estimated": 1, "unavailable": 2}

_REQUEST_EVENTS: Final = (
    Received,
    Begin,
    End,
    Alias,
    Prompt,
    Queued,
    Scheduled,
    Preempted,
    Finished,
    Released,
    Sent,
    Output,
    Params,
    Closed,
)
_BEGINNERS: Final = frozenset(
    {Received, Params, Begin, Alias, Prompt, Queued, Scheduled, Preempted}
)
"""Events that make a request known. One that only ends something makes none: it would never end."""
_FRONT_END: Final = frozenset({Stage.RECEIVE, Stage.TEMPLATE, Stage.TOKENISE})
_PLAIN: Final[dict[type[Event], Callable[[Request, Any], object]]] = {
    Begin: milestones.begin,
    End: milestones.end,
    Prompt: milestones.prompt,
    Finished: milestones.finished,
    Sent: milestones.sent,
    Output: milestones.output,
    Params: milestones.params,
}
"""Events that change nothing but the request's own record."""


class _ContradictionError(ValueError):
    """An instant or a length inside an event cannot be."""


def _check(event: Event) -> None:
    """Raise an error for an event that contradicts itself."""
    if not SOUND[type(event)](event):
        raise _ContradictionError


class Fold:
    """Everything known of a trace, and what an event changes of it. `keep_finished` requests that
    are over are kept (oldest dropped first, totals stay); `keep_steps` steps an engine are kept for
    histories."""

    def __init__(self, *, keep_finished: int = 2000, keep_steps: int = 4096) -> None:
        self.now = 0
        self._near = -1
        """Up to when an event is no leap ahead of the trace (ns): `LEAP` after `now`, -1 before the
        first event."""
        self.began = 0
        self.unknown = 0
        """Events that made no sense."""
        self.sources: dict[str, Source] = {}
        self.requests = RequestTable(keep_finished, self._related, self._exchanged, self._forgotten)
        self.totals = TotalCounters()
        self.counters = Counters()
        self.timers = Timers(self.counters, self.totals)
        self.received = RateLog(1)
        self.scheduled = RateLog(2)
        """Prompt tokens, and those of them that were cached."""
        self.produced = RateLog(1)
        self.received_total = 0
        self._keep_steps = keep_steps
        self._coverage: dict[tuple[str, ...], Mapping[int, Coverage]] = {}
        self._handlers: dict[type[Event], Callable[[Source, Any], None]] = {
            Engine: Source.describe,
            Coverage: self._cover,
            EngineStatus: Source.change_status,
            Heartbeat: self._heartbeat,
            HookFault: Source.fault,
            Step: self._step,
            StepDevice: self._step_device,
            Roster: self._roster,
            Evicted: self._evict,
            Gap: self._gap,
            SourceGone: self._source_gone,
        }
        for kind in _REQUEST_EVENTS:
            self._handlers[kind] = self._request_event
        self._handlers[Sent] = self._sent
        self._handlers[Scheduled] = self._scheduled

    # --- what is fed in ---------------------------------------------------------------------------

    def add_source(self, header: Header) -> None:
        """A process announces itself; one that was gone is back."""
        source = self._source(header.source)
        source.header = header
        source.stamps.meet(header)
        source.gone = None

    def feed(self, delivery: Delivery) -> None:
        """Take in all that one source told at once."""
        if delivery.header is not None:
            self.add_source(delivery.header)
        self.unknown += delivery.unknown
        apply, source = self.apply, delivery.source
        for event in delivery.events:
            apply(source, event)

    def apply(self, source: str, event: Event) -> None:
        """Take in one event that `source` emitted, or that the reader of its stream adds. Never
        raises.

        An event whose time contradicts the others is set aside and counted
        (`engine_hooks.protocol.stamps`): nothing else of the state ever knows of it.
        """
        try:
            told = self.sources.get(source) or self._source(source)
            t = event.t
            if told.stamps.floor <= t <= self._near:
                self._handlers[type(event)](told, event)
                if t > self.now:
                    self.now, self._near = t, t + LEAP
                if 0 < t < self.began:
                    self.began = t
            else:
                self._judge(told, event)
        except _ContradictionError:
            self.sources[source].stamps.set_aside += 1
        except Exception:  # whatever a peer or a damaged file makes up must not end the viewer
            self.unknown += 1

    def set_aside(self, now: int | None = None) -> int:
        """Events whose time contradicts the others, as of `now` (ns; default: the latest event)."""
        at = self.now if now is None else max(now, self.now)
        return sum(source.stamps.doubted(at) for source in self.sources.values())

    def _judge(self, source: Source, event: Event) -> None:
        """Take in what can be believed now that an event came whose stamp has to be judged."""
        for believed in source.stamps.judge(event, self.now):
            t = believed.t
            try:
                self._handlers[type(believed)](source, believed)
            except _ContradictionError:
                source.stamps.set_aside += 1
                continue
            except Exception:  # as above, and the next one is no worse for it
                self.unknown += 1
                continue
            if t > self.now:
                self.now, self._near = t, t + LEAP
            if t > 0 and (not self.began or t < self.began):
                self.began = t

    # --- events of one request --------------------------------------------------------------------

    def _sent(self, source: Source, event: Sent) -> None:
        """Half of all events of a busy engine, and none of them begins, ends or times anything: it
        is told and done."""
        request = self.requests.get(source.name, event.key)
        if request is None or source.gone is not None:
            return
        if event.work > event.t:
            raise _ContradictionError
        if request.lost:
            self._request_event(source, event)
            return
        request.outputs += 1
        milestones.sent(request, event)

    def _scheduled(self, source: Source, event: Scheduled) -> None:
        _check(event)
        self._request_event(source, event)

    def _request_event(self, source: Source, event: Any) -> None:
        if source.gone is not None:
            return  # it was given up; what still trickles in starts nothing
        table = self.requests
        kind = type(event)
        if kind in _BEGINNERS or (kind is End and event.stage in _FRONT_END):
            request = table.obtain(source.name, event.key, event.t)
        else:
            known = table.get(source.name, event.key)
            if known is None:
                return  # over and forgotten, or never begun: nothing is made up for it
            request = known
        if kind is Output:
            request.outputs += 1
        else:
            request.version += 1
        if request.lost and all(self.sources[name].gone is None for name, _ in request.keys):
            request.lost = False
        plain = _PLAIN.get(kind)
        if plain is not None:
            plain(request, event)
        else:
            request = self._tell(source, request, event)
        self._settle(request, event.t)

    def _tell(self, source: Source, request: Request, event: Any) -> Request:
        """Write the event into the record. Returns the record, another one if it turned out to be
        known already."""
        match event:
            case Received():
                if request.received is None:
                    self.requests.place(request, event.t)
                    self.received.add(event.t, 1)
                    self.received_total += 1
                milestones.received(request, event)
                return self.requests.name(request, event.rid)
            case Queued():
                first, preemptions = request.queued is None, len(request.preemptions)
                milestones.queued(request, event, source.name)
                again = len(request.preemptions) > preemptions
                request = self.requests.name(request, event.rid)
                if first:  # here it is known whose it is
                    self.counters.count(
                        request,
                        "requests",
                        event.t if request.received is None else request.received,
                    )
                elif again:
                    self.counters.preemption(request, event.t)
            case Alias():
                return self.requests.name(request, event.rid)
            case Scheduled():
                if milestones.scheduled(request, event) and request.prompt_tokens >= 0:
                    self.scheduled.add(
                        event.lookup, request.prompt_tokens, max(0, request.cached_tokens)
                    )
                    self.counters.scheduled(request, event.lookup)
            case Preempted():
                preemptions = len(request.preemptions)
                milestones.preempted(request, event)
                if len(request.preemptions) > preemptions:
                    self.counters.preemption(request, event.t)
                source.preempted = max(source.preempted, event.total)
                source.blocks.release(request, 0)
                request.blocks = min(request.blocks, 0)
            case Released():
                if milestones.released(request, event):
                    source.blocks.release(request, event.cached, event.t)
                    source.release(event)
            case Closed():
                milestones.closed(request, event)
                if request.lost and request.over is not None:
                    request.over = event.t
        return request

    def _settle(self, request: Request, t: int) -> None:
        """File it as live or over, and count the latencies that are now known."""
        over = request.over
        self.requests.settle(request, t)
        self.timers.count(request)
        if over is not None or request.over is not None:
            self.counters.settled(request)
        if request.over is not None:
            self.totals.expect(request, t)

    def _member(self, source: str, key: int, t: int) -> Request | None:
        """The request of a step's member or a roster's row."""
        request = self.requests.get(source, key)
        if request is None:
            request = self.requests.obtain(source, key, t)
            request.incomplete = True  # its beginning was lost, or before anything was heard
        if request.batch is not None and request.batch is not self.sources[source].batch:
            return None
        request.engine = request.engine or source
        return request

    def _exchanged(self, old: Request, new: Request) -> None:
        for name, key in old.keys:
            source = self.sources[name]
            source.batch.exchange(key, old, new)
            source.blocks.exchange(old, new)
        self.counters.joined(old, new)

    def _forgotten(self, request: Request) -> None:
        self.totals.end(request)
        for name, _ in request.keys:
            self.sources[name].batch.forget(request)
            self.sources[name].blocks.release(request, 0)

    # --- events of an engine ----------------------------------------------------------------------

    def _step(self, source: Source, event: Step) -> None:
        if source.gone is not None:
            return
        _check(event)
        before = source.batch.produced
        if not source.batch.apply(event):
            return
        self._keep_books(source, event)
        source.step(event)
        self.produced.add(event.t, source.batch.produced - before)
        find, name = self.requests.get, source.name
        if event.blocks:
            pairs = unpack_u32(event.blocks)
            for key, held in zip(pairs[::2], pairs[1::2], strict=False):
                request = find(name, key)
                if request is not None:
                    request.blocks = held
        if event.block_ids:
            assign = source.blocks.assign
            for key, index, blocks in block_runs(event.block_ids):
                request = find(name, key)
                if request is not None:
                    assign(request, index, blocks)

    def _keep_books(self, source: Source, event: Step) -> None:
        """Write the step into the counters, before the source takes its gauges."""
        history, engine = source.batch.history, source.engine
        length = max(history.tokens[-1] - event.t, event.end, 0)
        carried = history.sizes[-1] > len(event.joined) // 4
        wait = max(0, event.t - source.last_step_end) if carried and source.last_step_end else 0
        self.counters.step(
            source.name,
            event,
            length,
            wait,
            history.sizes[-1],
            engine.max_batch_tokens if engine else -1,
        )

    def _step_device(self, source: Source, event: StepDevice) -> None:
        _check(event)
        if source.batch.device(event) or source.header is None:
            return
        # A worker tells the device times of steps that the engine's core numbers.
        for other in self.sources.values():
            if other is not source and other.batch.count and self._related(source.name, other.name):
                other.batch.device(event)

    def _roster(self, source: Source, event: Roster) -> None:
        if source.gone is not None:
            return
        values = unpack_u32(event.rows)
        rows = [values[at : at + 6] for at in range(0, len(values) - 5, 6)]
        source.batch.roster(event, rows)
        listed = {row[0] for row in rows}
        for request in list(self.requests.live.values()):
            if request.engine != source.name:
                continue
            if not event.complete or any(
                key in listed for name, key in request.keys if name == source.name
            ):
                request.absences = 0
            elif request.queued is None or request.queued < event.t:
                self._absent(request, event.t)

    def _absent(self, request: Request, t: int) -> None:
        """The engine's complete roster does not have it: if that stays so, the event that told its
        end was lost."""
        request.absences += 1
        if request.finished is None and request.absences >= ABSENT_ROSTERS:
            request.incomplete = True
            if not request.fronted or request.absences >= _FORGOTTEN_ROSTERS:
                request.lost = True
            request.version += 1
            self._settle(request, t)

    def _evict(self, source: Source, event: Evicted) -> None:
        source.evicted = (
            max(source.evicted, event.total)
            if event.total >= 0
            else source.evicted + max(0, event.blocks)
        )
        source.blocks.evict(event.blocks)

    # --- sources ----------------------------------------------------------------------------------

    def _source(self, name: str) -> Source:
        source = self.sources.get(name)
        if source is None:
            counter = self.counters.gap_counter(name, self.totals.distribution(ITL))
            batch = Batch(self._keep_steps, partial(self._member, name), self.timers.count, counter)
            source = self.sources[name] = Source(name, batch)
            self._coverage.clear()
        return source

    def _related(self, one: str, other: str) -> bool:
        """Whether two processes may know the same request: one clock, and not parts of different
        runs."""
        a, b = self.sources[one].header, self.sources[other].header
        if a is None or b is None:
            return True
        if a.boot_id and b.boot_id and a.boot_id != b.boot_id:
            return False
        return not (a.run and b.run and a.run != b.run)

    def _cover(self, source: Source, event: Coverage) -> None:
        source.cover(event)
        self._coverage.clear()
        for request in self.requests.order:
            request.version += 1

    def _coverage_of(self, request: Request) -> Mapping[int, Coverage]:
        """How each stage of a request is covered: by its own processes, or, where they say nothing,
        by any other."""
        own = tuple([source for source, _ in request.keys])
        found = self._coverage.get(own)
        if found is None:
            best: dict[int, tuple[tuple[bool, int], Coverage]] = {}
            for source in self.sources.values():
                for stage, event in source.coverage.items():
                    rank = (source.name not in own, _RANKS.get(event.status, 2))
                    if stage not in best or rank < best[stage][0]:
                        best[stage] = (rank, event)
            found = self._coverage[own] = {stage: event for stage, (_, event) in best.items()}
        return found

    def _heartbeat(self, source: Source, event: Heartbeat) -> None:
        _check(event)
        source.heartbeat(event)
        for request in self.requests.of_source(source.name):
            if (
                request.finished is not None
                and not request.fronted
                and event.t - request.finished > _RELEASE_GRACE_NS
            ):
                request.closed = request.finished
                self._settle(request, event.t)

    def _gap(self, source: Source, event: Gap) -> None:
        source.missing += max(0, event.missing)
        source.batch.doubt()
        for request in self.requests.of_source(source.name):
            request.incomplete = True
            request.version += 1

    def _source_gone(self, source: Source, event: SourceGone) -> None:
        source.gone = event.reason or "ended"
        source.batch.stop()
        for request in self.requests.of_source(source.name):
            request.lost = True
            request.version += 1
            self._settle(request, event.t)

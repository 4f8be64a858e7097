"""The step recorder for vLLM: one per scheduler, on the thread that schedules, so that nothing here
needs a lock.

The calls that the hooks of `core` see become one `Step` a step, and request events. With
asynchronous scheduling step N+1 is scheduled before step N's output is there: open steps are kept
by number. What happens in the workers comes back with the model's output (`marks`). Counts follow
what the scheduler gives out, the tables that it sends to its workers and its pool's counter, never
our own addition. The engine's objects, on which a recorder hangs, are held by weak references.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref

from engine_hooks.base.emitter import ENGINE, Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.vllm import facts, marks
from engine_hooks.vllm.blocks import BlockGauge

ROSTER_PERIOD_NS: Final = NS_PER_S
"""How often the absolute state of the requests is emitted, which bounds how long a lost event can
leave a wrong count."""

ROSTER_ROOM: Final = 1_024
"""Requests in one roster. When the engine holds more, only those that run are listed, and the
roster says so: walking a queue of thousands would be seen in the step after it."""

OPEN_ROOM: Final = 64
"""Steps that may be open at once. An engine keeps two or a few; what is beyond never came back."""

NO_TIME: Final = -1

_REASONS: Final = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "cancelled",
    "FINISHED_ERROR": "failed",
    "FINISHED_REPETITION": "repetition",
}


@dataclass(slots=True, eq=False)
class Tracked:
    """A request inside the engine, as last emitted. Times in monotonic ns."""

    key: int
    request: ref[Any]
    lookup: int = NO_TIME
    allocated: int = NO_TIME
    attempts: int = 0
    waiting: bool = True
    resumed: bool = False
    blocks: int = 0
    finished: bool = False
    cached: int = 0


@dataclass(slots=True, eq=False)
class OpenStep:
    """A scheduled step without an output yet; `event` is filled in as it runs."""

    event: events.Step
    counts: dict[str, int]
    """Request id → tokens scheduled: the engine's own dict."""
    keys: dict[str, int] = field(default_factory=dict)


class StepRecorder:
    """Records one scheduler. `graph` as in `events.Step`."""

    def __init__(self, emitter: Emitter, scheduler: Any, *, graph: int) -> None:
        self.emitter = emitter
        self._scheduler = ref(scheduler)
        self._manager = ref(scheduler.kv_cache_manager)
        self.blocks = BlockGauge(scheduler.kv_cache_manager.block_pool)
        self.live: dict[str, Tracked] = {}
        self.pending: set[str] = set()
        """Requests that wait to be scheduled, for the first time or after a preemption."""
        self.open: dict[int, OpenStep] = {}
        self.updating: OpenStep | None = None
        self._graph = graph
        self._begin = NO_TIME
        self._members: dict[str, int] = {}
        self._emitted: dict[str, int] = {}
        """Members of the step that was last emitted, whose number is `_last`."""
        self._last = self._count = self._preempted = self._evicted = self._last_roster = 0
        self._facts: tuple[Any, ...] | None = None
        """What the workers reported of the model, once they did."""
        for request in list(getattr(scheduler, "requests", {}).values()):
            self._adopt(request)

    @property
    def scheduler(self) -> Any:
        return self._scheduler()

    @property
    def manager(self) -> Any:
        return self._manager()

    # --- the queue ---

    def queued(self, request: Any) -> None:
        rid = request.request_id
        if rid not in self.live:  # else a session that goes on
            self._emit_queued(self._track(request), request)
            self.pending.add(rid)

    def _track(self, request: Any) -> Tracked:
        rid = request.request_id
        tracked = self.live[rid] = Tracked(self.emitter.hold(rid, ENGINE), ref(request))
        return tracked

    def _emit_queued(self, tracked: Tracked, request: Any) -> None:
        rid = request.request_id
        number, _, parent = rid.partition("_")
        queued = events.Queued(
            now(), tracked.key, rid, request.num_prompt_tokens, request.max_tokens
        )
        queued.parent = parent if number.isdecimal() else ""
        self.emitter.emit_lifecycle(queued)

    def _adopt(self, request: Any) -> Tracked:
        """Track a request that is inside already: we were attached late."""
        tracked = self._track(request)
        tracked.waiting = request.num_computed_tokens == 0
        if tracked.waiting:
            self.pending.add(request.request_id)
        else:
            tracked.blocks = len(self.manager.get_block_ids(request.request_id)[0])
        self._emit_queued(tracked, request)
        return tracked

    # --- scheduling ---

    def schedule_begins(self) -> None:
        """Start a step, in case `schedule` finds work."""
        self._begin = now()

    def lookup(self, request: Any) -> None:
        tracked = self.live.get(request.request_id)
        if tracked is not None:
            tracked.lookup = now()

    def allocated(self, request: Any, at: int, fits: bool) -> None:
        """Note that blocks were asked for, from `at`, for a request that waits."""
        tracked = self.live.get(request.request_id)
        if tracked is None or not tracked.waiting:
            return
        if not fits:
            tracked.attempts += 1
            return
        tracked.allocated = now()
        if tracked.lookup < self._begin:  # looked up in an earlier pass, or not at all
            tracked.lookup = at

    def scheduled(self, output: Any) -> None:
        """Open a step, if `schedule` returned work."""
        at = now()
        fresh: dict[str, Any] = {}
        for new in output.scheduled_new_reqs:
            self._admitted(new.req_id, new.num_computed_tokens, new.block_ids, at)
            fresh[new.req_id] = new.block_ids
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for index, rid in enumerate(cached.req_ids):
                if rid in cached.resumed_req_ids:
                    fresh[rid] = ids = cached.new_block_ids[index]
                    self._admitted(rid, cached.num_computed_tokens[index], ids, at)
        evicted = self.blocks.evicted
        if evicted != self._evicted:
            self.emitter.emit(events.Evicted(at, evicted - self._evicted, evicted))
            self._evicted = evicted
        counts = output.num_scheduled_tokens
        if not counts:
            return
        self._count += 1
        event = events.Step(self._begin, self._count, at - self._begin, batch=len(counts))
        event.tokens, event.graph = output.total_num_scheduled_tokens, self._graph
        step = self.open[event.n] = OpenStep(event, counts)
        self._set_members(step)
        self._set_tables(event, fresh, cached)
        event.running, event.waiting = self.scheduler.get_request_counts()
        event.used, event.cached, event.free = self.blocks.counts()
        if len(self.open) > OPEN_ROOM:
            del self.open[next(iter(self.open))]
        setattr(output, marks.TAG, (event.n, event.t))

    def _admitted(self, rid: str, computed: int, ids: Any, at: int) -> None:
        """Emit that a request was taken into a batch: `computed` of its tokens were found in the
        cache; `ids` is its block table."""
        tracked = self.live.get(rid)
        if tracked is None:
            request = self.scheduler.requests.get(rid)
            if request is None:
                return
            tracked = self._adopt(request)
        size = self.scheduler.block_size
        blocks = len(ids[0]) if ids else 0
        shared = min(blocks, computed // size) if size else 0
        ended = tracked.allocated if tracked.allocated >= self._begin else at
        lookup = tracked.lookup if tracked.lookup >= self._begin else self._begin
        event = events.Scheduled(ended, tracked.key, lookup, computed, shared, blocks - shared)
        event.resumed, event.attempts = tracked.resumed, tracked.attempts
        self.emitter.emit_lifecycle(event)
        if not tracked.resumed:
            tracked.cached = computed
        tracked.waiting = False
        tracked.attempts = 0
        self.pending.discard(rid)

    def _set_members(self, step: OpenStep) -> None:
        """Compare the members with the last step's: as a whole first, which runs in C."""
        before, counts = self._members, step.counts
        if counts.keys() == before.keys():
            step.keys = before
            return
        keys: dict[str, int] = {}
        joined: list[int] = []
        for rid in counts:
            key = before.get(rid)
            if key is None:
                tracked = self.live.get(rid)
                if tracked is None:
                    tracked = self._adopt(self.scheduler.requests[rid])
                key = tracked.key
                joined.append(key)
            keys[rid] = key
        step.event.joined = pack_u32(joined)
        step.event.left = pack_u32([key for rid, key in before.items() if rid not in counts])
        step.keys = self._members = keys

    def _set_tables(self, event: events.Step, fresh: dict[str, Any], cached: Any) -> None:
        """Write the block tables that changed, as the scheduler sends them to its workers: `fresh`
        ones are whole, the others grow."""
        blocks: list[int] = []
        runs: list[int] = []
        live = self.live
        for rid, ids in fresh.items():
            tracked = live.get(rid)
            if tracked is not None and ids:
                tracked.blocks = len(ids[0])
                blocks += (tracked.key, tracked.blocks)
                runs += (tracked.key, 0, tracked.blocks, *ids[0])
        for rid, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is None or rid in fresh or not ids[0]:
                continue
            tracked = live.get(rid)
            if tracked is not None:
                runs += (tracked.key, tracked.blocks, len(ids[0]), *ids[0])
                tracked.blocks += len(ids[0])
                blocks += (tracked.key, tracked.blocks)
        event.blocks, event.block_ids = pack_u32(blocks), pack_u32(runs)

    # --- the output ---

    def update_begins(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Write the workers' marks into the step that `scheduler_output` scheduled."""
        tag = getattr(scheduler_output, marks.TAG, None)
        step = self.updating = self.open.pop(tag[0], None) if tag is not None else None
        if step is None:
            return
        found = marks.unpack(model_runner_output, step.event)
        if step.event.token < 0:
            step.event.token = now() - step.event.t
        if found is not None and found != self._facts:
            self._facts = found
            self.emitter.emit_lifecycle(facts.engine(self.scheduler, found))

    def update_failed(self, _token: Any, _error: BaseException, *_: Any, **__: Any) -> None:
        self.updating = None

    def update_ended(self, _token: Any, outputs: Any, *_: Any, **__: Any) -> None:
        step, self.updating = self.updating, None
        if step is None:
            return
        event = step.event
        event.end = now() - event.t
        event.odd = pack_u32(_odd(step, outputs))
        event.preempted = self._preempted
        self.emitter.emit(event)
        self._emitted, self._last = step.keys, event.n
        end = event.t + event.end
        if end - self._last_roster >= ROSTER_PERIOD_NS:
            self._last_roster = end
            self.emit_roster(end)

    def emit_roster(self, at: int) -> None:
        """Emit the absolute state of all requests; of very many, of those that run."""
        complete = len(self.live) <= ROSTER_ROOM
        rows: list[int] = []
        for rid in self.live if complete else list(self._emitted)[:ROSTER_ROOM]:
            tracked = self.live.get(rid)
            request = None if tracked is None else tracked.request()
            if tracked is None or request is None:
                continue
            computed, generated = request.num_computed_tokens, request.num_output_tokens
            rows += (tracked.key, max(0, computed), generated, tracked.blocks,
                     request.num_prompt_tokens, int(rid in self._emitted))  # fmt: skip
        self.emitter.emit(events.Roster(at, self._last, pack_u32(rows), complete))

    # --- ends and preemption ---

    def finish(self, request: Any, *_: Any, **__: Any) -> None:
        """Emit, once, that no further token of the request will come."""
        tracked = self.live.get(request.request_id)
        if tracked is None or tracked.finished:
            return
        tracked.finished = True
        reason = _REASONS.get(request.status.name, request.status.name.lower())
        updating = None if self.updating is None else self.updating.event
        at = now() if updating is None else updating.t + updating.token
        # An aborted request may have been ended earlier by its front end, at a stop string: that
        # one knows the count, and the steps tell it where the client simply left.
        count = -1 if reason == "cancelled" else request.num_output_tokens
        end = events.Finished(at, tracked.key, reason, count)
        end.prompt_tokens, end.cached_tokens = request.num_prompt_tokens, tracked.cached
        self.emitter.emit_lifecycle(end)

    def release_begins(self, request: Any) -> tuple[int, int] | None:
        """(cached, free) blocks before the request's own are given back."""
        return self.blocks.counts()[1:] if request.request_id in self.live else None

    def release_ended(self, before: tuple[int, int] | None, _result: Any, request: Any) -> None:
        """Emit that the request's blocks are back. What neither became free nor stayed cached is
        held by a request that shares it."""
        rid = request.request_id
        tracked = self.live.get(rid)
        if before is None or tracked is None:
            return
        self.finish(request)
        _, cached, free = self.blocks.counts()
        kept = cached - before[0] if cached >= 0 else -1
        self.emitter.emit_lifecycle(events.Released(now(), tracked.key, free - before[1], kept))
        del self.live[rid]
        self.pending.discard(rid)
        self.emitter.drop(rid, ENGINE)

    def preempt(self, request: Any, *_: Any, **__: Any) -> None:
        """Emit that the request is about to lose its blocks and go back to the queue."""
        rid = request.request_id
        tracked = self.live.get(rid)
        if tracked is None:
            return
        self._preempted += 1
        event = events.Preempted(now(), tracked.key, "recompute", total=self._preempted)
        event.computed, event.generated = request.num_computed_tokens, request.num_output_tokens
        self.emitter.emit_lifecycle(event)
        tracked.waiting = tracked.resumed = True
        tracked.blocks = 0
        tracked.lookup = tracked.allocated = NO_TIME
        self.pending.add(rid)


def _odd(step: OpenStep, outputs: Any) -> list[int]:
    """(key, tokens scheduled, tokens given out) of members for which these are not 1 and 1."""
    size = len(step.counts)
    if step.event.tokens == size:
        ones = 0
        for some in outputs.values():
            for out in some.outputs:
                ones += len(out.new_token_ids) == 1
        if ones == size:
            return []
    given = {
        out.request_id: len(out.new_token_ids) for some in outputs.values() for out in some.outputs
    }
    odd: list[int] = []
    for rid, scheduled in step.counts.items():
        produced = given.get(rid, 0)
        if scheduled != 1 or produced != 1:
            odd += (step.keys[rid], scheduled, produced)
    return odd

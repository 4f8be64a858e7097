"""The step recorder for vLLM: one per scheduler, on the thread that schedules.

It turns the calls that the hooks of `core` see into one `Step` a step, and the scheduler's
decisions into request events. All methods run on the engine core's own thread, so that nothing here
needs a lock. With asynchronous scheduling step N+1 is scheduled before step N's output is there:
open steps are kept by number.

What happens in the workers comes back with the model's output (`worker` attaches its marks to
it, whatever process or executor it ran in): both ends read the host's monotonic clock, and marks of
another host are not used.

Counts follow the engine's own state, never our own addition: output tokens are what the scheduler
gave out, blocks the tables that it sends to its workers, free blocks its pool's counter.

The engine's objects are held by weak references: a recorder hangs on them, and must not keep them.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import ref

from engine_hooks.base.emitter import ENGINE, Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.vllm.blocks import BlockGauge
from engine_hooks.vllm.marks import TAG, Marks

ROSTER_PERIOD_NS: Final = NS_PER_S
"""How often the absolute state of the requests is told, which bounds how long a lost event can
leave a wrong count."""

ROSTER_ROOM: Final = 1_024
"""Requests in one roster. When the engine holds more, only those that run are told, and the roster
says so: walking a queue of thousands would be seen in the step after it."""

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


class Tracked:
    """A request inside the engine, as last told to the viewer. Times in monotonic ns, `request` by
    weak reference."""

    __slots__ = (
        "allocated",
        "attempts",
        "blocks",
        "cached",
        "finished",
        "key",
        "lookup",
        "request",
        "resumed",
        "waiting",
    )

    def __init__(self, key: int, request: Any) -> None:
        self.key = key
        self.request = ref(request)
        self.lookup = NO_TIME
        self.allocated = NO_TIME
        self.attempts = 0
        self.waiting = True
        self.resumed = False
        self.blocks = 0
        self.finished = False
        self.cached = 0


class OpenStep:
    """A step that was scheduled and whose output is not there yet."""

    __slots__ = (
        "begin",
        "blocks",
        "counts",
        "gauges",
        "joined",
        "keys",
        "left",
        "marks",
        "n",
        "runs",
        "scheduled",
        "token",
        "total",
    )

    def __init__(self, n: int, begin: int) -> None:
        self.n = n
        self.begin = begin
        self.scheduled = NO_TIME
        self.counts: dict[str, int] = {}
        """Request id → tokens scheduled: the engine's own dict."""
        self.total = 0
        self.keys: dict[str, int] = {}
        self.joined: list[int] = []
        self.left: list[int] = []
        self.blocks: list[int] = []
        self.runs: list[int] = []
        self.gauges = (-1, -1, -1, -1, -1)
        self.token = NO_TIME
        self.marks: Marks | None = None


class StepRecorder:
    """Records one scheduler."""

    def __init__(self, emitter: Emitter, scheduler: Any, *, graph: int) -> None:
        self.emitter = emitter
        self._scheduler = ref(scheduler)
        self._manager = ref(scheduler.kv_cache_manager)
        self.blocks = BlockGauge(scheduler.kv_cache_manager.block_pool)
        self.graph = graph
        self.live: dict[str, Tracked] = {}
        self.pending: set[str] = set()
        """Requests that wait to be scheduled, for the first time or after a preemption."""
        self.open: dict[int, OpenStep] = {}
        self.updating: OpenStep | None = None
        self.begin = NO_TIME
        self.members: dict[str, int] = {}
        self.told: dict[str, int] = {}
        """Members of the step that was last told."""
        self.count = 0
        self.last_told = 0
        self.preempted = 0
        self._evicted_told = 0
        self.last_roster = 0
        self.facts: tuple[Any, ...] | None = None
        """What the workers said of the model, once they did."""
        for request in list(getattr(scheduler, "requests", {}).values()):
            self._adopt(request)

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler, None once it is gone."""
        return self._scheduler()

    @property
    def manager(self) -> Any:
        """The engine's KV cache manager, None once it is gone."""
        return self._manager()

    # --- the queue ---

    def queued(self, request: Any) -> None:
        """A request enters the scheduler's waiting queue."""
        rid = request.request_id
        if rid in self.live:
            return  # a session that goes on
        tracked = self.live[rid] = Tracked(self.emitter.hold(rid, ENGINE), request)
        self.pending.add(rid)
        self._tell_queued(tracked, request)

    def _tell_queued(self, tracked: Tracked, request: Any) -> None:
        rid = request.request_id
        number, _, parent = rid.partition("_")
        self.emitter.emit_lifecycle(
            events.Queued(
                now(), tracked.key, rid, request.num_prompt_tokens, request.max_tokens, False,
                parent if number.isdecimal() else "",
            )
        )  # fmt: skip

    def _adopt(self, request: Any) -> Tracked:
        """A request that is inside already: we were attached late."""
        rid = request.request_id
        tracked = self.live[rid] = Tracked(self.emitter.hold(rid, ENGINE), request)
        tracked.waiting = request.num_computed_tokens == 0
        if tracked.waiting:
            self.pending.add(rid)
        else:
            tracked.blocks = len(self.manager.get_block_ids(rid)[0])
        self._tell_queued(tracked, request)
        return tracked

    # --- scheduling ---

    def schedule_begins(self) -> None:
        """`schedule` was entered: a step begins here if it finds work."""
        self.begin = now()

    def lookup(self, request: Any, at: int) -> None:
        """The prefix cache is searched for a waiting request, from `at` on."""
        tracked = self.live.get(request.request_id)
        if tracked is not None:
            tracked.lookup = at

    def allocated(self, request: Any, at: int, fits: bool) -> None:
        """Blocks were asked for, from `at`, for a request that waits."""
        tracked = self.live.get(request.request_id)
        if tracked is None or not tracked.waiting:
            return
        if not fits:
            tracked.attempts += 1
            return
        tracked.allocated = now()
        if tracked.lookup < self.begin:  # looked up in an earlier pass, or not at all
            tracked.lookup = at

    def scheduled(self, output: Any) -> None:
        """`schedule` returned `output`: a step is open when it holds work."""
        at = now()
        fresh: dict[str, Any] = {}
        for new in output.scheduled_new_reqs:
            self._admitted(
                new.req_id,
                new.num_computed_tokens,
                len(new.block_ids[0]) if new.block_ids else 0,
                at,
            )
            fresh[new.req_id] = new.block_ids
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for index, rid in enumerate(cached.req_ids):
                if rid in cached.resumed_req_ids:
                    ids = cached.new_block_ids[index]
                    self._admitted(
                        rid, cached.num_computed_tokens[index], len(ids[0]) if ids else 0, at
                    )
                    fresh[rid] = ids
        evicted = self.blocks.evicted
        if evicted != self._evicted_told:
            self.emitter.emit(events.Evicted(at, evicted - self._evicted_told, evicted))
            self._evicted_told = evicted
        counts = output.num_scheduled_tokens
        if not counts:
            return
        self.count += 1
        step = OpenStep(self.count, self.begin)
        step.scheduled = at
        step.counts = counts
        step.total = output.total_num_scheduled_tokens
        self._members(step, counts)
        self._tables(step, fresh, cached)
        running, waiting = self.scheduler.get_request_counts()
        used, kept, free = self.blocks.counts()
        step.gauges = (used, kept, free, waiting, running)
        self.open[step.n] = step
        if len(self.open) > OPEN_ROOM:
            del self.open[next(iter(self.open))]
        setattr(output, TAG, (step.n, step.begin))

    def _admitted(self, rid: str, computed: int, blocks: int, at: int) -> None:
        tracked = self.live.get(rid)
        if tracked is None:
            request = self.scheduler.requests.get(rid)
            if request is None:
                return
            tracked = self._adopt(request)
        size = self.scheduler.block_size
        shared = min(blocks, computed // size) if size else 0
        ended = tracked.allocated if tracked.allocated >= self.begin else at
        lookup = tracked.lookup if tracked.lookup >= self.begin else self.begin
        self.emitter.emit_lifecycle(
            events.Scheduled(
                ended,
                tracked.key,
                lookup,
                computed,
                shared,
                blocks - shared,
                tracked.resumed,
                tracked.attempts,
            )
        )
        if not tracked.resumed:
            tracked.cached = computed
        tracked.waiting = False
        tracked.attempts = 0
        self.pending.discard(rid)

    def _members(self, step: OpenStep, counts: dict[str, int]) -> None:
        """Who takes part: compared with the step before as a whole, which is the usual case and
        runs in C."""
        before = self.members
        if counts.keys() == before.keys():
            step.keys = before
            return
        live = self.live
        keys: dict[str, int] = {}
        for rid in counts:
            key = before.get(rid)
            if key is None:
                tracked = live.get(rid)
                if tracked is None:
                    tracked = self._adopt(self.scheduler.requests[rid])
                key = tracked.key
                step.joined.append(key)
            keys[rid] = key
        step.left = [key for rid, key in before.items() if rid not in counts]
        step.keys = self.members = keys

    def _tables(self, step: OpenStep, fresh: dict[str, Any], cached: Any) -> None:
        """Block tables that changed, as the scheduler sends them to its workers."""
        live = self.live
        for rid, ids in fresh.items():
            tracked = live.get(rid)
            if tracked is not None and ids:
                table = ids[0]
                tracked.blocks = len(table)
                step.blocks += (tracked.key, len(table))
                step.runs += (tracked.key, 0, len(table), *table)
        for rid, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is None or rid in fresh or not ids[0]:
                continue
            tracked = live.get(rid)
            if tracked is not None:
                table = ids[0]
                step.runs += (tracked.key, tracked.blocks, len(table), *table)
                tracked.blocks += len(table)
                step.blocks += (tracked.key, tracked.blocks)

    # --- the output ---

    def update_begins(self, output: Any, result: Any) -> None:
        """`update_from_output` was entered for the step that `output` scheduled, with the model's
        `result`."""
        tag = getattr(output, TAG, None)
        step = self.open.pop(tag[0], None) if tag is not None else None
        self.updating = step
        if step is None:
            return
        step.marks = Marks.read(result, step.n)
        step.token = step.marks.token if step.marks is not None and step.marks.token > 0 else now()

    def update_failed(self) -> None:
        """It raised: the step is not told."""
        self.updating = None

    def update_ended(self, outputs: Any) -> Marks | None:
        """It returned what it gives out: the step is over and is told. Returns the workers'
        marks."""
        step, self.updating = self.updating, None
        if step is None:
            return None
        end = now()
        odd = _odd(step, outputs)
        begin = step.begin
        used, cached, free, waiting, running = step.gauges
        event = events.Step(
            begin,
            step.n,
            _offset(step.scheduled, begin),
            -1,
            -1,
            -1,
            -1,
            -1,
            -1,
            _offset(step.token, begin),
            end - begin,
            len(step.keys),
            step.total,
            pack_u32(step.joined),
            pack_u32(step.left),
            pack_u32(odd),
            pack_u32(step.blocks),
            pack_u32(step.runs),
            used,
            cached,
            free,
            waiting,
            running,
            self.preempted,
        )
        event.graph = self.graph
        if step.marks is not None:
            step.marks.fill(event)
        self.emitter.emit(event)
        self.told, self.last_told = step.keys, step.n
        if end - self.last_roster >= ROSTER_PERIOD_NS:
            self.last_roster = end
            self.tell_roster(end)
        return step.marks

    def tell_roster(self, at: int) -> None:
        """Tell the absolute state of every request in the engine, or, when there are very many, of
        those that run."""
        complete = len(self.live) <= ROSTER_ROOM
        rows: list[int] = []
        for rid in self.live if complete else list(self.told)[:ROSTER_ROOM]:
            tracked = self.live.get(rid)
            request = None if tracked is None else tracked.request()
            if tracked is None or request is None:
                continue
            rows += (
                tracked.key,
                max(0, request.num_computed_tokens),
                request.num_output_tokens,
                tracked.blocks,
                request.num_prompt_tokens,
                int(rid in self.told),
            )
        self.emitter.emit(events.Roster(at, self.last_told, pack_u32(rows), complete))

    # --- ends and preemption ---

    def finish_begins(self, request: Any) -> Tracked | None:
        """The request is over: no further token will come."""
        tracked = self.live.get(request.request_id)
        if tracked is None or tracked.finished:
            return None
        tracked.finished = True
        reason = _REASONS.get(request.status.name, request.status.name.lower())
        at = self.updating.token if self.updating is not None else now()
        # An aborted request may have been ended earlier by its front end, at a stop string: that
        # one knows the count, and the steps tell it where the client simply left.
        count = -1 if reason == "cancelled" else request.num_output_tokens
        self.emitter.emit_lifecycle(
            events.Finished(
                at, tracked.key, reason, count, "", request.num_prompt_tokens, tracked.cached
            )
        )
        return tracked

    def release_begins(self, request: Any) -> tuple[int, int, int] | None:
        """Its blocks are about to be given back: (blocks held, cached, free) before."""
        if request.request_id not in self.live:
            return None
        return (self.live[request.request_id].blocks, *self.blocks.counts()[1:])

    def release_ended(self, before: tuple[int, int, int] | None, request: Any) -> None:
        """Its blocks are back. What neither became free nor stayed cached is held by a request that
        shares it."""
        rid = request.request_id
        tracked = self.live.get(rid)
        if before is None or tracked is None:
            return
        self.finish_begins(request)
        _, cached, free = self.blocks.counts()
        kept = cached - before[1] if cached >= 0 else -1
        self.emitter.emit_lifecycle(events.Released(now(), tracked.key, free - before[2], kept))
        del self.live[rid]
        self.pending.discard(rid)
        self.emitter.drop(rid, ENGINE)

    def preempt(self, request: Any) -> None:
        """The request is about to lose its blocks and go back to the queue."""
        rid = request.request_id
        tracked = self.live.get(rid)
        if tracked is None:
            return
        self.preempted += 1
        self.emitter.emit_lifecycle(
            events.Preempted(
                now(),
                tracked.key,
                "recompute",
                request.num_computed_tokens,
                request.num_output_tokens,
                self.preempted,
            )
        )
        tracked.waiting = tracked.resumed = True
        tracked.blocks = 0
        tracked.lookup = tracked.allocated = NO_TIME
        self.pending.add(rid)


def _odd(step: OpenStep, outputs: Any) -> list[int]:
    """(key, tokens scheduled, tokens given out) of the members for which these are not 1 and 1:
    usually none."""
    size = len(step.counts)
    if step.total == size:
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


def _offset(at: int, begin: int) -> int:
    return at - begin if at >= begin else -1

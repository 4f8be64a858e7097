"""The step recorder for transformers' continuous batching: one per batch processor, on its
generation thread, so that nothing here needs a lock.

The calls that the hooks of `continuous_batching` see become one `Step` a step, and request events.
With asynchronous batching step N+1 is prepared and launched before step N is updated: open steps
wait in a queue. Counts follow the engine's own lists, tables, pool and ledger, never our own
addition. The engine's objects, on which a recorder hangs, are held by weak references; only an open
step holds its batch, as the engine does while the step runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref

from engine_hooks.base.device_timer import DeviceClock, DeviceTimer
from engine_hooks.base.emitter import ENGINE, Emitter
from engine_hooks.base.module_marks import ModuleMarks
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage

ROSTER_PERIOD_NS: Final = NS_PER_S
"""How often the absolute state of all requests is emitted, which bounds how long a lost event can
leave a wrong count."""

NO_TIME: Final = -1

Blocks = tuple[int, int]
"""(cached, free) blocks."""


@dataclass(slots=True, eq=False)
class Tracked:
    """A request inside the engine, as last emitted. `state`: the engine's weak record."""

    key: int
    state: ref[Any]
    prompt: int
    lookup: int = NO_TIME
    matched: int = 0
    cached: int = 0
    scheduled: bool = False
    attempts: int = 0
    computed: int = 0
    output: int = 0
    blocks: int = 0
    table: list[int] = field(default_factory=list)
    stale_table: bool = False
    resumed: bool = False
    finishing: bool = False
    handed_out: bool = False


@dataclass(slots=True, eq=False)
class OpenStep:
    """A step that was prepared and is not updated yet; `event` is filled in as it runs."""

    event: events.Step
    batch: list[Any]
    members: set[int]
    device: DeviceTimer | None = None
    marks: ModuleMarks | None = None


def true_prompt_length(state: Any) -> int:
    """Return the prompt tokens of the client's request: a soft reset counts generated ones among
    the engine's initial tokens."""
    return int(state._true_initial_tokens or len(state.initial_tokens))


def output_length(state: Any) -> int:
    """Return the output tokens so far, those before a soft reset included."""
    return len(state.initial_tokens) - true_prompt_length(state) + len(state.generated_tokens)


class StepRecorder:
    """Records one batch processor. `driver`: false on a tensor-parallel rank that repeats what
    another one decides."""

    def __init__(self, emitter: Emitter, processor: Any, *, driver: bool) -> None:
        self.emitter = emitter
        self.driver = driver
        self._scheduler = ref(processor.scheduler)
        self._allocator = ref(next(iter(processor.cache.cache_allocators.values())))
        self.live: dict[str, Tracked] = {}
        self.ended: dict[str, Tracked] = {}
        """Requests that ended inside the update that is running: their last token is still to be
        emitted."""
        self.pending: set[str] = set()
        """Requests that were queued and not scheduled yet."""
        self.open: deque[OpenStep] = deque()
        self.current: OpenStep | None = None
        self.updating: OpenStep | None = None
        self.device_clock: DeviceClock | None = None
        self._chosen: list[Any] = []
        self._chosen_at = NO_TIME
        self._scheduling_at = NO_TIME
        self._members: set[int] = set()
        self._preempted = self._evicted = self._count = self._last_roster = 0
        self._offloading: dict[str, tuple[int, int]] | None = None
        """While requests are taken out: (computed, output) tokens of each that could be."""
        runner = processor.model_runner
        self.graph = int(runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode)
        if runner._compiled_varlen or runner._compiled_decode:
            self.graph = 2
        for state in list(processor.scheduler.waiting_requests.values()):
            self.queued(state)
        for state in list(processor.scheduler.active_requests.values()):
            self._adopt(state)

    @property
    def scheduler(self) -> Any:
        return self._scheduler()

    @property
    def allocator(self) -> Any:
        return self._allocator()

    # --- the queue ---

    def queued(self, state: Any) -> None:
        """Note that a request entered the scheduler's waiting list (again, after a preemption)."""
        if not self.driver:
            return
        rid = state.request_id
        tracked = self.live.get(rid)
        resumed = False
        if tracked is None or self._offloading is None:
            tracked = self._track(state)
        else:
            resumed = True
            self._preempt(tracked, state, self._offloading)
        tracked.state = ref(state)
        tracked.scheduled = False
        tracked.resumed = resumed
        tracked.lookup = NO_TIME
        tracked.matched = tracked.attempts = 0
        self.pending.add(rid)
        self._emit_queued(tracked, state)

    def _track(self, state: Any) -> Tracked:
        rid = state.request_id
        key = self.emitter.hold(rid, ENGINE)
        tracked = self.live[rid] = Tracked(key, ref(state), true_prompt_length(state))
        return tracked

    def _adopt(self, state: Any) -> Tracked:
        """Track a request that was never seen in the queue: a fork's child, or we came late."""
        tracked = self._track(state)
        tracked.scheduled = True
        self._emit_queued(tracked, state)
        return tracked

    def _emit_queued(self, tracked: Tracked, state: Any) -> None:
        rid, limit = state.request_id, -1
        if state.max_new_tokens is not None:
            # a soft reset has taken what was generated before it off the limit
            limit = state.max_new_tokens + len(state.initial_tokens) - tracked.prompt
        parent = rid.split("__child#")[0] if "__child#" in rid else ""
        self.emitter.emit_lifecycle(
            events.Queued(now(), tracked.key, rid, tracked.prompt, limit, tracked.resumed, parent)
        )

    # --- scheduling ---

    def prepare_begins(self) -> int:
        """Start a step, in case `prepare_next_batch` finds work."""
        self._scheduling_at = now()
        return self._scheduling_at

    def looked_up(self, at: int, matched: int, request_id: str, *_: Any, **__: Any) -> None:
        """Note that `matched` prompt tokens of a waiting request were found in the prefix cache."""
        tracked = self.live.get(request_id)
        if tracked is not None and not tracked.scheduled:
            tracked.lookup = at
            tracked.matched = matched

    def allocated(self, rid: str, at: int, fits: bool) -> None:
        """Note that blocks were asked for, from `at`, to schedule a request the first time."""
        tracked = self.live.get(rid)
        if tracked is None or tracked.scheduled:
            return
        if not fits:
            tracked.attempts += 1
            return
        ended = now()
        # A lookup of an earlier pass counts as waiting: the stage starts in the pass that
        # succeeded.
        lookup = tracked.lookup if tracked.lookup >= self._scheduling_at else at
        allocator = self.allocator
        shared = tracked.matched // allocator.tokens_per_page
        fresh = max(0, len(allocator.block_table.get(rid, ())) - shared)
        tracked.scheduled = True
        self.pending.discard(rid)
        tracked.computed = tracked.matched
        if not tracked.resumed:
            tracked.cached = tracked.matched
        scheduled = events.Scheduled(ended, tracked.key, lookup, tracked.matched, shared, fresh)
        scheduled.resumed, scheduled.attempts = tracked.resumed, tracked.attempts
        self.emitter.emit_lifecycle(scheduled)

    def batch_chosen(self, requests: list[Any] | None) -> None:
        """Note what was scheduled; the last choice before the launch counts."""
        if requests:
            self._chosen_at = now()
            self._chosen = requests

    def prepared(self, begin: int | None, found: bool) -> None:
        """Open a step, if `prepare_next_batch` found requests to run."""
        if not found or begin is None:
            return
        batch, self._chosen = self._chosen, []
        keys = set()
        for future in batch:
            state = future.state
            tracked = self.live.get(state.request_id)
            if tracked is None:
                tracked = self._adopt(state)
            tracked.state = ref(state)
            keys.add(tracked.key)
        event = events.Step(begin, 0, max(self._chosen_at - begin, -1), batch=len(batch))
        event.joined = pack_u32(sorted(keys - self._members))
        event.left = pack_u32(sorted(self._members - keys))
        event.used, event.cached, event.free = self.block_counts()
        event.waiting = len(self.scheduler.waiting_requests)
        event.running = len(self.scheduler.active_requests)
        event.graph = self.graph
        self._members = keys
        self.current = OpenStep(event, batch, keys)
        self.open.append(self.current)

    def block_counts(self) -> tuple[int, int, int]:
        """(used, cached, free) blocks by the engine's own counters."""
        allocator = self.allocator
        pool = allocator.pool
        free = pool.count_free_blocks(allocator.index)
        free += pool.num_free_sectors * allocator.blocks_per_sector
        cached = len(allocator.ledger.cached_blocks)
        return allocator.num_blocks - free - cached, cached, free

    # --- update ---

    def update_begins(self) -> None:
        self.updating = self.open.popleft() if self.open else None
        if self.updating is not None and self.updating.device is not None:
            self.updating.device.wait_begins()

    def tokens_known(self, _token: Any, _result: Any) -> None:
        if self.updating is not None:
            self.updating.event.token = now() - self.updating.event.t

    def update_failed(self, _token: Any, _error: BaseException) -> None:
        self.updating = None

    def update_ended(self, _token: Any, _result: Any) -> None:
        step = self.updating
        if step is None:
            return
        end = now()
        odd: list[int] = []
        blocks: list[int] = []
        runs: list[int] = []
        tokens = 0
        tables = self.allocator.block_table
        for future in step.batch:
            state = future.state
            rid = state.request_id
            tracked = self.live.get(rid) or self.ended.get(rid)
            if tracked is None:
                continue
            scheduled = future.query_length
            tokens += scheduled
            output = output_length(state) if tracked.state() is state else tracked.output
            produced = output - tracked.output
            tracked.output = output
            tracked.computed = max(tracked.computed, state.position_offset)
            if scheduled != 1 or produced != 1:
                odd += (tracked.key, scheduled, max(0, produced))
            table = tables.get(rid)
            if table is not None and (len(table) != tracked.blocks or tracked.stale_table):
                self._table_changed(tracked, table, blocks, runs)
        self.ended.clear()
        self._count += 1
        event = step.event
        event.n, event.end, event.tokens = self._count, end - event.t, tokens
        event.odd, event.blocks, event.block_ids = pack_u32(odd), pack_u32(blocks), pack_u32(runs)
        event.preempted = self._preempted
        if step.device is not None and self.device_clock is not None:
            self.device_clock.fill(step.device, event)
        self.emitter.emit(event)
        self.updating = None
        if end - self._last_roster >= ROSTER_PERIOD_NS:
            self._last_roster = end
            self.emit_roster(end, step.members)

    def _table_changed(
        self, tracked: Tracked, table: list[int], blocks: list[int], runs: list[int]
    ) -> None:
        """Note blocks and the new part of the table; a stale table is compared whole."""
        first = tracked.blocks
        if tracked.stale_table:
            pairs = enumerate(zip(tracked.table, table, strict=False))
            first = next((i for i, (old, new) in pairs if old != new), len(tracked.table))
            tracked.stale_table = False
        if len(table) != tracked.blocks:
            blocks += (tracked.key, len(table))
        fresh = table[first:]
        if fresh:
            runs += (tracked.key, first, len(fresh), *fresh)
        tracked.blocks = len(table)
        tracked.table = table[:]

    def table_rewritten(
        self, _token: Any, _result: Any, request_id: str, *_: Any, **__: Any
    ) -> None:
        """Note that identical complete blocks may have been swapped inside the table."""
        tracked = self.live.get(request_id)
        if tracked is not None:
            tracked.stale_table = True

    def emit_roster(self, at: int, members: set[int]) -> None:
        """Emit the absolute state of all requests; `members` ran in the last step."""
        rows: list[int] = []
        for one in self.live.values():
            rows += (one.key, max(0, one.computed), one.output, one.blocks, one.prompt,
                     int(one.key in members))  # fmt: skip
        self.emitter.emit(events.Roster(at, self._count, pack_u32(rows)))

    def delivered(self, _token: Any, _result: Any, outputs: list[Any]) -> None:
        """Emit the end of stage 10 of those requests whose caller is in this process."""
        for output in outputs:
            rid = output.request_id
            tracked = self.live.get(rid) or self.ended.get(rid)
            if tracked is not None and not tracked.handed_out and not self.emitter.held(rid):
                tracked.handed_out = True
                self.emitter.emit_lifecycle(events.End(now(), tracked.key, Stage.STREAM))

    # --- ends ---

    def finish_begins(self, request_id: str) -> tuple[Tracked, Any, int, int] | None:
        """(request, its state, cached, free blocks) before its blocks are given back."""
        tracked = self.live.get(request_id)
        if tracked is None or self._offloading is not None:
            return None
        return tracked, tracked.state(), *self.block_counts()[1:]

    def finish_ended(
        self, before: tuple[Tracked, Any, int, int] | None, _result: Any, *_: Any, **__: Any
    ) -> None:
        """Emit the end of a request whose blocks are back. What neither became free nor stayed
        cached is still held by a request that shares it."""
        if before is None:
            return
        tracked, state, cached, free = before
        at, step = now(), self.updating
        if step is not None and step.event.token >= 0:
            at = step.event.t + step.event.token
        self._emit_end(tracked, state, at, finish_reason(state), (cached, free))

    def cancel_begins(self) -> Blocks | None:
        """(cached, free) blocks before cancelled requests are cleared, None when there are none."""
        return self.block_counts()[1:] if self.scheduler._requests_to_cancel else None

    def cancelled(self, before: Blocks | None, states: list[Any]) -> None:
        """Emit that these requests were cancelled by their client. Blocks are known for one; for
        several at once they are not told apart."""
        if before is None:
            return
        for state in states:
            tracked = self.live.get(state.request_id)
            if tracked is not None:
                blocks = before if len(states) == 1 else None
                self._emit_end(tracked, state, now(), ("cancelled", ""), blocks)

    def failed(self, state: Any, error: BaseException) -> None:
        """Emit that the engine failed a request; `finish_request` may follow for it."""
        rid = state.request_id
        tracked = self.live.get(rid)
        if tracked is None or tracked.finishing:
            return
        held = len(self.allocator.block_table.get(rid, ()))
        tracked.finishing = True
        reason = f"{type(error).__name__}: {error}"[:500]
        self.emitter.emit_lifecycle(
            events.Finished(now(), tracked.key, "failed", tracked.output, reason)
        )
        if rid not in self.scheduler.active_requests:
            self.emitter.emit_lifecycle(events.Released(now(), tracked.key, held, 0))
            self._drop(rid, tracked)

    def _emit_end(
        self, tracked: Tracked, state: Any, at: int, why: tuple[str, str], before: Blocks | None
    ) -> None:
        """`why`: (reason, error); `before`: the blocks before it ended, None when not known."""
        if not tracked.finishing:
            end = events.Finished(at, tracked.key, why[0], output_length(state), why[1])
            end.prompt_tokens, end.cached_tokens = tracked.prompt, tracked.cached
            self.emitter.emit_lifecycle(end)
        released = events.Released(now(), tracked.key)
        if before is not None:
            _, cached, free = self.block_counts()
            released.cached, released.freed = cached - before[0], free - before[1]
        self.emitter.emit_lifecycle(released)
        self._drop(state.request_id, tracked)

    def _drop(self, rid: str, tracked: Tracked) -> None:
        self.live.pop(rid, None)
        self.pending.discard(rid)
        self.ended[rid] = tracked
        self.emitter.drop(rid, ENGINE)

    # --- preemption and eviction ---

    def offload_begins(self) -> None:
        """Note how far the requests are that may be taken out."""
        self._offloading = {
            state.request_id: (state.position_offset, output_length(state))
            for state, _ in self.scheduler.starved_requests
        }

    def offload_ended(self, _token: Any, _result: Any) -> None:
        self._offloading = None

    def _preempt(self, tracked: Tracked, state: Any, before: dict[str, tuple[int, int]]) -> None:
        self._preempted += 1
        computed, output = before.get(state.request_id, (tracked.computed, tracked.output))
        kind = "offload" if state.is_cpu_offloaded else "recompute"
        tracked.computed = computed if kind == "offload" else 0
        tracked.blocks = 0
        tracked.table = []
        self.emitter.emit_lifecycle(
            events.Preempted(now(), tracked.key, kind, computed, output, self._preempted)
        )

    def evict_begins(self) -> int:
        return len(self.allocator.ledger.cached_blocks)

    def evict_ended(self, before: int | None, _result: Any) -> None:
        gone = (before or 0) - len(self.allocator.ledger.cached_blocks)
        if gone > 0:
            self._evicted += gone
            self.emitter.emit(events.Evicted(now(), gone, self._evicted))


def finish_reason(state: Any) -> tuple[str, str]:
    """(reason, error) of a request that the engine ended, in the words of the OpenAI API.

    An end token that is also the last one allowed is "length", as the server tells its client (vLLM
    says "stop").
    """
    if state.error is not None:
        return "failed", str(state.error)[:500]
    tokens = state.generated_tokens
    allowed = state.max_new_tokens
    if tokens and tokens[-1] in state._eos_token_ids and (allowed is None or len(tokens) < allowed):
        return "stop", ""
    return "length", ""

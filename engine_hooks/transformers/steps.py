"""The step recorder for transformers' continuous batching: one per batch processor, on its
generation thread.

It turns the calls that the hooks of `continuous_batching` see into one `Step` a step, and the
scheduler's decisions into request events. All methods run on the generation thread, so that nothing
here needs a lock. With asynchronous batching step N+1 is prepared and launched before step N is
updated: open steps wait in a queue.

Counts follow the engine's own state, never our own addition: output tokens are the engine's list
lengths, blocks are the lengths of its block tables, free and cached blocks its pool's and ledger's
counters.

The engine's objects are held by weak references: a recorder hangs on them, and must not keep them.
Only an open step holds its batch, as the engine does while the step runs.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final
from weakref import ref

from engine_hooks.base.device_timer import DeviceClock, DeviceTimer
from engine_hooks.base.emitter import ENGINE, Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import pack_u32

ROSTER_PERIOD_NS: Final = NS_PER_S
"""How often the absolute state of all requests is told, which bounds how long a lost event can
leave a wrong count."""

NO_TIME: Final = -1


class Tracked:
    """A request inside the engine, as last told to the viewer. `state` is a weak reference to the
    engine's record."""

    __slots__ = (
        "key",
        "state",
        "prompt",
        "lookup",
        "matched",
        "cached",
        "scheduled",
        "attempts",
        "computed",
        "output",
        "blocks",
        "table",
        "stale_table",
        "resumed",
        "finishing",
        "handed_out",
    )

    def __init__(self, key: int, state: Any) -> None:
        self.key = key
        self.state = ref(state)
        self.prompt = true_prompt_length(state)
        self.lookup = NO_TIME
        self.matched = 0
        self.cached = 0
        self.scheduled = False
        self.attempts = 0
        self.computed = 0
        self.output = 0
        self.blocks = 0
        self.table: list[int] = []
        self.stale_table = False
        self.resumed = False
        self.finishing = False
        self.handed_out = False


class OpenStep:
    """A step that was prepared and is not updated yet. Times are monotonic ns."""

    __slots__ = (
        "begin",
        "scheduled",
        "launched",
        "embed",
        "layers",
        "head",
        "logits",
        "sampled",
        "token",
        "batch",
        "joined",
        "left",
        "members",
        "gauges",
        "device",
    )

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.scheduled = self.launched = self.embed = self.layers = NO_TIME
        self.head = self.logits = self.sampled = self.token = NO_TIME
        self.batch: list[Any] = []
        self.joined: list[int] = []
        self.left: list[int] = []
        self.members: set[int] = set()
        self.gauges = (-1, -1, -1, -1, -1)
        self.device: DeviceTimer | None = None


def true_prompt_length(state: Any) -> int:
    """Prompt tokens of the client's request: a soft reset counts generated ones among the engine's
    initial tokens."""
    return state._true_initial_tokens or len(state.initial_tokens)


def output_length(state: Any) -> int:
    """Output tokens so far, those before a soft reset included."""
    return len(state.initial_tokens) - true_prompt_length(state) + len(state.generated_tokens)


class StepRecorder:
    """Records one batch processor."""

    def __init__(self, emitter: Emitter, processor: Any, *, driver: bool) -> None:
        self.emitter = emitter
        self.driver = driver
        self._scheduler = ref(processor.scheduler)
        self._allocator = ref(next(iter(processor.cache.cache_allocators.values())))
        self.live: dict[str, Tracked] = {}
        self.ended: dict[str, Tracked] = {}
        """Requests that ended inside the update that is running: their last token is still to be
        told."""
        self.pending: set[str] = set()
        """Requests that were queued and not scheduled yet."""
        self.open: deque[OpenStep] = deque()
        self.current: OpenStep | None = None
        self.updating: OpenStep | None = None
        self._chosen: list[Any] = []
        self._chosen_at = NO_TIME
        self.device_clock: DeviceClock | None = None
        self.members: set[int] = set()
        self.preempted = 0
        self.evicted = 0
        self.count = 0
        self.scheduling_at = NO_TIME
        self.offloading = False
        self.finishing_at = NO_TIME
        self.last_roster = 0
        runner = processor.model_runner
        self.graph = (
            2
            if runner._compiled_varlen or runner._compiled_decode
            else int(runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode)
        )
        for state in list(processor.scheduler.waiting_requests.values()):
            self.queued(state)
        for state in list(processor.scheduler.active_requests.values()):
            self._adopt(state)

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler, None once it is gone."""
        return self._scheduler()

    @property
    def allocator(self) -> Any:
        """The engine's first block allocator, None once it is gone."""
        return self._allocator()

    # --- the queue ---

    def queued(self, state: Any) -> None:
        """A request entered the scheduler's waiting list (again, after a preemption)."""
        rid = state.request_id
        tracked = self.live.get(rid)
        resumed = self.offloading and tracked is not None
        if tracked is None or not resumed:
            tracked = self.live[rid] = Tracked(self.emitter.hold(rid, ENGINE), state)
        key = tracked.key
        tracked.state = ref(state)
        tracked.scheduled = False
        tracked.resumed = resumed
        tracked.lookup = NO_TIME
        tracked.matched = 0
        tracked.attempts = 0
        self.pending.add(rid)
        parent = rid.split("__child#")[0] if "__child#" in rid else ""
        limit = -1 if state.max_new_tokens is None else state.max_new_tokens + output_length(state)
        self.emitter.emit_lifecycle(
            events.Queued(now(), key, rid, tracked.prompt, limit, resumed, parent)
        )

    def _adopt(self, state: Any) -> Tracked:
        """A request that runs without having been seen in the queue: a fork's child, or we were
        attached late."""
        rid = state.request_id
        tracked = self.live[rid] = Tracked(self.emitter.hold(rid, ENGINE), state)
        tracked.scheduled = True
        parent = rid.split("__child#")[0] if "__child#" in rid else ""
        limit = -1 if state.max_new_tokens is None else state.max_new_tokens
        self.emitter.emit_lifecycle(
            events.Queued(now(), tracked.key, rid, tracked.prompt, limit, False, parent)
        )
        return tracked

    # --- scheduling ---

    def prepare_begins(self) -> int:
        """`prepare_next_batch` was entered: a step begins here if it finds work."""
        self.scheduling_at = now()
        return self.scheduling_at

    def lookup(self, rid: str, at: int, matched: int) -> None:
        """The prefix cache was searched for a waiting request, from `at`; `matched` prompt tokens
        were found."""
        tracked = self.live.get(rid)
        if tracked is not None and not tracked.scheduled:
            tracked.lookup = at
            tracked.matched = matched

    def allocated(self, rid: str, at: int, fits: bool) -> None:
        """Blocks were asked for, from `at`. Only the first scheduling of a request is of
        interest."""
        tracked = self.live.get(rid)
        if tracked is None or tracked.scheduled:
            return
        if not fits:
            tracked.attempts += 1
            return
        ended = now()
        # A lookup of an earlier pass counts as waiting: the stage begins in the pass that
        # succeeded.
        lookup = tracked.lookup if tracked.lookup >= self.scheduling_at else at
        allocator = self.allocator
        table = allocator.block_table.get(rid, ())
        shared = tracked.matched // allocator.tokens_per_page
        tracked.scheduled = True
        self.pending.discard(rid)
        tracked.computed = tracked.matched
        if not tracked.resumed:
            tracked.cached = tracked.matched
        self.emitter.emit_lifecycle(
            events.Scheduled(
                ended,
                tracked.key,
                lookup,
                tracked.matched,
                shared,
                max(0, len(table) - shared),
                tracked.resumed,
                tracked.attempts,
            )
        )

    def batch_chosen(self, requests: list[Any] | None) -> None:
        """`schedule_batch` returned; the last one before the launch counts."""
        if requests:
            self._chosen_at = now()
            self._chosen = requests

    def prepared(self, begin: int, found: bool) -> None:
        """`prepare_next_batch` returned: a step is open when it found requests to run."""
        if not found:
            return
        step = OpenStep(begin)
        step.scheduled = self._chosen_at
        step.batch, self._chosen = self._chosen, []
        keys = set()
        for future in step.batch:
            state = future.state
            tracked = self.live.get(state.request_id)
            if tracked is None:
                tracked = self._adopt(state)
            tracked.state = ref(state)
            keys.add(tracked.key)
        step.joined = sorted(keys - self.members)
        step.left = sorted(self.members - keys)
        self.members = step.members = keys
        scheduler = self.scheduler
        used, cached, free = self.block_counts()
        step.gauges = (
            used,
            cached,
            free,
            len(scheduler.waiting_requests),
            len(scheduler.active_requests),
        )
        self.open.append(step)
        self.current = step

    def block_counts(self) -> tuple[int, int, int]:
        """(used, cached, free) blocks by the engine's own counters."""
        allocator = self.allocator
        pool = allocator.pool
        free = (
            pool.count_free_blocks(allocator.index)
            + pool.num_free_sectors * allocator.blocks_per_sector
        )
        cached = len(allocator.ledger.cached_blocks)
        return allocator.num_blocks - free - cached, cached, free

    # --- update ---

    def update_begins(self) -> None:
        """`update_batch` was entered: it is about the oldest open step."""
        self.updating = self.open.popleft() if self.open else None
        if self.updating is not None and self.updating.device is not None:
            self.updating.device.wait_begins()

    def tokens_known(self) -> None:
        """The step's token ids are on the host."""
        at = now()
        if self.updating is not None:
            self.updating.token = at
        self.finishing_at = at

    def update_ended(self) -> None:
        """`update_batch` returned: the step is over and is told."""
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
        self.count += 1
        used, cached, free, waiting, running = step.gauges
        begin = step.begin
        event = events.Step(
            begin,
            self.count,
            _offset(step.scheduled, begin),
            _offset(step.launched, begin),
            _offset(step.embed, begin),
            _offset(step.layers, begin),
            _offset(step.head, begin),
            _offset(step.logits, begin),
            _offset(step.sampled, begin),
            _offset(step.token, begin),
            end - begin,
            len(step.batch),
            tokens,
            pack_u32(step.joined),
            pack_u32(step.left),
            pack_u32(odd),
            pack_u32(blocks),
            pack_u32(runs),
            used,
            cached,
            free,
            waiting,
            running,
            self.preempted,
        )
        event.graph = self.graph
        if step.device is not None and self.device_clock is not None:
            self.device_clock.fill(step.device, event)
        self.emitter.emit(event)
        self.updating = None
        if end - self.last_roster >= ROSTER_PERIOD_NS:
            self.last_roster = end
            self.tell_roster(end, step.members)

    def _table_changed(
        self, tracked: Tracked, table: list[int], blocks: list[int], runs: list[int]
    ) -> None:
        """Note the block count and the part of the table that is new; a stale table is compared
        whole."""
        first = tracked.blocks
        if tracked.stale_table:
            old = tracked.table
            first = next(
                (i for i, block in enumerate(old) if i >= len(table) or table[i] != block), len(old)
            )
            tracked.stale_table = False
        if len(table) != tracked.blocks:
            blocks += (tracked.key, len(table))
        first = min(first, len(table))
        fresh = table[first:]
        if fresh:
            runs += (tracked.key, first, len(fresh), *fresh)
        tracked.blocks = len(table)
        tracked.table = table[:]

    def table_rewritten(self, rid: str) -> None:
        """Complete blocks were registered: identical ones may have been swapped inside the
        table."""
        tracked = self.live.get(rid)
        if tracked is not None:
            tracked.stale_table = True

    def tell_roster(self, at: int, members: set[int]) -> None:
        """Tell the absolute state of every request in the engine; `members` ran in the step that
        was told last."""
        rows: list[int] = []
        for tracked in self.live.values():
            rows += (
                tracked.key,
                max(0, tracked.computed),
                tracked.output,
                tracked.blocks,
                tracked.prompt,
                int(tracked.key in members),
            )
        self.emitter.emit(events.Roster(at, self.count, pack_u32(rows)))

    # --- ends ---

    def finish_begins(self, rid: str) -> tuple[Tracked, Any, int, int] | None:
        """`finish_request` was entered: (request, its state, cached, free blocks) before it gives
        its blocks back."""
        tracked = self.live.get(rid)
        if tracked is None or self.offloading:
            return None
        _, cached, free = self.block_counts()
        return tracked, tracked.state(), cached, free

    def finish_ended(self, token: tuple[Tracked, Any, int, int] | None, rid: str) -> None:
        """`finish_request` returned: the request is over and its blocks are back. What neither
        became free nor stayed cached is still held by a request that shares it."""
        if token is None:
            return
        tracked, state, cached_before, free_before = token
        _, cached, free = self.block_counts()
        reason, error = finish_reason(state)
        at = self.finishing_at if self.updating is not None else now()
        self._tell_end(
            state, tracked, reason, error, at, free - free_before, cached - cached_before
        )

    def cancel_begins(self) -> tuple[int, int] | None:
        """Cancelled requests are about to be cleared: (cached, free) blocks before, None when there
        are none."""
        if not self.scheduler._requests_to_cancel:
            return None
        _, cached, free = self.block_counts()
        return cached, free

    def cancelled(self, before: tuple[int, int] | None, states: list[Any]) -> None:
        """These requests were cancelled by their client. Blocks are known for one; for several at
        once they are not told apart."""
        if before is None:
            return
        _, cached, free = self.block_counts()
        alone = len(states) == 1
        for state in states:
            tracked = self.live.get(state.request_id)
            if tracked is not None:
                freed, kept = (free - before[1], cached - before[0]) if alone else (-1, -1)
                self._tell_end(state, tracked, "cancelled", "", now(), freed, kept)

    def failed(self, state: Any, error: BaseException) -> None:
        """The engine failed a request; `finish_request` may follow for it."""
        rid = state.request_id
        tracked = self.live.get(rid)
        if tracked is None or tracked.finishing:
            return
        held = len(self.allocator.block_table.get(rid, ()))
        tracked.finishing = True
        self.emitter.emit_lifecycle(
            events.Finished(
                now(),
                tracked.key,
                "failed",
                tracked.output,
                f"{type(error).__name__}: {error}"[:500],
            )
        )
        if rid not in self.scheduler.active_requests:
            self.emitter.emit_lifecycle(events.Released(now(), tracked.key, held, 0))
            self._drop(rid, tracked)

    def _tell_end(
        self, state: Any, tracked: Tracked, reason: str, error: str, at: int, freed: int, kept: int
    ) -> None:
        if not tracked.finishing:
            output = output_length(state)
            self.emitter.emit_lifecycle(
                events.Finished(
                    at, tracked.key, reason, output, error, tracked.prompt, tracked.cached
                )
            )
        self.emitter.emit_lifecycle(events.Released(now(), tracked.key, freed, kept))
        self._drop(state.request_id, tracked)

    def _drop(self, rid: str, tracked: Tracked) -> None:
        self.live.pop(rid, None)
        self.pending.discard(rid)
        self.ended[rid] = tracked
        self.emitter.drop(rid, ENGINE)

    # --- preemption and eviction ---

    def offload_begins(self) -> dict[str, tuple[int, int]]:
        """Requests may be taken out: (computed, output) tokens of each that could be."""
        self.offloading = True
        return {
            state.request_id: (state.position_offset, output_length(state))
            for state, _ in self.scheduler.starved_requests
        }

    def requeued(self, state: Any, before: dict[str, tuple[int, int]]) -> None:
        """Called for a request that goes back to the queue while requests are being taken out."""
        tracked = self.live.get(state.request_id)
        if tracked is None:
            return
        self.preempted += 1
        computed, output = before.get(state.request_id, (tracked.computed, tracked.output))
        kind = "offload" if state.is_cpu_offloaded else "recompute"
        tracked.computed = computed if kind == "offload" else 0
        tracked.blocks = 0
        tracked.table = []
        self.emitter.emit_lifecycle(
            events.Preempted(now(), tracked.key, kind, computed, output, self.preempted)
        )

    def cache_evicted(self, before: int) -> None:
        """Cached blocks may have been dropped; `before` how many there were."""
        gone = before - len(self.allocator.ledger.cached_blocks)
        if gone > 0:
            self.evicted += gone
            self.emitter.emit(events.Evicted(now(), gone, self.evicted))


def _offset(at: int, begin: int) -> int:
    return at - begin if at >= begin else -1


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

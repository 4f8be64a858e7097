"""Hooks for vLLM's engine core: stages 4, 5, 11 and 12, in whatever process the scheduler lives.

`CoreHooks.table` is the declared hook table; each row names the stages that fall away with it. The
scheduler's own thread calls all of them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final
from weakref import WeakSet

from engine_hooks.base.emitter import Emitter
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm import facts
from engine_hooks.vllm.steps import StepRecorder

_MARK: Final = "_tracer"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler."
_MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager."
_POOL: Final = "vllm.v1.core.block_pool:BlockPool."
_QUEUE: Final = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue."
_FINISH: Final = _SCHEDULER + "_free_request"
_RELEASE: Final = _SCHEDULER + "_free_blocks"
_ALLOCATE: Final = _MANAGER + "allocate_slots"

BOOT: Final = _SCHEDULER + "__init__"
"""Tells that this process is an engine core, and of which scheduler."""

_OUTPUT: Final = "vllm.v1.core.sched.output:"
FIELDS: Final = (
    Hook(
        _OUTPUT + "SchedulerOutput",
        (Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE),
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
        ),
    ),
    Hook(
        _OUTPUT + "NewRequestData",
        (Stage.KV_ALLOC,),
        ("req_id", "block_ids", "num_computed_tokens"),
    ),
    Hook(
        _OUTPUT + "CachedRequestData",
        (Stage.KV_ALLOC,),
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    Hook("vllm.v1.engine:EngineCoreOutput", (Stage.DECODE,), ("request_id", "new_token_ids")),
)
"""What travels between scheduler, workers and front end: classes and the fields of them that our
code reads."""


class CoreHooks:
    """The hooks of the engine core in this process. `on_engine` is called once a scheduler is
    there."""

    def __init__(self, voice: Emitter, patches: Patches, on_engine: Any) -> None:
        self.voice = voice
        self.patches = patches
        self._schedulers: WeakSet[Any] = WeakSet()
        self._on_engine = on_engine
        self._replaced = ""

    def table(self) -> list[Hook]:
        """The places, each with the stages that depend on it."""
        admission, kv, decode, teardown = (
            Stage.ADMISSION,
            Stage.KV_ALLOC,
            Stage.DECODE,
            Stage.TEARDOWN,
        )
        return [
            Hook(BOOT, (admission, kv, decode, teardown), ("vllm_config",), after=self._made),
            Hook(_SCHEDULER + "add_request", (admission,), ("request",), before=self._queue),
            Hook(
                _SCHEDULER + "schedule",
                (admission, kv, decode),
                (),
                before=self._schedule,
                after=self._scheduled,
                failed=self._schedule_failed,
            ),
            Hook(
                _SCHEDULER + "update_from_output",
                (decode,),
                ("scheduler_output", "model_runner_output"),
                before=self._update,
                after=self._updated,
                failed=self._update_failed,
            ),
            Hook(_SCHEDULER + "_preempt_request", (), ("request",), before=self._preempt),
            Hook(_FINISH, (teardown,), ("request",), before=self._finish),
            Hook(_RELEASE, (teardown,), ("request",), before=self._release, after=self._released),
            Hook(_MANAGER + "get_computed_blocks", (kv,), ("request",), before=self._lookup),
            Hook(_QUEUE + "append_n", (), ("blocks",), before=self._kept),
            Hook(_QUEUE + "remove", (), ("block",), before=self._taken),
            Hook(_POOL + "_maybe_evict_cached_block", (), ("block",), after=self._dropped),
            Hook(_POOL + "reset_prefix_cache", (), after=self._emptied),
            Hook("vllm.v1.engine.core:EngineCoreProc._send_engine_dead", (), before=self._died),
        ]

    def install(self) -> None:
        """Put every hook in whose place is as we know it."""
        for row in FIELDS:
            if reason := lacking_fields(row):
                self.patches.misses[row.path] = reason
        changed = self.patches.lost(FIELDS)
        for hook in self.table():
            if not changed.keys() & set(hook.stages):
                self.patches.put(hook)
        if Stage.DECODE in self.lost():
            # who tells the steps has to tell the ends, or they would not fit together
            for path in (_FINISH, _RELEASE):
                self.patches.take_out(path, "it lies inside a step, and steps are not told")

    def lost(self) -> dict[int, tuple[str, str]]:
        """Stage → (path, reason) for the core's stages that cannot be measured with this
        version."""
        return self.patches.lost([*self.table(), *FIELDS])

    def tell_coverage(self) -> None:
        """Say for each of the core's stages how it is measured, with the reason where it is not."""
        lost = self.lost()
        named = {
            Stage.ADMISSION: "AsyncLLM.add_request → Scheduler.add_request → .schedule",
            Stage.KV_ALLOC: "KVCacheManager.get_computed_blocks, .allocate_slots",
            Stage.DECODE: "Scheduler.schedule, .update_from_output",
            Stage.TEARDOWN: "Scheduler._free_request, ._free_blocks",
        }
        for stage, path in named.items():
            if stage in lost:
                self.voice.cover(stage, "unavailable", *lost[stage])
            elif self._replaced and stage is not Stage.TEARDOWN:
                self.voice.cover(stage, "unavailable", path, self._replaced)
            else:
                self.voice.cover(stage, "measured", path)

    def adopt(self, scheduler: Any) -> StepRecorder:
        """Follow `scheduler`, which may be running already."""
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            return recorder
        recorder = StepRecorder(self.voice, scheduler, graph=facts.graph_of(scheduler.vllm_config))
        pool = scheduler.kv_cache_manager.block_pool
        followed = (_QUEUE + "append_n", _QUEUE + "remove", _POOL + "_maybe_evict_cached_block")
        if any(path in self.patches.misses for path in followed):
            recorder.blocks.cached = -1
        for owner in (scheduler, scheduler.kv_cache_manager, pool, pool.free_block_queue):
            setattr(owner, _MARK, recorder)
        self._schedulers.add(scheduler)
        for name in ("schedule", "update_from_output"):
            wrapped = hasattr(getattr(type(scheduler), name), "__wrapped__")
            if not wrapped and _SCHEDULER + name not in self.patches.misses:
                self._replaced = f"the scheduler {type(scheduler).__name__} has its own {name}()"
        self.tell_coverage()
        self._on_engine(scheduler.vllm_config)
        self.voice.emit_lifecycle(facts.engine(scheduler))
        self.voice.status("ready")
        return recorder

    def remove(self) -> None:
        """Forget every scheduler. The hooks themselves go with the `Patches`."""
        for scheduler in list(self._schedulers):
            manager = scheduler.kv_cache_manager
            for owner in (
                scheduler,
                manager,
                manager.block_pool,
                manager.block_pool.free_block_queue,
            ):
                vars(owner).pop(_MARK, None)
            vars(manager).pop("allocate_slots", None)
        self._schedulers.clear()

    # --- life of the engine ---

    def _made(self, _token: Any, _result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        self.adopt(scheduler)

    def _died(self, *_args: Any, **_kwargs: Any) -> None:
        error = sys.exc_info()[1]
        reason = (
            f"{type(error).__name__}: {error}" if error is not None else "the engine core failed"
        )
        self.voice.status("dead", reason[:500])

    # --- a step, in the order of its calls ---

    def _queue(self, scheduler: Any, request: Any) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.queued(request)

    def _schedule(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.schedule_begins()
            if recorder.pending:
                self._time_allocations(recorder)
        return recorder

    def _time_allocations(self, recorder: StepRecorder) -> None:
        """Only while somebody waits is each allocation looked at: the other steps pay nothing for
        it."""
        manager, waiting = recorder.manager, recorder.pending
        original = type(manager).allocate_slots.__get__(manager)
        fault = self.patches.fault

        def timed(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in waiting:
                return original(request, *args, **kwargs)
            at = now()
            blocks = original(request, *args, **kwargs)
            try:
                recorder.allocated(request, at, blocks is not None)
            except Exception as error:
                fault(_ALLOCATE, error)
            return blocks

        manager.allocate_slots = timed

    def _scheduled(
        self, recorder: StepRecorder | None, output: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        if recorder is not None:
            vars(recorder.manager).pop("allocate_slots", None)
            recorder.scheduled(output)

    def _schedule_failed(self, recorder: StepRecorder | None, *_args: Any, **_kwargs: Any) -> None:
        if recorder is not None:
            vars(recorder.manager).pop("allocate_slots", None)

    def _lookup(self, manager: Any, request: Any) -> None:
        recorder: StepRecorder | None = vars(manager).get(_MARK)
        if recorder is not None:
            recorder.lookup(request, now())

    def _update(
        self, scheduler: Any, scheduler_output: Any, model_runner_output: Any
    ) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.update_begins(scheduler_output, model_runner_output)
        return recorder

    def _updated(
        self, recorder: StepRecorder | None, outputs: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        if recorder is None:
            return
        marks = recorder.update_ended(outputs)
        if marks is not None and marks.facts is not None and marks.facts != recorder.facts:
            recorder.facts = marks.facts
            self.voice.emit_lifecycle(facts.engine(recorder.scheduler, marks.facts))

    def _update_failed(self, recorder: StepRecorder | None, *_args: Any, **_kwargs: Any) -> None:
        if recorder is not None:
            recorder.update_failed()

    # --- ends, preemption, blocks ---

    def _preempt(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.preempt(request)

    def _finish(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.finish_begins(request)

    def _release(self, scheduler: Any, request: Any) -> tuple[int, int, int] | None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        return None if recorder is None else recorder.release_begins(request)

    def _released(
        self, before: tuple[int, int, int] | None, _result: Any, scheduler: Any, request: Any
    ) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.release_ended(before, request)

    def _kept(self, queue: Any, blocks: list[Any]) -> None:
        recorder: StepRecorder | None = vars(queue).get(_MARK)
        if recorder is not None and blocks:
            recorder.blocks.kept(blocks)

    def _taken(self, queue: Any, block: Any) -> None:
        recorder: StepRecorder | None = vars(queue).get(_MARK)
        if recorder is not None:
            recorder.blocks.taken(block)

    def _dropped(self, _token: Any, dropped: bool, pool: Any, block: Any) -> None:
        if dropped:
            recorder: StepRecorder | None = vars(pool).get(_MARK)
            if recorder is not None:
                recorder.blocks.dropped(block)

    def _emptied(self, _token: Any, emptied: bool, pool: Any) -> None:
        recorder: StepRecorder | None = vars(pool).get(_MARK)
        if recorder is not None and emptied:
            recorder.blocks.emptied()


def lacking_fields(row: Hook) -> str:
    """Why the class of `row` is not as we know it; empty when it is. `needs` are names of its
    fields."""
    module, _, name = row.path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return f"not found in this version: {error}"
    fields = {*getattr(cls, "__dataclass_fields__", ()), *getattr(cls, "__struct_fields__", ())}
    lacking = [need for need in row.needs if need not in fields]
    return f"its fields changed: {', '.join(lacking)} missing" if lacking else ""

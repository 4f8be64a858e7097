"""Hooks for vLLM's engine core: stages 4, 5, 11 and 12, in whatever process the scheduler lives.

`CoreHooks.table` is the declared hook table; each row names the stages that fall away with it. The
scheduler's own thread calls all of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final
from weakref import WeakSet

from engine_hooks.base.emitter import Emitter
from engine_hooks.base.patching import MARK, Hook, Patches, recorded
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm import facts
from engine_hooks.vllm.blocks import BlockGauge
from engine_hooks.vllm.roles import Roles, named
from engine_hooks.vllm.steps import StepRecorder

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler."
_MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager."
_POOL: Final = "vllm.v1.core.block_pool:BlockPool."
_QUEUE: Final = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue."
_FINISH: Final = _SCHEDULER + "_free_request"
_RELEASE: Final = _SCHEDULER + "_free_blocks"
_CACHED_BLOCKS: Final = (
    _QUEUE + "append_n",
    _QUEUE + "remove",
    _POOL + "_maybe_evict_cached_block",
)
"""The places by which the cached blocks of a pool are counted."""

_RUST: Final = "VLLM_USE_RUST_FRONTEND"
BOOT: Final = _SCHEDULER + "__init__"
"""Shows that this process is an engine core, and of which scheduler."""

_OUTPUT: Final = "vllm.v1.core.sched.output:"
FIELDS: Final = (
    Hook(_OUTPUT + "SchedulerOutput", (Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE),
         ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
          "total_num_scheduled_tokens")),
    Hook(_OUTPUT + "NewRequestData", (Stage.KV_ALLOC,),
         ("req_id", "block_ids", "num_computed_tokens")),
    Hook(_OUTPUT + "CachedRequestData", (Stage.KV_ALLOC,),
         ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens")),
    Hook("vllm.v1.engine:EngineCoreOutput", (Stage.DECODE,), ("request_id", "new_token_ids")),
)  # fmt: skip
"""What travels between scheduler, workers and front end: classes and the fields of them that our
code reads."""


class CoreHooks:
    """The hooks of the engine core in this process."""

    def __init__(self, emitter: Emitter, patches: Patches, roles: Roles) -> None:
        self.emitter = emitter
        self.patches = patches
        self.roles = roles
        self._schedulers: WeakSet[Any] = WeakSet()
        self._replaced = ""

    def table(self) -> list[Hook]:
        admission, kv, decode, end = Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE, Stage.TEARDOWN
        recorder, gauge = StepRecorder, BlockGauge
        append_n, remove, evict = _CACHED_BLOCKS
        return [
            Hook(BOOT, (admission, kv, decode, end), ("vllm_config",), after=self._made),
            recorded(_SCHEDULER + "add_request", (admission,), ("request",), recorder.queued),
            Hook(_SCHEDULER + "schedule", (admission, kv, decode), (),
                 self._schedule, self._scheduled, self._schedule_failed),
            recorded(_SCHEDULER + "update_from_output", (decode,),
                     ("scheduler_output", "model_runner_output"), recorder.update_begins,
                     recorder.update_ended, recorder.update_failed),
            recorded(_SCHEDULER + "_preempt_request", (), ("request",), recorder.preempt),
            recorded(_FINISH, (end,), ("request",), recorder.finish),
            recorded(_RELEASE, (end,), ("request",),
                     recorder.release_begins, recorder.release_ended),
            recorded(_MANAGER + "get_computed_blocks", (kv,), ("request",), recorder.lookup),
            recorded(append_n, (), ("blocks",), gauge.kept),
            recorded(remove, (), ("block",), gauge.reused),
            recorded(evict, (), ("block",), after=gauge.evict),
            recorded(_POOL + "reset_prefix_cache", after=gauge.reset),
            Hook("vllm.v1.engine.core:EngineCoreProc._send_engine_dead", before=self._died),
        ]  # fmt: skip

    def install(self) -> None:
        for row in FIELDS:
            if reason := lacking_fields(row):
                self.patches.misses[row.path] = reason
        changed = self.patches.lost(FIELDS)
        self.patches.install(*(row for row in self.table() if not changed.keys() & set(row.stages)))
        if Stage.DECODE in self.lost():
            # steps and ends come from one place, or they would not fit together
            for path in (_FINISH, _RELEASE):
                self.patches.remove_one(path, "it lies inside a step, and steps are not traced")
        if BOOT in self.patches.misses and named("EngineCore"):
            self.roles.play("core")
            self.report_coverage()

    def lost(self) -> dict[int, tuple[str, str]]:
        """Stage → (path, reason) for the core's stages that cannot be measured here."""
        return self.patches.lost([*self.table(), *FIELDS])

    def report_coverage(self) -> None:
        """Emit how each of the core's stages is measured, or why not."""
        paths = {
            Stage.ADMISSION: "AsyncLLM.add_request → Scheduler.add_request → .schedule",
            Stage.KV_ALLOC: "KVCacheManager.get_computed_blocks, .allocate_slots",
            Stage.DECODE: "Scheduler.schedule, .update_from_output",
            Stage.TEARDOWN: "Scheduler._free_request, ._free_blocks",
        }
        replaced = (Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE) if self._replaced else ()
        self.emitter.cover_all(paths, self.lost(), dict.fromkeys(replaced, self._replaced))

    def adopt(self, scheduler: Any) -> None:
        """Follow `scheduler`, which may be running already."""
        if MARK in vars(scheduler):
            return
        graph = facts.graph_of(scheduler.vllm_config)
        recorder = StepRecorder(self.emitter, scheduler, graph=graph)
        if any(path in self.patches.misses for path in _CACHED_BLOCKS):
            recorder.blocks.cached = -1
        manager, pool, queue = _parts(scheduler)
        for owner in (scheduler, manager):
            setattr(owner, MARK, recorder)
        for owner in (pool, queue):
            setattr(owner, MARK, recorder.blocks)
        self._schedulers.add(scheduler)
        for name in ("schedule", "update_from_output"):
            wrapped = hasattr(getattr(type(scheduler), name), "__wrapped__")
            if not wrapped and _SCHEDULER + name not in self.patches.misses:
                self._replaced = f"the scheduler {type(scheduler).__name__} has its own {name}()"
        self.report_coverage()
        self.roles.play("core")
        if os.environ.get(_RUST) == "1":
            for stage in (Stage.RECEIVE, Stage.TEMPLATE, Stage.TOKENISE, Stage.STREAM):
                why = f"{_RUST}=1: the front end is not Python"
                self.emitter.cover(stage, "unavailable", "", why)
        self.emitter.emit_lifecycle(facts.engine(scheduler))
        self.emitter.status("ready")

    def remove(self) -> None:
        """Forget every scheduler. The hooks themselves go with the `Patches`."""
        for scheduler in list(self._schedulers):
            for owner in (scheduler, *_parts(scheduler)):
                vars(owner).pop(MARK, None)
            vars(scheduler.kv_cache_manager).pop("allocate_slots", None)
        self._schedulers.clear()

    # --- life of the engine ---

    def _made(self, _token: Any, _result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        self.adopt(scheduler)

    def _died(self, *_: Any, **__: Any) -> None:
        error = sys.exc_info()[1]
        known = "the engine core failed" if error is None else f"{type(error).__name__}: {error}"
        self.emitter.status("dead", known)

    # --- scheduling ---

    def _schedule(self, scheduler: Any, *_: Any, **__: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(scheduler).get(MARK)
        if recorder is not None:
            recorder.schedule_begins()
            if recorder.pending:
                self._time_allocations(recorder)
        return recorder

    def _time_allocations(self, recorder: StepRecorder) -> None:
        """Time each allocation while somebody waits: the other steps pay nothing for it."""
        manager, waiting = recorder.manager, recorder.pending
        original = type(manager).allocate_slots.__get__(manager)
        guarded = self.patches.guarded

        def timed(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in waiting:
                return original(request, *args, **kwargs)
            at = now()
            blocks = original(request, *args, **kwargs)
            guarded(
                _MANAGER + "allocate_slots", recorder.allocated, request, at, blocks is not None
            )
            return blocks

        manager.allocate_slots = timed

    def _scheduled(self, recorder: StepRecorder | None, output: Any, *_: Any, **__: Any) -> None:
        if recorder is not None:
            vars(recorder.manager).pop("allocate_slots", None)
            recorder.scheduled(output)

    def _schedule_failed(self, recorder: StepRecorder | None, *_: Any, **__: Any) -> None:
        if recorder is not None:
            vars(recorder.manager).pop("allocate_slots", None)


def _parts(scheduler: Any) -> tuple[Any, Any, Any]:
    """The scheduler's KV cache manager, its block pool, and the pool's queue of free blocks."""
    manager = scheduler.kv_cache_manager
    return manager, manager.block_pool, manager.block_pool.free_block_queue


def lacking_fields(row: Hook) -> str:
    """Return why the class of `row` lacks fields that it `needs`; empty when it has all."""
    module, _, name = row.path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return f"not found in this version: {error}"
    fields = {*getattr(cls, "__dataclass_fields__", ()), *getattr(cls, "__struct_fields__", ())}
    lacking = [need for need in row.needs if need not in fields]
    return f"its fields changed: {', '.join(lacking)} missing" if lacking else ""

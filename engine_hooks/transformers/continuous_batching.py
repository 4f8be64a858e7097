"""Hooks for transformers' continuous batching: the engine's half (stages 4-9, 11, 12).

`TESTED` are the versions that the tests ran on. Outside them the hooks go in all the same as far as
their signatures hold, with a warning on screen. The front end's half (stages 1-3, 10) is in
`serve`.
"""

from __future__ import annotations

import threading
from importlib import metadata
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from engine_hooks.base.device_timer import DeviceClock, EventPool, cuda_event_pool
from engine_hooks.base.emitter import ENGINE, Emitter, emitter
from engine_hooks.base.module_marks import ModuleMarks
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.base.prompt_text import IDS_KEPT
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.transformers import facts
from engine_hooks.transformers.steps import StepRecorder

TESTED: Final = ("5.23", "5.24")

_CB: Final = "transformers.generation.continuous_batching."
_SAMPLE: Final = _CB + "model_runner:ModelRunner._sample"
_COMPILED: Final = "torch.compile: hooks inside the compiled pass would break it"
_MARK: Final = "_tracer"
_MARKED: Final = (
    "scheduler",
    "cache",
    "offloading_manager",
    "model_runner",
    "inputs_and_outputs",
    "output_router",
)


class EngineHooks:
    """The hooks of the engine's half in this process."""

    def __init__(self, voice: Emitter) -> None:
        self.voice = voice
        self.patches = Patches(voice.fault)
        self.marks: WeakKeyDictionary[Any, ModuleMarks] = WeakKeyDictionary()
        """Model → the marks on its modules."""
        self.pool: EventPool | None = None
        self._pool_asked = False
        self._processors: WeakSet[Any] = WeakSet()
        self._serving = False
        self._offload_state: dict[str, tuple[int, int]] = {}

    # --- in and out ---

    def install(self) -> None:
        """Put every hook in whose place is as we know it, and tell the coverage."""
        self.voice.start("engine", "transformers")
        for hook in self.table():
            self.patches.put(hook)
        self.tell_coverage(graph=0)

    def remove(self) -> None:
        """Take every hook out: the engine is as before."""
        self.patches.remove()
        for marks in self.marks.values():
            marks.remove()
        self.marks.clear()
        for processor in list(self._processors):
            for owner in (processor, *(getattr(processor, name, None) for name in _MARKED)):
                if owner is not None:
                    vars(owner).pop(_MARK, None)
            vars(processor.cache).pop("can_store_request_tokens", None)
        self._processors.clear()

    def table(self) -> list[Hook]:
        """The places, each with the stages that depend on it."""
        admission, kv, decode, sample = Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE, Stage.SAMPLE
        manager = _CB + "continuous_api:ContinuousBatchingManager."
        processor = _CB + "continuous_api:ContinuousBatchProcessor."
        scheduler = _CB + "scheduler:Scheduler."
        cache = _CB + "cache:PagedAttentionCache."
        rows = [
            Hook(
                manager + "add_request",
                (admission,),
                ("input_ids", "request_id"),
                before=self._add_begins,
                after=self._add_ended,
            ),
            Hook(manager + "_create_batch_processor", (), after=self._created),
            Hook(manager + "_handle_critical_error", (), ("error",), before=self._died),
            Hook(manager + "_run_generation_loop", (), after=self._loop_ended),
            Hook(
                processor + "prepare_next_batch",
                (decode, kv),
                before=self._prepare,
                after=self._prepared,
            ),
            Hook(
                processor + "update_batch",
                (decode, sample),
                before=self._update,
                after=self._updated,
                failed=self._update_failed,
            ),
            Hook(scheduler + "add_waiting_request", (admission,), ("state",), before=self._waiting),
            Hook(
                scheduler + "_process_candidates",
                (kv, admission),
                ("candidates",),
                before=self._candidates,
                after=self._chosen,
                failed=self._candidates_failed,
            ),
            Hook(
                scheduler + "finish_request",
                (Stage.TEARDOWN,),
                ("request_id",),
                before=self._finish,
                after=self._finish_ended,
            ),
            Hook(
                scheduler + "clear_cancelled_requests",
                (Stage.TEARDOWN,),
                before=self._cancel,
                after=self._cancelled,
            ),
            Hook(
                cache + "search_prefix_match",
                (kv,),
                ("request_id",),
                before=_stamp,
                after=self._looked_up,
            ),
            Hook(cache + "evict_cached_blocks", (), before=self._evict, after=self._evicted),
            Hook(
                _CB + "cache_allocators.cache_allocator:CacheAllocator.mark_complete_blocks",
                (),
                ("request_id",),
                after=self._completed,
            ),
            Hook(
                _CB + "offloading_manager:OffloadingManager.offload_requests",
                (),
                before=self._offload,
                after=self._offloaded,
                failed=self._offload_failed,
            ),
            Hook(
                _CB + "model_runner:ModelRunner.compute_batch",
                (Stage.PREFILL, decode),
                ("model", "batch_data"),
                before=self._launch,
                after=self._launched,
                failed=self._launch_failed,
            ),
            Hook(_SAMPLE, (sample,), ("scores",), after=self._sampled),
            Hook(
                _CB + "continuous_api:OutputRouter.fail_and_deliver",
                (),
                ("state", "error"),
                before=self._failed,
            ),
            Hook(
                _CB + "continuous_api:OutputRouter.deliver_batch",
                (Stage.STREAM,),
                ("outputs",),
                after=self._delivered,
            ),
        ]
        for ios in ("ContinuousBatchingIOs", "ContinuousBatchingAsyncIOs"):
            path = f"{_CB}input_outputs:{ios}.prepare_batch_update"
            rows.append(Hook(path, (sample,), after=self._tokens_known))
        return rows

    def tell_coverage(self, *, graph: int) -> None:
        """Say for each of the engine's stages how it is measured, with the reason where it is
        not."""
        lost: dict[int, tuple[str, str]] = {}
        for hook in self.table():
            if reason := self.patches.misses.get(hook.path):
                for stage in hook.stages:
                    lost[stage] = (hook.path, reason)
        why = {1: "CUDA graph: module hooks do not run when it is replayed", 2: _COMPILED}.get(
            graph, ""
        )
        parts = {Stage.EMBED: "embed", Stage.PREFILL: "layers", Stage.LM_HEAD: "logits"}
        missing = next(iter(self.marks.values())).missing if self.marks else {}
        named = {
            Stage.ADMISSION: (
                "ContinuousBatchingManager.add_request → Scheduler._process_candidates"
            ),
            Stage.KV_ALLOC: "PagedAttentionCache.search_prefix_match, .can_store_request_tokens",
            Stage.EMBED: "get_input_embeddings() → first layer",
            Stage.PREFILL: "first layer → last layer",
            Stage.LM_HEAD: "last layer → get_output_embeddings()",
            Stage.SAMPLE: "ModelRunner._sample → prepare_batch_update",
            Stage.DECODE: "ContinuousBatchProcessor.prepare_next_batch, .update_batch",
            Stage.TEARDOWN: "Scheduler.finish_request, .clear_cancelled_requests",
        }
        for stage, path in named.items():
            if stage in lost:
                self.voice.cover(stage, "unavailable", *lost[stage])
            elif why and stage in (Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE):
                self.voice.cover(stage, "unavailable", path, why)
            elif why and stage is Stage.PREFILL:
                self.voice.cover(
                    stage,
                    "measured",
                    "ModelRunner.compute_batch",
                    f"one span, head included: {why}",
                )
            elif stage in parts and parts[stage] in missing:
                self.voice.cover(stage, "unavailable", path, missing[parts[stage]])
            else:
                self.voice.cover(stage, "measured", path)
        if not self._serving:
            given = "token ids are handed to the engine: this happens before it, in the caller"
            self.voice.cover(Stage.RECEIVE, "measured", "ContinuousBatchingManager.add_request")
            self.voice.cover(Stage.TEMPLATE, "unavailable", "", given)
            self.voice.cover(Stage.TOKENISE, "unavailable", "", given)
            self.voice.cover(Stage.STREAM, "measured", "OutputRouter.deliver_batch")

    def adopt(self, target: Any) -> None:
        """A model or manager that may be running already: tell its facts without waiting for a new
        batch processor."""
        manager = getattr(target, "_cached_continuous_batching_manager", target)
        if getattr(manager, "batch_processor", None) is not None:
            self._created(None, manager.batch_processor, manager)

    def serving(self) -> None:
        """A server covers the front end's stages from now on."""
        self._serving = True

    # --- who records what ---

    def recorder(self, processor: Any) -> StepRecorder:
        """The recorder of a batch processor, made when it is first seen."""
        recorder: StepRecorder | None = vars(processor).get(_MARK)
        if recorder is None:
            recorder = StepRecorder(self.voice, processor, driver=processor.input_queue is not None)
            for owner in (processor, *(getattr(processor, name) for name in _MARKED)):
                setattr(owner, _MARK, recorder)
            self._processors.add(processor)
        return recorder

    # --- the caller's side ---

    def _add_begins(self, _manager: Any, *args: Any, **kwargs: Any) -> tuple[int, str | None]:
        rid = kwargs.get("request_id", args[1] if len(args) > 1 else None)
        at = now()
        if not isinstance(rid, str) or not self.voice.held(rid):
            return at, None
        # From here on the engine has it: a client that hangs up before the queue is read does not
        # make it another one.
        self.voice.hold(rid, ENGINE)
        return at, rid

    def _add_ended(
        self, token: tuple[int, str | None] | None, rid: Any, *args: Any, **kwargs: Any
    ) -> None:
        if token is not None and token[1] is not None and rid is None:
            self.voice.drop(token[1], ENGINE)  # the engine takes no more
        if token is None or token[1] is not None or not isinstance(rid, str):
            return
        at, ended = token[0], now()
        ids = kwargs.get("input_ids", args[1] if len(args) > 1 else ())
        key = self.voice.key(rid)
        emit = self.voice.emit_lifecycle
        emit(
            events.Received(
                at, key, rid, "add_request", "", "", int(bool(kwargs.get("streaming", False))), True
            )
        )
        emit(events.End(ended, key, Stage.RECEIVE, 4 * len(ids)))
        emit(events.Begin(ended, key, Stage.ADMISSION))
        emit(events.Prompt(ended, key, "", -1, events.pack_u32(ids[:IDS_KEPT]), len(ids)))

    def _delivered(self, _token: Any, _result: Any, router: Any, outputs: list[Any]) -> None:
        recorder: StepRecorder | None = vars(router).get(_MARK)
        if recorder is None:
            return
        for output in outputs:
            rid = output.request_id
            tracked = recorder.live.get(rid) or recorder.ended.get(rid)
            if tracked is not None and not tracked.handed_out and not self.voice.held(rid):
                tracked.handed_out = True
                self.voice.emit_lifecycle(events.End(now(), tracked.key, Stage.STREAM))

    # --- life of the engine ---

    def _created(self, _token: Any, processor: Any, manager: Any) -> None:
        recorder = self.recorder(processor)
        self.voice.emit_lifecycle(facts.engine(manager.model, processor, TESTED))
        if recorder.graph == 0:
            self._marks(manager.model)
        elif recorder.graph == 2:
            # The compiler would trace our wrapper, clock and all, into the engine's graph.
            self.patches.take_out(_SAMPLE, _COMPILED)
        self.tell_coverage(graph=recorder.graph)
        self.voice.status("ready")

    def _marks(self, model: Any) -> ModuleMarks:
        marks = self.marks.get(model)
        if marks is None:
            marks = self.marks[model] = ModuleMarks(model, self.patches.fault)
        return marks

    def _died(self, _manager: Any, error: BaseException, *_args: Any, **_kwargs: Any) -> None:
        self.voice.status("dead", f"{type(error).__name__}: {error}"[:500])

    def _loop_ended(
        self, _token: Any, _result: Any, manager: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        if manager.background_thread_status.fatal_error is None:
            self.voice.status("stopped")

    # --- a step, in the order of its calls ---

    def _prepare(self, processor: Any) -> int:
        return self.recorder(processor).prepare_begins()

    def _prepared(self, begin: int | None, found: bool, processor: Any) -> None:
        if begin is not None:
            self.recorder(processor).prepared(begin, found)

    def _waiting(self, scheduler: Any, state: Any) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None and recorder.driver:
            if recorder.offloading:
                recorder.requeued(state, self._offload_state)
            recorder.queued(state)

    def _candidates(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None and recorder.pending:
            # Only while somebody waits is each allocation timed: the other steps pay nothing for
            # it.
            cache = scheduler.cache
            original = type(cache).can_store_request_tokens.__get__(cache)

            def timed(state: Any, request_len: int, dry_run: bool = False) -> bool:
                at = now()
                fits: bool = original(state, request_len, dry_run)
                if not dry_run:
                    try:
                        recorder.allocated(state.request_id, at, fits)
                    except Exception as error:
                        self.patches.fault(
                            _CB + "cache:PagedAttentionCache.can_store_request_tokens", error
                        )
                return fits

            cache.can_store_request_tokens = timed
        return recorder

    def _chosen(
        self, recorder: StepRecorder | None, result: Any, scheduler: Any, *_args: Any, **_kw: Any
    ) -> None:
        vars(scheduler.cache).pop("can_store_request_tokens", None)
        if recorder is not None:
            recorder.batch_chosen(result[0])

    def _candidates_failed(
        self, _token: Any, _error: BaseException, scheduler: Any, *_args: Any, **_kw: Any
    ) -> None:
        vars(scheduler.cache).pop("can_store_request_tokens", None)

    def _looked_up(
        self, at: int | None, matched: int, cache: Any, request_id: str, *_args: Any, **_kw: Any
    ) -> None:
        recorder: StepRecorder | None = vars(cache).get(_MARK)
        if recorder is not None and at is not None:
            recorder.lookup(request_id, at, matched)

    def _launch(self, runner: Any, model: Any, *_args: Any, **_kwargs: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(runner).get(_MARK)
        if recorder is None or recorder.current is None:
            return None  # a warm-up
        step = recorder.current
        step.launched = now()
        stream = runner.inputs_and_outputs.compute_stream
        if stream is not None:
            pool = self._event_pool()
            if pool is not None:
                if recorder.device_clock is None:
                    recorder.device_clock = DeviceClock(pool)
                step.device = recorder.device_clock.timer(stream)
                step.device.mark("start")
        if recorder.graph == 0:
            self._marks(model).enter(step)
        return recorder

    def _event_pool(self) -> EventPool | None:
        if not self._pool_asked:
            self._pool_asked = True
            self.pool = cuda_event_pool()
        return self.pool

    def _sampled(self, _token: Any, _result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder: StepRecorder | None = vars(runner).get(_MARK)
        if recorder is not None and recorder.current is not None and recorder.graph == 0:
            recorder.current.sampled = now()
            if recorder.current.device is not None:
                recorder.current.device.mark("sampled")

    def _launched(self, recorder: StepRecorder | None, _result: Any, _runner: Any, model: Any,
                  *_args: Any, **_kwargs: Any) -> None:  # fmt: skip
        if recorder is None or recorder.current is None:
            return
        step = recorder.current
        if step.device is not None:
            step.device.mark("finish")
        if recorder.graph == 0:
            self._marks(model).leave()
        else:
            step.sampled = now()
        recorder.current = None

    def _launch_failed(
        self,
        recorder: StepRecorder | None,
        _error: BaseException,
        _runner: Any,
        model: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        if recorder is not None and recorder.graph == 0:
            self._marks(model).leave()

    def _update(self, processor: Any) -> StepRecorder:
        recorder = self.recorder(processor)
        recorder.update_begins()
        return recorder

    def _tokens_known(self, _token: Any, _result: Any, ios: Any) -> None:
        recorder: StepRecorder | None = vars(ios).get(_MARK)
        if recorder is not None:
            recorder.tokens_known()

    def _updated(self, recorder: StepRecorder | None, _result: Any, _processor: Any) -> None:
        if recorder is not None:
            recorder.update_ended()

    def _update_failed(
        self, recorder: StepRecorder | None, _error: BaseException, _processor: Any
    ) -> None:
        if recorder is not None:
            recorder.updating = None

    # --- ends, preemption, eviction ---

    def _finish(self, scheduler: Any, request_id: str) -> Any:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        return None if recorder is None else recorder.finish_begins(request_id)

    def _finish_ended(self, token: Any, _result: Any, scheduler: Any, request_id: str) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.finish_ended(token, request_id)

    def _cancel(self, scheduler: Any) -> Any:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        return None if recorder is None else recorder.cancel_begins()

    def _cancelled(self, token: Any, states: list[Any], scheduler: Any) -> None:
        recorder: StepRecorder | None = vars(scheduler).get(_MARK)
        if recorder is not None:
            recorder.cancelled(token, states)

    def _failed(self, router: Any, state: Any, error: BaseException) -> None:
        recorder: StepRecorder | None = vars(router).get(_MARK)
        if recorder is not None:
            recorder.failed(state, error)

    def _completed(
        self, _token: Any, _result: Any, allocator: Any, request_id: str, *_args: Any, **_kw: Any
    ) -> None:
        for processor in list(self._processors):
            recorder: StepRecorder = vars(processor)[_MARK]
            if recorder.allocator is allocator:
                recorder.table_rewritten(request_id)

    def _evict(self, cache: Any) -> int:
        recorder: StepRecorder | None = vars(cache).get(_MARK)
        return 0 if recorder is None else len(recorder.allocator.ledger.cached_blocks)

    def _evicted(self, before: int | None, _result: Any, cache: Any) -> None:
        recorder: StepRecorder | None = vars(cache).get(_MARK)
        if recorder is not None and before:
            recorder.cache_evicted(before)

    def _offload(self, manager: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(manager).get(_MARK)
        if recorder is not None:
            self._offload_state = recorder.offload_begins()
        return recorder

    def _offloaded(self, recorder: StepRecorder | None, _result: Any, _manager: Any) -> None:
        if recorder is not None:
            recorder.offloading = False

    def _offload_failed(
        self, recorder: StepRecorder | None, _error: BaseException, _manager: Any
    ) -> None:
        if recorder is not None:
            recorder.offloading = False


def _stamp(*_args: Any, **_kwargs: Any) -> int:
    return now()


_hooks: EngineHooks | None = None
_lock = threading.RLock()  # putting hooks in imports the engine, which may ask for them again


def install_engine() -> EngineHooks:
    """Put the engine's hooks into this process, once."""
    global _hooks
    with _lock:
        if _hooks is None:
            _hooks = EngineHooks(emitter())  # before the next line, which may come back here
            _hooks.install()
        return _hooks


def remove_engine() -> None:
    """Take the engine's hooks out again."""
    global _hooks
    with _lock:
        if _hooks is not None:
            _hooks.remove()
            _hooks.voice.stop()
            _hooks = None


def version() -> str:
    """Version of the installed transformers."""
    return metadata.version("transformers")

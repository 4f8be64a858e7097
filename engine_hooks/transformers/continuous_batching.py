"""Hooks for transformers' continuous batching: the engine's half (stages 4-9, 11, 12).

`TESTED` are the versions that the tests ran on. Outside them the hooks are installed all the same
as far as their signatures hold, with a warning on screen. The front end's half (stages 1-3, 10) is
in `serve`.
"""

from __future__ import annotations

import threading
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from engine_hooks.base.device_timer import DeviceClock, cuda_event_pool
from engine_hooks.base.emitter import ENGINE, Emitter, emitter
from engine_hooks.base.module_marks import ModuleMarks
from engine_hooks.base.patching import MARK, Hook, Patches, recorded, stamp
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.transformers import facts
from engine_hooks.transformers.steps import StepRecorder

TESTED: Final = ("5.23", "5.24")

_CB: Final = "transformers.generation.continuous_batching."
_SAMPLE: Final = _CB + "model_runner:ModelRunner._sample"
_STORE: Final = "can_store_request_tokens"
_COMPILED: Final = "torch.compile: hooks inside the compiled pass would break it"
_GRAPH: Final = "CUDA graph: module hooks do not run when it is replayed"
_MARKED: Final = (
    "scheduler",
    "cache",
    "offloading_manager",
    "model_runner",
    "inputs_and_outputs",
    "output_router",
)
"""Attributes of a batch processor whose objects carry its recorder."""


class EngineHooks:
    """The hooks of the engine's half in this process."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.patches = Patches(emitter.fault)
        self.marks: WeakKeyDictionary[Any, ModuleMarks] = WeakKeyDictionary()
        """Model → the marks on its modules."""
        self._processors: WeakSet[Any] = WeakSet()
        self._serving = False

    # --- installing ---

    def install(self) -> None:
        self.emitter.start("engine", "transformers")
        self.patches.install(*self.table())
        self.report_coverage(graph=0)

    def remove(self) -> None:
        self.patches.remove()
        for marks in self.marks.values():
            marks.remove()
        self.marks.clear()
        for processor in list(self._processors):
            for owner in _owners(processor):
                vars(owner).pop(MARK, None)
            vars(processor.cache).pop(_STORE, None)
        self._processors.clear()

    def table(self) -> list[Hook]:
        admission, kv, decode, sample = Stage.ADMISSION, Stage.KV_ALLOC, Stage.DECODE, Stage.SAMPLE
        end, recorder = (Stage.TEARDOWN,), StepRecorder
        manager = _CB + "continuous_api:ContinuousBatchingManager."
        processor = _CB + "continuous_api:ContinuousBatchProcessor."
        router = _CB + "continuous_api:OutputRouter."
        scheduler = _CB + "scheduler:Scheduler."
        cache = _CB + "cache:PagedAttentionCache."
        completed = _CB + "cache_allocators.cache_allocator:CacheAllocator.mark_complete_blocks"
        offload = _CB + "offloading_manager:OffloadingManager.offload_requests"
        rows = [
            Hook(manager + "add_request", (admission,), ("input_ids", "request_id"),
                 self._add_begins, self._add_ended),
            Hook(manager + "_create_batch_processor", after=self._created),
            Hook(manager + "_handle_critical_error", (), ("error",), self._died),
            Hook(manager + "_run_generation_loop", after=self._loop_ended),
            Hook(processor + "prepare_next_batch", (decode, kv), (), self._prepare, self._prepared),
            recorded(processor + "update_batch", (decode, sample), (), recorder.update_begins,
                     recorder.update_ended, recorder.update_failed),
            recorded(scheduler + "add_waiting_request", (admission,), ("state",), recorder.queued),
            Hook(scheduler + "_process_candidates", (kv, admission), ("candidates",),
                 self._candidates, self._chosen, self._candidates_failed),
            recorded(scheduler + "finish_request", end, ("request_id",),
                     recorder.finish_begins, recorder.finish_ended),
            recorded(scheduler + "clear_cancelled_requests", end, (),
                     recorder.cancel_begins, recorder.cancelled),
            recorded(cache + "search_prefix_match", (kv,), ("request_id",),
                     stamp, recorder.looked_up),
            recorded(cache + "evict_cached_blocks", (), (),
                     recorder.evict_begins, recorder.evict_ended),
            recorded(completed, (), ("request_id",), after=recorder.table_rewritten),
            recorded(offload, (), (), recorder.offload_begins, recorder.offload_ended,
                     recorder.offload_ended),
            Hook(_CB + "model_runner:ModelRunner.compute_batch", (Stage.PREFILL, decode),
                 ("model", "batch_data"), self._launch, self._launched, self._launch_failed),
            Hook(_SAMPLE, (sample,), ("scores",), after=self._sampled),
            recorded(router + "fail_and_deliver", (), ("state", "error"), recorder.failed),
            recorded(router + "deliver_batch", (Stage.STREAM,), ("outputs",),
                     after=recorder.delivered),
        ]  # fmt: skip
        for ios in ("ContinuousBatchingIOs", "ContinuousBatchingAsyncIOs"):
            path = f"{_CB}input_outputs:{ios}.prepare_batch_update"
            rows.append(recorded(path, (sample,), after=recorder.tokens_known))
        return rows

    def report_coverage(self, *, graph: int) -> None:
        """Emit for each of the engine's stages how it is measured, with the reason where it is
        not. `graph` as in `events.Step`."""
        lost = self.patches.lost(self.table())
        paths = {
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
        missing = next(iter(self.marks.values())).missing if self.marks else {}
        parts = {Stage.EMBED: "embed", Stage.PREFILL: "layers", Stage.LM_HEAD: "logits"}
        reasons = {stage: missing[part] for stage, part in parts.items() if part in missing}
        if graph:
            why = _COMPILED if graph == 2 else _GRAPH
            reasons = dict.fromkeys((Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE), why)
            if Stage.PREFILL not in lost:
                del paths[Stage.PREFILL]
                whole = f"one span, head included: {why}"
                self.emitter.cover(Stage.PREFILL, "measured", "ModelRunner.compute_batch", whole)
        self.emitter.cover_all(paths, lost, reasons)
        if not self._serving:
            given = "token ids are handed to the engine: this happens before it, in the caller"
            received = "ContinuousBatchingManager.add_request"
            self.emitter.cover_all(
                {Stage.RECEIVE: received, Stage.TEMPLATE: "", Stage.TOKENISE: "",
                 Stage.STREAM: "OutputRouter.deliver_batch"},
                {}, dict.fromkeys((Stage.TEMPLATE, Stage.TOKENISE), given),
            )  # fmt: skip

    def adopt(self, target: Any) -> None:
        """Emit the facts of a model or manager that may be running already."""
        manager = getattr(target, "_cached_continuous_batching_manager", target)
        if getattr(manager, "batch_processor", None) is not None:
            self._created(None, manager.batch_processor, manager)

    def serving(self) -> None:
        """Leave the front end's stages to a server from now on."""
        self._serving = True

    def recorder(self, processor: Any) -> StepRecorder:
        """Return the recorder of a batch processor, made when the processor is first seen."""
        recorder: StepRecorder | None = vars(processor).get(MARK)
        if recorder is None:
            driver = processor.input_queue is not None
            recorder = StepRecorder(self.emitter, processor, driver=driver)
            for owner in _owners(processor):
                setattr(owner, MARK, recorder)
            self._processors.add(processor)
        return recorder

    # --- the caller's side ---

    def _add_begins(self, _manager: Any, *args: Any, **kwargs: Any) -> tuple[int, str | None]:
        rid = kwargs.get("request_id", args[1] if len(args) > 1 else None)
        at = now()
        if not isinstance(rid, str) or not self.emitter.held(rid):
            return at, None
        # From here on the engine has it: a client that hangs up before the queue is read does not
        # make it another one.
        self.emitter.hold(rid, ENGINE)
        return at, rid

    def _add_ended(
        self, token: tuple[int, str | None] | None, rid: Any, *args: Any, **kwargs: Any
    ) -> None:
        if token is not None and token[1] is not None and rid is None:
            self.emitter.drop(token[1], ENGINE)  # the engine takes no more
        if token is None or token[1] is not None or not isinstance(rid, str):
            return
        at, ended = token[0], now()
        ids = kwargs.get("input_ids", args[1] if len(args) > 1 else ())
        streaming = int(bool(kwargs.get("streaming", False)))
        key, emit = self.emitter.key(rid), self.emitter.emit_lifecycle
        emit(events.Received(at, key, rid, "add_request", streaming=streaming, offline=True))
        emit(events.End(ended, key, Stage.RECEIVE, 4 * len(ids)))
        emit(events.Begin(ended, key, Stage.ADMISSION))
        self.emitter.prompt(ended, key, "", ids)

    # --- life of the engine ---

    def _created(self, _token: Any, processor: Any, manager: Any) -> None:
        recorder = self.recorder(processor)
        self.emitter.emit_lifecycle(facts.engine(manager.model, processor, TESTED))
        if recorder.graph == 0:
            self._marks(manager.model)
        elif recorder.graph == 2:
            # The compiler would trace our wrapper, clock and all, into the engine's graph.
            self.patches.remove_one(_SAMPLE, _COMPILED)
        self.report_coverage(graph=recorder.graph)
        self.emitter.status("ready")

    def _marks(self, model: Any) -> ModuleMarks:
        marks = self.marks.get(model)
        if marks is None:
            marks = self.marks[model] = ModuleMarks(model, self.patches.fault)
        return marks

    def _died(self, _manager: Any, error: BaseException, *_: Any, **__: Any) -> None:
        self.emitter.status("dead", f"{type(error).__name__}: {error}")

    def _loop_ended(self, _token: Any, _result: Any, manager: Any, *_: Any, **__: Any) -> None:
        if manager.background_thread_status.fatal_error is None:
            self.emitter.status("stopped")

    # --- a step, in the order of its calls ---

    def _prepare(self, processor: Any) -> int:
        return self.recorder(processor).prepare_begins()

    def _prepared(self, begin: int | None, found: bool, processor: Any) -> None:
        self.recorder(processor).prepared(begin, found)

    def _candidates(self, scheduler: Any, *_: Any, **__: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(scheduler).get(MARK)
        if recorder is not None and recorder.pending:
            # Each allocation is timed only while somebody waits: the other steps pay nothing.
            cache = scheduler.cache
            original = type(cache).can_store_request_tokens.__get__(cache)

            def timed(state: Any, request_len: int, dry_run: bool = False) -> bool:
                at = now()
                fits: bool = original(state, request_len, dry_run)
                if not dry_run:
                    path = f"{_CB}cache:PagedAttentionCache.{_STORE}"
                    self.patches.guarded(path, recorder.allocated, state.request_id, at, fits)
                return fits

            cache.can_store_request_tokens = timed
        return recorder

    def _chosen(
        self, recorder: StepRecorder | None, result: Any, scheduler: Any, *_: Any, **__: Any
    ) -> None:
        vars(scheduler.cache).pop(_STORE, None)
        if recorder is not None:
            recorder.batch_chosen(result[0])

    def _candidates_failed(
        self, _token: Any, _error: BaseException, scheduler: Any, *_: Any, **__: Any
    ) -> None:
        vars(scheduler.cache).pop(_STORE, None)

    def _launch(self, runner: Any, model: Any, *_: Any, **__: Any) -> StepRecorder | None:
        recorder: StepRecorder | None = vars(runner).get(MARK)
        if recorder is None or recorder.current is None:
            return None  # a warm-up
        step = recorder.current
        step.event.launched = now() - step.event.t
        stream = runner.inputs_and_outputs.compute_stream
        pool = None if stream is None else cuda_event_pool()
        if pool is not None:
            if recorder.device_clock is None:
                recorder.device_clock = DeviceClock(pool)
            step.device = recorder.device_clock.timer(stream)
            step.device.mark("start")
        if recorder.graph == 0:
            step.marks = self._marks(model)
            step.marks.enter(step)
        return recorder

    def _sampled(self, _token: Any, _result: Any, runner: Any, *_: Any, **__: Any) -> None:
        recorder: StepRecorder | None = vars(runner).get(MARK)
        step = None if recorder is None or recorder.graph else recorder.current
        if step is not None:
            step.event.sampled = now() - step.event.t
            if step.device is not None:
                step.device.mark("sampled")

    def _launched(self, recorder: StepRecorder | None, *_: Any, **__: Any) -> None:
        step = None if recorder is None else recorder.current
        if recorder is None or step is None:
            return
        recorder.current = None
        if step.device is not None:
            step.device.mark("finish")
        if step.marks is not None:
            step.marks.leave()
        else:
            step.event.sampled = now() - step.event.t

    def _launch_failed(self, recorder: StepRecorder | None, *_: Any, **__: Any) -> None:
        step = None if recorder is None else recorder.current
        if step is not None and step.marks is not None:
            step.marks.leave()


def _owners(processor: Any) -> list[Any]:
    """The engine's objects that carry the recorder of a batch processor."""
    owners = [getattr(processor, name, None) for name in _MARKED]
    allocator = next(iter(processor.cache.cache_allocators.values()))
    return [owner for owner in (processor, allocator, *owners) if owner is not None]


_hooks: EngineHooks | None = None
_lock = threading.RLock()  # installing hooks imports the engine, which may ask for them again


def install_engine() -> EngineHooks:
    global _hooks
    with _lock:
        if _hooks is None:
            _hooks = EngineHooks(emitter())  # before the next line, which may come back here
            _hooks.install()
        return _hooks


def remove_engine() -> None:
    global _hooks
    with _lock:
        if _hooks is not None:
            _hooks.remove()
            _hooks.emitter.stop()
            _hooks = None

"""Hooks for vLLM's workers: the pass itself (stages 6 to 9), for both of its model runners.

`RUNNERS` names the runner classes and the hooks that each needs. Runner V1 builds its inputs, runs
the model and computes the logits in `execute_model` and samples in `sample_tokens`; runner V2
computes the logits inside `sample`. Module hooks give the embedding on an eager model only: inside
a compiled one a Python clock would break the compiler.

Nothing is emitted here per step: the marks of a pass travel with its output (`marks`). On an
accelerator the marks are device times, taken where the engine itself waited for the tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from engine_hooks.base.device_timer import DeviceClock, cuda_event_pool
from engine_hooks.base.emitter import Emitter
from engine_hooks.base.module_marks import decoder_layers
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm import facts
from engine_hooks.vllm.marks import TAG, Marks
from engine_hooks.vllm.roles import Roles, named

BOOT: Final = "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config"
"""Shows that this process runs a model; its model is loaded and nothing was served yet."""
_DEVICE: Final = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
_LOADED: Final = "vllm.model_executor.model_loader.base_loader:process_weights_after_loading"

V1: Final = "vllm.v1.worker.gpu_model_runner"
V2: Final = "vllm.v1.worker.gpu.model_runner"
_V2_OUTPUT: Final = "vllm.v1.worker.gpu.async_utils:"

_COMPILED: Final = (
    "torch.compile: hooks inside the compiled pass would break it; it is a part of stage 7 here"
)
_GRAPH: Final = (
    "CUDA graph: module hooks do not run when it is replayed; it is a part of stage 7 here"
)
_STAGES: Final = (Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE)


class WorkerHooks:
    """The hooks on the model runner of this process."""

    def __init__(self, emitter: Emitter, patches: Patches, roles: Roles) -> None:
        self.emitter = emitter
        self.patches = patches
        self.roles = roles
        self.current: Marks | None = None
        """The pass that is running."""
        self._runner: Callable[[], Any] | None = None
        """Weak reference to the model runner, None before there is one."""
        self._kind = ""
        self._thread = 0
        self._models: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        """Model → handles of the hooks on its modules."""
        self._missing: dict[Stage, str] = {}
        self._graph = 0
        self._facts: tuple[Any, ...] | None = None
        self._weights = (-1, -1)
        self._clock: DeviceClock | None = None

    def table(self, kind: str) -> list[Hook]:
        prefill, head, sample = Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE
        runner = f"{kind}:GPUModelRunner."
        rows = [
            Hook(runner + "execute_model", (prefill, head, sample), ("scheduler_output",),
                 self._begin, self._launched, self._failed),
            Hook(runner + "sample_tokens", (sample,), after=self._done, failed=self._failed),
        ]  # fmt: skip
        awaited, arrived = self._awaited, self._arrived
        if kind == V1:
            return [
                *rows,
                Hook(runner + "_model_forward", (prefill,), (), self._forward, self._forwarded),
                Hook(runner + "_sample", (sample,), ("logits",), after=self._sampled),
                Hook(runner + "_bookkeeping_sync", (sample,), (), self._copying, self._copied),
                Hook(f"{V1}:AsyncGPUModelRunnerOutput.get_output", (), (), awaited, arrived),
            ]
        return [
            *rows,
            Hook(_V2_OUTPUT + "StepTimingCollector.forward_start", (prefill,), (), self._forward),
            Hook(runner + "sample", (sample,), after=self._sampled),
            Hook(_V2_OUTPUT + "AsyncOutput.get_output", (sample,), (), awaited, arrived),
            Hook(_V2_OUTPUT + "AsyncPoolingOutput.get_output", (), (), awaited, arrived),
        ]

    def boot(self) -> list[Hook]:
        return [Hook(BOOT, _STAGES, after=self._initialised),
                Hook(_DEVICE, after=self._before_loading)]  # fmt: skip

    def install(self) -> None:
        """Install the hooks that show a worker; without them the process's name shows it."""
        self.patches.install(*self.boot())
        if named("VllmWorker") and self.patches.lost(self.boot()):
            self.roles.play("worker")
            self.report_coverage()

    def loading(self) -> Hook:
        """The place where weights are read and not packed away yet, in a module of workers."""
        return Hook(_LOADED, (), ("model",), before=self._loaded)

    def adopt(self, worker: Any) -> None:
        """Install the hooks on the runner of `worker` (a vLLM worker with its model loaded)."""
        runner = getattr(worker, "model_runner", None)
        if runner is None or (self._runner is not None and runner is self._runner()):
            return
        self._runner = ref(runner)
        self._kind = next(
            (cls.__module__ for cls in type(runner).__mro__ if cls.__module__ in (V1, V2)), ""
        )
        config = worker.vllm_config
        self._graph = facts.graph_of(config)
        self.roles.play("worker", getattr(worker, "rank", -1))
        if self._kind:
            self.patches.install(*self.table(self._kind))
            self._model(runner.get_model(), runner)
            pool = cuda_event_pool() if config.device_config.device_type == "cuda" else None
            self._clock = DeviceClock(pool) if pool is not None else None
        self.report_coverage()

    def remove(self) -> None:
        """Remove the hooks on the model. Those on the runner go with the `Patches`."""
        for model, handles in list(self._models.items()):
            vars(model).pop("compute_logits", None)
            for handle in handles:
                handle.remove()
        self._models.clear()
        self._runner = None
        self.current = None

    def report_coverage(self) -> None:
        """Emit for each stage of the pass how it is measured, with the reason where it is not."""
        hooks = self.table(self._kind) if self._kind else []
        lost = self.patches.lost([*self.boot(), *hooks])
        runner = None if self._runner is None else self._runner()
        if runner is not None and not self._kind:
            name = type(runner).__name__
            unknown = f"the model runner {name} is not known"
            lost = dict.fromkeys(_STAGES, (f"{type(runner).__module__}.{name}", unknown))
        second = self._kind == V2
        paths = {
            Stage.EMBED: "VocabParallelEmbedding → first layer",
            Stage.PREFILL: "first layer → compute_logits",
            Stage.LM_HEAD: "model.compute_logits",
            Stage.SAMPLE: f"GPUModelRunner.{'sample' if second else '_sample'} → get_output",
        }
        reasons = self._missing
        if self._graph:
            reasons = {**reasons, Stage.EMBED: _COMPILED if self._graph == 2 else _GRAPH}
            if Stage.PREFILL not in lost:
                del paths[Stage.PREFILL]
                collector = "StepTimingCollector.forward_start"
                forward = collector if second else "GPUModelRunner._model_forward"
                path, note = f"{forward} → compute_logits", "the embedding is inside"
                self.emitter.cover(Stage.PREFILL, "measured", path, note)
        self.emitter.cover_all(paths, lost, reasons)

    # --- the model ---

    def _before_loading(self, *_: Any, **__: Any) -> None:
        self._weights = (-1, -1)
        self.patches.install(self.loading())

    def _loaded(self, model: Any, *_: Any, **__: Any) -> None:
        # Counted before the CPU packs its weights away; a draft model comes second and is smaller.
        self._weights = max(self._weights, weights_of(model))

    def _initialised(self, _token: Any, _result: Any, wrapper: Any, *_: Any, **__: Any) -> None:
        self.adopt(wrapper.worker)

    def _model(self, model: Any, runner: Any) -> None:
        self._head(model)
        if self._graph == 0:
            self._modules(model)
        import torch

        first = next(iter(model.parameters()), None)
        on_cpu = first is not None and first.device.type == "cpu"
        groups = getattr(runner, "attn_groups", None) or [[]]
        attention = groups[0][0].backend.get_name() if groups[0] else ""
        self._facts = (
            *(self._weights if self._weights[0] > 0 or on_cpu else weights_of(model)),
            torch.get_num_threads() if on_cpu else -1,
            "cpu" if on_cpu else torch.cuda.get_device_name(),
            str(attention),
        )

    def _head(self, model: Any) -> None:
        original = getattr(model, "compute_logits", None)
        if original is None:
            self._missing[Stage.LM_HEAD] = "the model computes no logits"
            return
        if getattr(original, "__self__", None) is model:
            original = _unbound(original)

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            # Only the first call of a pass: prompt logprobs make more of them.
            marks = self.current
            if marks is None or marks.step.logits >= 0:
                return original(*args, **kwargs)
            if marks.step.head < 0:
                self._mark(marks, "head")
            logits = original(*args, **kwargs)
            self._mark(marks, "logits")
            return logits

        model.compute_logits = compute_logits
        self._models.setdefault(model, [])

    def _modules(self, model: Any) -> None:
        embedding = _first(model.modules(), lambda name: name == "VocabParallelEmbedding")
        first = _first(decoder_layers(model) or (), lambda name: name != "PPMissingLayer")
        if embedding is None or first is None:
            what = "embedding was" if embedding is None else "layers were"
            self._missing[Stage.EMBED] = f"its {what} not found"
            return
        self._models.setdefault(model, []).extend(
            module.register_forward_pre_hook(self._stamping(part))
            for module, part in ((embedding, "embed"), (first, "layers"))
        )

    def _stamping(self, part: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any) -> None:
            marks = self.current
            if marks is not None and threading.get_ident() == self._thread:
                self._mark(marks, part)

        return hook

    def _mark(self, marks: Marks, part: str) -> None:
        try:
            marks.stamp(part)
        except Exception as error:
            self.patches.fault(f"worker:{part}", error)

    # --- a pass, in the order of its calls ---

    def _begin(self, _runner: Any, scheduler_output: Any, *_: Any, **__: Any) -> None:
        self.current = None
        tag = getattr(scheduler_output, TAG, None)
        if tag is None:
            return  # a warm-up, or no step
        marks = Marks(*tag)
        if self._clock is not None:
            import torch

            marks.device = self._clock.timer(torch.cuda.current_stream())
        self._thread = threading.get_ident()
        self.current = marks

    def _forward(self, *_: Any, **__: Any) -> None:
        marks = self.current
        if marks is not None:
            marks.step.launched = now() - marks.step.t
            if marks.device is not None:
                marks.device.mark("start")
            if self._graph:
                marks.stamp("layers")

    def _forwarded(self, *_: Any, **__: Any) -> None:
        if self.current is not None:
            self.current.stamp("head")

    def _launched(self, _token: Any, result: Any, *_: Any, **__: Any) -> None:
        if result is not None:
            self._done(None, result)  # a pooling model, or a pipeline stage that samples nothing

    def _sampled(self, *_: Any, **__: Any) -> None:
        marks = self.current
        if marks is not None:
            marks.stamp("sampled")
            if marks.device is not None:
                marks.device.mark("finish")

    def _copying(self, *_: Any, **__: Any) -> None:
        if self.current is not None and self.current.device is not None:
            self.current.device.wait_begins()

    def _copied(self, *_: Any, **__: Any) -> None:
        if self.current is not None:
            self.current.step.token = now() - self.current.step.t

    def _done(self, _token: Any, result: Any, *_: Any, **__: Any) -> None:
        marks, self.current = self.current, None
        if marks is None or result is None:
            return
        if hasattr(result, "get_output"):
            setattr(result, TAG, marks)  # its tokens are still on the device
        elif getattr(result, "req_ids", None):
            self._attach(marks, result)

    def _failed(self, *_: Any, **__: Any) -> None:
        self.current = None

    def _awaited(self, output: Any) -> int:
        marks = vars(output).get(TAG)
        if marks is not None and marks.device is not None:
            marks.device.wait_begins()
        return now()

    def _arrived(self, since: int | None, result: Any, output: Any) -> None:
        marks = vars(output).pop(TAG, None)
        if marks is not None:
            at = now()
            marks.step.token = at - marks.step.t
            if marks.device is not None and since is not None:
                marks.step.wait = at - since
            self._attach(marks, result)

    def _attach(self, marks: Marks, output: Any) -> None:
        step = marks.step
        if step.token < 0:
            step.token = now() - step.t
        if marks.device is not None and self._clock is not None:
            # launch times become device times, now that the tokens are there and so is every event
            # before them
            self._clock.fill(marks.device, step)
        marks.facts, self._facts = self._facts, None
        setattr(output, TAG, marks.pack())


def _first(modules: Iterable[Any], wanted: Callable[[str], bool]) -> Any:
    return next((module for module in modules if wanted(type(module).__name__)), None)


def _unbound(method: Any) -> Callable[..., Any]:
    """Return the method without holding its object: an object that holds a method of its own lives
    until garbage is collected."""
    function, alive = method.__func__, ref(method.__self__)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(alive(), *args, **kwargs)

    return call


def weights_of(model: Any) -> tuple[int, int]:
    """(weights, their bytes) of a module; shared weights count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)

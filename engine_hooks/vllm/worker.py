"""Hooks for vLLM's workers: the pass itself (stages 6 to 9), for both of its model runners.

`RUNNERS` names the runner classes and the hooks that each needs. Runner V1 builds its inputs, runs
the model and computes the logits in `execute_model` and samples in `sample_tokens`; runner V2
computes the logits inside `sample`. Module hooks give the embedding on an eager model only: inside
a compiled one a Python clock would break the compiler.

Nothing is emitted here per step: the marks of a pass travel with its output (`marks`). On an
accelerator they are device times, taken where the engine itself waited for the tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from engine_hooks.base.device_timer import DeviceClock, cuda_event_pool
from engine_hooks.base.emitter import Emitter
from engine_hooks.base.module_marks import decoder_layers
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm import facts
from engine_hooks.vllm.marks import TAG, Marks

BOOT: Final = "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config"
"""Tells that this process runs a model; its model is loaded and nothing was served yet."""
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


class WorkerHooks:
    """The hooks on the model runner of this process. `on_worker` is called once there is one."""

    def __init__(self, voice: Emitter, patches: Patches, on_worker: Callable[[Any], None]) -> None:
        self.voice = voice
        self.patches = patches
        self.current: Marks | None = None
        """The pass that is running."""
        self._on_worker = on_worker
        self._runner: Callable[[], Any] | None = None
        """Weak reference to the model runner, None before there is one."""
        self._kind = ""
        self._thread = 0
        self._models: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        """Model → handles of the hooks on its modules."""
        self._missing: dict[str, str] = {}
        self._graph = 0
        self._facts: tuple[Any, ...] | None = None
        self._weights = (-1, -1)
        self._clock: DeviceClock | None = None

    def table(self, kind: str) -> list[Hook]:
        """The places of one kind of runner, each with the stages that depend on it."""
        prefill, head, sample = Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE
        runner = f"{kind}:GPUModelRunner."
        rows = [
            Hook(runner + "execute_model", (prefill, head, sample), ("scheduler_output",),
                 before=self._begin, after=self._launched, failed=self._failed),
            Hook(runner + "sample_tokens", (sample,), (), after=self._done, failed=self._failed),
        ]  # fmt: skip
        if kind == V1:
            return [
                *rows,
                Hook(
                    runner + "_model_forward",
                    (prefill,),
                    (),
                    before=self._forward,
                    after=self._forwarded,
                ),
                Hook(runner + "_sample", (sample,), ("logits",), after=self._sampled),
                Hook(
                    runner + "_bookkeeping_sync",
                    (sample,),
                    (),
                    before=self._copying,
                    after=self._copied,
                ),
                Hook(
                    f"{V1}:AsyncGPUModelRunnerOutput.get_output",
                    (),
                    before=self._awaited,
                    after=self._arrived,
                ),
            ]
        return [
            *rows,
            Hook(
                _V2_OUTPUT + "StepTimingCollector.forward_start",
                (prefill,),
                (),
                before=self._forward,
            ),
            Hook(runner + "sample", (sample,), (), after=self._sampled),
            Hook(
                _V2_OUTPUT + "AsyncOutput.get_output",
                (sample,),
                (),
                before=self._awaited,
                after=self._arrived,
            ),
            Hook(
                _V2_OUTPUT + "AsyncPoolingOutput.get_output",
                (),
                (),
                before=self._awaited,
                after=self._arrived,
            ),
        ]

    def boot(self) -> list[Hook]:
        """The places that say when a worker is there."""
        stages = (Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE)
        return [
            Hook(BOOT, stages, (), after=self._initialised),
            Hook(_DEVICE, (), (), after=self._before_loading),
        ]

    def loading(self) -> Hook:
        """The place where the weights are read and not packed away yet; only a worker has its
        module."""
        return Hook(_LOADED, (), ("model",), before=self._loaded)

    def adopt(self, worker: Any) -> None:
        """Put the hooks on the runner of `worker` (a vLLM worker with its model loaded)."""
        runner = getattr(worker, "model_runner", None)
        if runner is None or (self._runner is not None and runner is self._runner()):
            return
        self._runner = ref(runner)
        self._kind = next(
            (cls.__module__ for cls in type(runner).__mro__ if cls.__module__ in (V1, V2)), ""
        )
        config = worker.vllm_config
        self._graph = facts.graph_of(config)
        self._on_worker(worker)
        if self._kind:
            for hook in self.table(self._kind):
                self.patches.put(hook)
            self._model(runner.get_model(), runner)
            pool = cuda_event_pool() if config.device_config.device_type == "cuda" else None
            self._clock = DeviceClock(pool) if pool is not None else None
        self.tell_coverage()

    def remove(self) -> None:
        """Take the hooks on the model out. Those on the runner go with the `Patches`."""
        for model, handles in list(self._models.items()):
            vars(model).pop("compute_logits", None)
            for handle in handles:
                handle.remove()
        self._models.clear()
        self._runner = None
        self.current = None

    def tell_coverage(self) -> None:
        """Say for each stage of the pass how it is measured, with the reason where it is not."""
        hooks = self.table(self._kind) if self._kind else []
        lost = self.patches.lost([*self.boot(), *hooks])
        runner = None if self._runner is None else self._runner()
        if runner is not None and not self._kind:
            name = f"{type(runner).__module__}.{type(runner).__name__}"
            lost = dict.fromkeys(
                (6, 7, 8, 9), (name, f"the model runner {type(runner).__name__} is not known")
            )
        forward = (
            "StepTimingCollector.forward_start"
            if self._kind == V2
            else "GPUModelRunner._model_forward"
        )
        sampler = "sample" if self._kind == V2 else "_sample"
        named = {
            Stage.EMBED: "VocabParallelEmbedding → first layer",
            Stage.PREFILL: "first layer → compute_logits",
            Stage.LM_HEAD: "model.compute_logits",
            Stage.SAMPLE: f"GPUModelRunner.{sampler} → get_output",
        }
        why = {1: _GRAPH, 2: _COMPILED}.get(self._graph, "")
        parts = {Stage.EMBED: "embed", Stage.LM_HEAD: "logits"}
        for stage, path in named.items():
            if stage in lost:
                self.voice.cover(stage, "unavailable", *lost[stage])
            elif why and stage is Stage.EMBED:
                self.voice.cover(stage, "unavailable", path, why)
            elif why and stage is Stage.PREFILL:
                self.voice.cover(
                    stage, "measured", f"{forward} → compute_logits", "the embedding is inside"
                )
            elif parts.get(stage) in self._missing:
                self.voice.cover(stage, "unavailable", path, self._missing[parts[stage]])
            else:
                self.voice.cover(stage, "measured", path)

    # --- the model ---

    def _before_loading(self, *_args: Any, **_kwargs: Any) -> None:
        self._weights = (-1, -1)
        self.patches.put(self.loading())

    def _loaded(self, model: Any, *_args: Any, **_kwargs: Any) -> None:
        # Counted before the CPU packs its weights away; a draft model comes second and is smaller.
        self._weights = max(self._weights, weights_of(model))

    def _initialised(
        self, _token: Any, _result: Any, wrapper: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        self.adopt(wrapper.worker)

    def _model(self, model: Any, runner: Any) -> None:
        """Hooks on the loaded model itself, and what is to be known of it."""
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
            self._missing["logits"] = "the model computes no logits"
            return
        if getattr(original, "__self__", None) is model:
            original = _unbound(original)

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            # Only the first call of a pass: prompt logprobs make more of them.
            marks = self.current
            if marks is None or marks.logits:
                return original(*args, **kwargs)
            if not marks.head:
                self._mark(marks, "head")
            logits = original(*args, **kwargs)
            self._mark(marks, "logits")
            return logits

        model.compute_logits = compute_logits
        self._models.setdefault(model, [])

    def _modules(self, model: Any) -> None:
        embedding = next(
            (m for m in model.modules() if type(m).__name__ == "VocabParallelEmbedding"), None
        )
        layers = decoder_layers(model)
        first = (
            None
            if layers is None
            else next((m for m in layers if type(m).__name__ != "PPMissingLayer"), None)
        )
        if embedding is None or first is None:
            self._missing["embed"] = (
                "its embedding was not found" if embedding is None else "its layers were not found"
            )
            return
        for module, part in ((embedding, "embed"), (first, "layers")):
            self._models.setdefault(model, []).append(
                module.register_forward_pre_hook(self._pre(part))
            )

    def _pre(self, part: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any) -> None:
            marks = self.current
            if marks is not None and threading.get_ident() == self._thread:
                self._mark(marks, part)

        return hook

    def _mark(self, marks: Marks, part: str) -> None:
        try:
            setattr(marks, part, now())
            if marks.device is not None:
                marks.device.mark(part)
        except Exception as error:
            self.patches.fault(f"worker:{part}", error)

    # --- a pass, in the order of its calls ---

    def _begin(self, _runner: Any, scheduler_output: Any, *_args: Any, **_kwargs: Any) -> None:
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

    def _forward(self, *_args: Any, **_kwargs: Any) -> None:
        marks = self.current
        if marks is not None:
            marks.launched = now()
            if marks.device is not None:
                marks.device.mark("start")
            if self._graph:
                self._mark(marks, "layers")

    def _forwarded(self, *_args: Any, **_kwargs: Any) -> None:
        if self.current is not None:
            self._mark(self.current, "head")

    def _launched(self, _token: Any, result: Any, *_args: Any, **_kwargs: Any) -> None:
        if result is not None:
            self._done(None, result)  # a pooling model, or a pipeline stage that samples nothing

    def _sampled(self, *_args: Any, **_kwargs: Any) -> None:
        marks = self.current
        if marks is not None:
            self._mark(marks, "sampled")
            if marks.device is not None:
                marks.device.mark("finish")

    def _copying(self, *_args: Any, **_kwargs: Any) -> None:
        if self.current is not None and self.current.device is not None:
            self.current.device.wait_begins()

    def _copied(self, *_args: Any, **_kwargs: Any) -> None:
        if self.current is not None:
            self.current.token = now()

    def _done(self, _token: Any, result: Any, *_args: Any, **_kwargs: Any) -> None:
        marks, self.current = self.current, None
        if marks is None or result is None:
            return
        if hasattr(result, "get_output"):
            setattr(result, TAG, marks)  # its tokens are still on the device
        elif getattr(result, "req_ids", None):
            self._attach(marks, result)

    def _failed(self, *_args: Any, **_kwargs: Any) -> None:
        self.current = None

    def _awaited(self, output: Any) -> int:
        marks = vars(output).get(TAG)
        if marks is not None and marks.device is not None:
            marks.device.wait_begins()
        return now()

    def _arrived(self, since: int | None, result: Any, output: Any) -> None:
        marks = vars(output).pop(TAG, None)
        if marks is not None:
            marks.token = now()
            if marks.device is not None and since is not None:
                marks.wait = marks.token - since
            self._attach(marks, result)

    def _attach(self, marks: Marks, output: Any) -> None:
        if not marks.token:
            marks.token = now()
        if marks.device is not None and self._clock is not None:
            self._device_times(marks, self._clock)
        marks.facts, self._facts = self._facts, None
        setattr(output, TAG, marks.pack())

    def _device_times(self, marks: Marks, clock: DeviceClock) -> None:
        """Replace launch times by device times, now that the tokens are there and so is every event
        before them."""
        step = events.Step(marks.begin, marks.n)
        waited = marks.wait
        marks.fill(step)
        step.token = marks.token - marks.begin
        clock.fill(marks.device, step)
        for part in ("embed", "layers", "head", "logits", "sampled"):
            offset = getattr(step, part)
            setattr(marks, part, marks.begin + offset if offset >= 0 else 0)
        marks.timing = step.timing
        marks.wait = waited if waited >= 0 else step.wait


def _unbound(method: Any) -> Callable[..., Any]:
    """The same method, without holding its object: an object that holds a method of its own lives
    until garbage is collected."""
    function, alive = method.__func__, ref(method.__self__)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(alive(), *args, **kwargs)

    return call


def weights_of(model: Any) -> tuple[int, int]:
    """(weights, their bytes) of a module; shared ones count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)

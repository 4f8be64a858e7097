"""The SGLang adapter, on that engine's own hook registry (``sglang.srt.plugins``). **Not run
against a live server**: its kernels need a GPU; the places are those of its source (0.5.15).

Inert unless ``TRACER=1``. SGLang loads it in each of its processes; the hooks of a process's role
are the ones that get called there. Steps are whole: their parts lie inside CUDA graphs. For a
server that cannot load plugins, `tracer.export.imports.spans` reads the spans that it writes
itself.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from engine_hooks.base.emitter import ENGINE, FRONT, Emitter, emitter
from engine_hooks.base.patching import Hook, Patches, stamp
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage

_SCHEDULER: Final = "sglang.srt.managers.scheduler:Scheduler."
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager:TokenizerManager."
_GENERATE: Final = _TOKENIZER + "generate_request"
_LABEL: Final = "not run against a live SGLang server"
OPEN_ROOM: Final = 64
"""Batches that may be under way: the engine overlaps two; what is beyond never came back."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A chosen batch without a result yet. `requests`: (request, key, tokens that it runs)."""

    step: events.Step
    requests: list[tuple[Any, int, int]]


class SglangHooks:
    """The hooks of this process."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.patches = Patches(emitter.fault)
        self.open: deque[OpenBatch] = deque()
        self.members: set[int] = set()
        self.waiting: dict[str, bool] = {}
        """Requests that were queued and not scheduled yet → true for retracted ones."""
        self.count = 0
        self.preempted = 0
        self.front: dict[str, int] = {}

    def table(self) -> list[Hook]:
        admission, prefill, decode = Stage.ADMISSION, Stage.PREFILL, Stage.DECODE
        return [
            Hook(_GENERATE, (Stage.RECEIVE, Stage.STREAM), ("obj",)),
            Hook(_TOKENIZER + "_tokenize_one_request", (Stage.TOKENISE,), ("obj",),
                 stamp, self._tokenised, is_async=True),
            Hook(_SCHEDULER + "_add_request_to_queue", (admission,), ("req",), self._queued),
            Hook(_SCHEDULER + "get_next_batch_to_run", (admission, prefill, decode), (),
                 stamp, self._chosen),
            Hook(_SCHEDULER + "run_batch", (), ("batch",), self._launch),
            Hook(_SCHEDULER + "process_batch_result", (prefill, decode, Stage.TEARDOWN),
                 ("batch", "result"), self._result, self._ended),
        ]  # fmt: skip

    def install(self, registry: Any, around: Any) -> None:
        """Register every hook whose place is as we know it with the engine's `registry`; `around`
        is its hook type."""
        for hook in self.table():
            if self.patches.resolve(hook) is not None:
                ours = self._generate if hook.path == _GENERATE else self._around(hook)
                registry.register(hook.path.replace(":", "."), ours, around)

    def _around(self, hook: Hook) -> Callable[..., Any]:
        """Return a hook as the registry calls it: with the engine's function first."""
        wrap = functools.cache(functools.partial(self.patches.wrap, hook))
        return lambda original, *args, **kwargs: wrap(original)(*args, **kwargs)

    def report_coverage(self, *stages: int) -> None:
        """Emit how `stages` are measured in this process."""
        lost = self.patches.lost(self.table())
        held = {stage: hook.path for hook in self.table() for stage in hook.stages}
        for stage in map(Stage, stages):
            if stage in lost:
                self.emitter.cover(stage, "unavailable", *lost[stage])
            elif stage in held:
                self.emitter.cover(stage, "measured", held[stage], _LABEL)
            else:
                graph = "SGLang runs it inside a CUDA graph"
                self.emitter.cover(stage, "unavailable", "", graph)

    # --- the tokeniser's process ---

    async def _generate(
        self, original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        key, handed = 0, False
        if not self.patches.disabled(_GENERATE):
            key = self.patches.guarded(_GENERATE, self._received, obj)
        try:
            async for output in original(manager, obj, *args, **kwargs):
                yield output
                if key and not handed:
                    handed = True
                    self.emitter.emit_lifecycle(events.End(now(), key, Stage.STREAM))
        finally:
            if key:
                self.emitter.emit_lifecycle(events.Closed(now(), key))
                self.front.pop(obj.rid, None)
                self.emitter.drop(obj.rid, FRONT)

    def _received(self, obj: Any) -> int:
        """Return the key of a single request, 0 for a list: the scheduler sees its parts."""
        at = now()
        if not isinstance(getattr(obj, "rid", None), str):
            return 0
        self.emitter.start("api", "SGLang api")
        self.report_coverage(1, 3, 10)
        key = self.front[obj.rid] = self.emitter.hold(obj.rid, FRONT)
        streaming = int(bool(getattr(obj, "stream", False)))
        received = events.Received(at, key, obj.rid, "sglang", streaming=streaming)
        self.emitter.emit_lifecycle(received)
        return key

    def _tokenised(
        self, begin: int, result: Any, _manager: Any, obj: Any, *_: Any, **__: Any
    ) -> None:
        key = self.front.get(obj.rid) if isinstance(getattr(obj, "rid", None), str) else None
        if key is None:
            return
        at, ids = now(), list(getattr(result, "input_ids", None) or ())
        emit = self.emitter.emit_lifecycle
        emit(events.End(begin, key, Stage.RECEIVE))
        emit(events.Begin(begin, key, Stage.TOKENISE))
        emit(events.End(at, key, Stage.TOKENISE, len(ids)))
        emit(events.Begin(at, key, Stage.ADMISSION))
        self.emitter.prompt(at, key, "", ids)

    # --- the scheduler's process ---

    def _queued(self, _scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        retracted = bool(kwargs.get("is_retracted", args[0] if args else False))
        self.emitter.start("core", "SGLang scheduler")
        self.report_coverage(4, 5, 6, 7, 8, 9, 11, 12)
        key = self.emitter.hold(req.rid, ENGINE)
        self.waiting[req.rid] = retracted
        event: events.Event
        if retracted:
            self.preempted += 1
            event = events.Preempted(now(), key, "recompute", total=self.preempted)
            event.generated = len(req.output_ids)
        else:
            limit = getattr(req.sampling_params, "max_new_tokens", None)
            event = events.Queued(now(), key, req.rid, len(req.origin_input_ids))
            event.max_tokens = limit if isinstance(limit, int) else -1
        self.emitter.emit_lifecycle(event)

    def _chosen(self, begin: int, batch: Any, *_: Any, **__: Any) -> None:
        if batch is None:
            return
        decodes = batch.forward_mode.is_decode()
        requests = []
        for req in batch.reqs:
            key = self.emitter.key(req.rid)
            requests.append((req, key, 1 if decodes else int(req.extend_input_len)))
            resumed = self.waiting.pop(req.rid, None)
            if resumed is not None:
                cached = len(req.prefix_indices)
                scheduled = events.Scheduled(now(), key, begin, cached, resumed=resumed)
                self.emitter.emit_lifecycle(scheduled)
        self.open.append(OpenBatch(events.Step(begin, 0, now() - begin), requests))
        if len(self.open) > OPEN_ROOM:
            self.open.popleft()

    def _launch(self, *_: Any, **__: Any) -> None:
        if self.open and self.open[-1].step.launched < 0:
            self.open[-1].step.launched = now() - self.open[-1].step.t

    def _result(self, *_: Any, **__: Any) -> tuple[OpenBatch, dict[int, int]] | None:
        """(the oldest open batch, output tokens of its requests so far)."""
        if not self.open:
            return None
        batch = self.open.popleft()
        return batch, {key: len(req.output_ids) for req, key, _ in batch.requests}

    def _ended(self, token: tuple[OpenBatch, dict[int, int]] | None, *_: Any, **__: Any) -> None:
        if token is None:
            return
        end = now()
        batch, before = token
        odd: list[int] = []
        for req, key, scheduled in batch.requests:
            produced = len(req.output_ids) - before[key]
            if scheduled != 1 or produced != 1:
                odd += (key, scheduled, max(0, produced))
        keys = {key for _, key, _ in batch.requests}
        self.count += 1
        step = batch.step
        step.n, step.token, step.end = self.count, end - step.t, end - step.t
        step.batch, step.tokens = len(keys), sum(scheduled for _, _, scheduled in batch.requests)
        step.joined = pack_u32(sorted(keys - self.members))
        step.left = pack_u32(sorted(self.members - keys))
        step.odd, step.preempted = pack_u32(odd), self.preempted
        step.timing = events.Timing.LAUNCH
        self.members = keys
        self.emitter.emit(step)
        for req, key, _scheduled in batch.requests:
            if req.finished() and self.emitter.known(req.rid):
                reason = getattr(req.finished_reason, "type", None)
                reason = str(reason or type(req.finished_reason).__name__)[:40]
                finished = events.Finished(end, key, reason, len(req.output_ids))
                finished.prompt_tokens = len(req.origin_input_ids)
                self.emitter.emit_lifecycle(finished)
                self.emitter.emit_lifecycle(events.Released(now(), key))
                self.emitter.drop(req.rid, ENGINE)


_hooks: SglangHooks | None = None


def register() -> None:
    """Install the hooks in a process of SGLang, if ``TRACER=1``. Never raises."""
    global _hooks
    if os.environ.get("TRACER") != "1" or _hooks is not None:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

        _hooks = SglangHooks(emitter())
        _hooks.install(HookRegistry, HookType.AROUND)
    except Exception as error:
        sys.stderr.write(f"tracer: hooks for SGLang are off: {type(error).__name__}: {error}\n")

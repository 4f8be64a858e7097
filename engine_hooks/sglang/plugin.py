"""The SGLang adapter, on that engine's own hook registry (``sglang.srt.plugins``). **Not run
against a live server**: its kernels need a GPU; the places are those of its source (0.5.15).

Inert unless ``TRACER=1``. SGLang loads it in each of its processes; the hooks of a process's role
are the ones that get called there. Steps are whole: their parts lie inside CUDA graphs. For a
server that cannot load plugins, `tracer.export.imports.spans` reads the spans that it writes
itself.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from engine_hooks.base.emitter import ENGINE, FRONT, Emitter, emitter
from engine_hooks.base.patching import Patches, lacking_parameters
from engine_hooks.base.prompt_text import IDS_KEPT
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler."
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_LABEL: Final = "not run against a live SGLang server"
OPEN_ROOM: Final = 64
"""Batches that may be under way: the engine overlaps two; what is beyond never came back."""


@dataclass(frozen=True, slots=True)
class Place:
    """A dotted path, the stages that fall away without it, the parameters that are relied on, and
    our hook, called as ``hook(original, *args, **kwargs)``."""

    path: str
    stages: tuple[int, ...]
    needs: tuple[str, ...]
    around: Callable[..., Any]


class OpenBatch:
    """A batch that was chosen and has no result yet."""

    __slots__ = ("begin", "launched", "requests", "scheduled")

    def __init__(self, begin: int, requests: list[tuple[Any, int, int]]) -> None:
        self.begin = begin
        self.scheduled = now()
        self.launched = -1
        self.requests = requests
        """(request, number, tokens that it runs)."""


class SglangHooks:
    """The hooks of this process."""

    def __init__(self, voice: Emitter) -> None:
        self.voice = voice
        self.patches = Patches(voice.fault)
        self.open: deque[OpenBatch] = deque()
        self.members: set[int] = set()
        self.waiting: dict[str, bool] = {}
        """Requests that were queued and not scheduled yet → whether they were retracted."""
        self.count = 0
        self.preempted = 0
        self.front: dict[str, int] = {}

    def table(self) -> list[Place]:
        """The places, each with the stages that depend on it."""
        admission, prefill, decode = Stage.ADMISSION, Stage.PREFILL, Stage.DECODE
        return [
            Place(
                _TOKENIZER + "generate_request",
                (Stage.RECEIVE, Stage.STREAM),
                ("obj",),
                self._generate,
            ),
            Place(
                _TOKENIZER + "_tokenize_one_request", (Stage.TOKENISE,), ("obj",), self._tokenise
            ),
            Place(_SCHEDULER + "_add_request_to_queue", (admission,), ("req",), self._queue),
            Place(
                _SCHEDULER + "get_next_batch_to_run", (admission, prefill, decode), (), self._choose
            ),
            Place(_SCHEDULER + "run_batch", (), ("batch",), self._launch),
            Place(
                _SCHEDULER + "process_batch_result",
                (prefill, decode, Stage.TEARDOWN),
                ("batch", "result"),
                self._result,
            ),
        ]

    def install(self, registry: Any, around: Any) -> None:
        """Register every hook whose place is as we know it with the engine's `registry`; `around`
        is its hook type."""
        for place in self.table():
            try:
                lacking = lacking_parameters(pkgutil.resolve_name(_colon(place.path)), place.needs)
            except (ImportError, AttributeError) as error:
                self.patches.misses[place.path] = f"not found in this version: {error}"
                continue
            if lacking:
                self.patches.misses[place.path] = (
                    f"its parameters changed: {', '.join(lacking)} missing"
                )
                continue
            registry.register(place.path, self._guarded(place), around)

    def tell_coverage(self, stages: tuple[int, ...]) -> None:
        """Say how `stages` are measured in this process."""
        lost = {
            s: (p.path, why)
            for p in self.table()
            if (why := self.patches.misses.get(p.path))
            for s in p.stages
        }
        held = {s: p.path for p in self.table() for s in p.stages}
        for stage in stages:
            if stage in lost:
                self.voice.cover(Stage(stage), "unavailable", *lost[stage])
            elif stage in held:
                self.voice.cover(Stage(stage), "measured", held[stage], _LABEL)
            else:
                self.voice.cover(
                    Stage(stage), "unavailable", "", "SGLang runs it inside a CUDA graph"
                )

    def _guarded(self, place: Place) -> Callable[..., Any]:
        """Our hook, out of the way once it failed too often. What the engine's function raises
        passes."""

        def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.patches.disabled(place.path):
                return original(*args, **kwargs)
            return place.around(place.path, original, *args, **kwargs)

        return hook

    def _tell(self, path: str, tell: Callable[..., None], *args: Any) -> None:
        try:
            tell(*args)
        except Exception as error:
            self.patches.fault(path, error)

    # --- the tokeniser's process ---

    def _generate(
        self, path: str, original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        async def stream() -> AsyncIterator[Any]:
            key, handed = self._received(path, obj), False
            try:
                async for output in original(manager, obj, *args, **kwargs):
                    yield output
                    if key and not handed:
                        handed = True
                        self.voice.emit_lifecycle(events.End(now(), key, Stage.STREAM))
            finally:
                if key:
                    self.voice.emit_lifecycle(events.Closed(now(), key))
                    self.front.pop(obj.rid, None)
                    self.voice.drop(obj.rid, FRONT)

        return stream()

    def _received(self, path: str, obj: Any) -> int:
        """The number of a single request, 0 for a list of them (its parts are seen by the
        scheduler)."""
        at = now()
        if not isinstance(getattr(obj, "rid", None), str):
            return 0
        self.voice.start("api", "SGLang api")
        self._tell(path, self.tell_coverage, (1, 3, 10))
        key = self.front[obj.rid] = self.voice.hold(obj.rid, FRONT)
        streaming = int(bool(getattr(obj, "stream", False)))
        self.voice.emit_lifecycle(events.Received(at, key, obj.rid, "sglang", "", "", streaming))
        return key

    async def _tokenise(
        self, path: str, original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        begin = now()
        result = await original(manager, obj, *args, **kwargs)
        self._tell(path, self._tokenised, obj, result, begin)
        return result

    def _tokenised(self, obj: Any, result: Any, begin: int) -> None:
        key = self.front.get(obj.rid) if isinstance(getattr(obj, "rid", None), str) else None
        if key is None:
            return
        at, ids = now(), list(getattr(result, "input_ids", None) or ())
        emit = self.voice.emit_lifecycle
        emit(events.End(begin, key, Stage.RECEIVE))
        emit(events.Begin(begin, key, Stage.TOKENISE))
        emit(events.End(at, key, Stage.TOKENISE, len(ids)))
        emit(events.Begin(at, key, Stage.ADMISSION))
        emit(events.Prompt(at, key, "", -1, pack_u32(ids[:IDS_KEPT]), len(ids)))

    # --- the scheduler's process ---

    def _queue(
        self, path: str, original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        retracted = bool(kwargs.get("is_retracted", args[0] if args else False))
        self._tell(path, self._queued, req, retracted)
        return original(scheduler, req, *args, **kwargs)

    def _queued(self, req: Any, retracted: bool) -> None:
        self.voice.start("core", "SGLang scheduler")
        self.tell_coverage((4, 5, 6, 7, 8, 9, 11, 12))
        key = self.voice.hold(req.rid, ENGINE)
        self.waiting[req.rid] = retracted
        if retracted:
            self.preempted += 1
            self.voice.emit_lifecycle(
                events.Preempted(now(), key, "recompute", -1, len(req.output_ids), self.preempted)
            )
            return
        limit = getattr(req.sampling_params, "max_new_tokens", None)
        self.voice.emit_lifecycle(
            events.Queued(
                now(),
                key,
                req.rid,
                len(req.origin_input_ids),
                limit if isinstance(limit, int) else -1,
            )
        )

    def _choose(self, path: str, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        begin = now()
        batch = original(scheduler, *args, **kwargs)
        if batch is not None:
            self._tell(path, self._chosen, batch, begin)
        return batch

    def _chosen(self, batch: Any, begin: int) -> None:
        decodes = batch.forward_mode.is_decode()
        requests = []
        for req in batch.reqs:
            key = self.voice.key(req.rid)
            requests.append((req, key, 1 if decodes else int(req.extend_input_len)))
            retracted = self.waiting.pop(req.rid, None)
            if retracted is not None:
                at, cached = now(), len(req.prefix_indices)
                self.voice.emit_lifecycle(events.Scheduled(at, key, begin, cached, 0, 0, retracted))
        self.open.append(OpenBatch(begin, requests))
        if len(self.open) > OPEN_ROOM:
            self.open.popleft()

    def _launch(
        self, path: str, original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.open and self.open[-1].launched < 0:
            self.open[-1].launched = now()
        return original(scheduler, batch, *args, **kwargs)

    def _result(
        self, path: str, original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step = self.open.popleft() if self.open else None
        before = {} if step is None else {key: len(req.output_ids) for req, key, _ in step.requests}
        outcome = original(scheduler, batch, *args, **kwargs)
        if step is not None:
            self._tell(path, self._ended, step, before)
        return outcome

    def _ended(self, step: OpenBatch, before: dict[int, int]) -> None:
        end, begin = now(), step.begin
        odd: list[int] = []
        for req, key, scheduled in step.requests:
            produced = len(req.output_ids) - before[key]
            if scheduled != 1 or produced != 1:
                odd += (key, scheduled, max(0, produced))
        keys = {key for _, key, _ in step.requests}
        self.count += 1
        launched = step.launched - begin if step.launched >= begin else -1
        event = events.Step(
            begin, self.count, step.scheduled - begin, launched, token=end - begin, end=end - begin
        )
        event.batch, event.tokens = len(keys), sum(scheduled for _, _, scheduled in step.requests)
        event.joined, event.left = (
            pack_u32(sorted(keys - self.members)),
            pack_u32(sorted(self.members - keys)),
        )
        event.odd, event.preempted, event.timing = (
            pack_u32(odd),
            self.preempted,
            events.Timing.LAUNCH,
        )
        self.members = keys
        self.voice.emit(event)
        for req, key, _ in step.requests:
            if req.finished() and self.voice.known(req.rid):
                reason = (
                    getattr(req.finished_reason, "type", None) or type(req.finished_reason).__name__
                )
                self.voice.emit_lifecycle(
                    events.Finished(
                        end,
                        key,
                        str(reason)[:40],
                        len(req.output_ids),
                        "",
                        len(req.origin_input_ids),
                    )
                )
                self.voice.emit_lifecycle(events.Released(now(), key))
                self.voice.drop(req.rid, ENGINE)


def _colon(path: str) -> str:
    """A dotted path in the form that names the module first."""
    *module, owner, name = path.split(".")
    return f"{'.'.join(module)}:{owner}.{name}"


_hooks: SglangHooks | None = None


def register() -> None:
    """What SGLang calls in each of its processes. Inert unless ``TRACER=1``; never raises."""
    global _hooks
    if os.environ.get("TRACER") != "1" or _hooks is not None:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

        _hooks = SglangHooks(emitter())
        _hooks.install(HookRegistry, HookType.AROUND)
    except Exception as error:
        sys.stderr.write(f"tracer: hooks for SGLang are off: {type(error).__name__}: {error}\n")

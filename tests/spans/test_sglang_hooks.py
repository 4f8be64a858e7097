"""The SGLang adapter against its registry's contract: hooks around functions by dotted path. The
engine itself needs a GPU: here the places are small classes with the signatures of its source,
called in the order of its event loop."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from engine_hooks.base.emitter import Emitter
from engine_hooks.protocol import events
from engine_hooks.sglang.plugin import SglangHooks
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase


class Req:
    def __init__(self, rid: str, prompt: int, limit: int) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, [7] * prompt, []
        self.sampling_params = types.SimpleNamespace(max_new_tokens=limit)
        self.extend_input_len, self.prefix_indices = prompt, []
        self.finished_reason: Any = None

    def finished(self) -> bool:
        return self.finished_reason is not None


class Registry:
    """Keeps what is registered; `apply` wraps as the engine's registry does for its hooks around a
    function."""

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[..., Any]] = {}

    def register(self, target: str, hook: Callable[..., Any], hook_type: str) -> None:
        assert hook_type == "around"
        self.hooks[target] = hook

    def apply(self) -> None:
        for target, hook in self.hooks.items():
            *_, owner, name = target.split(".")
            cls = {"Scheduler": Scheduler, "TokenizerManager": TokenizerManager}[owner]
            setattr(cls, name, self._wrap(getattr(cls, name), hook))

    @staticmethod
    def _wrap(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: hook(original, *args, **kwargs)


class Scheduler:
    def __init__(self) -> None:
        self.queue: list[Req] = []
        self.running: list[Req] = []

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.queue.append(req)

    def get_next_batch_to_run(self) -> Any:
        reqs, self.queue = self.queue or self.running, []
        decodes = bool(reqs) and reqs[0] in self.running
        self.running = [*self.running, *(req for req in reqs if req not in self.running)]
        mode = types.SimpleNamespace(is_decode=lambda: decodes)
        return types.SimpleNamespace(reqs=list(reqs), forward_mode=mode) if reqs else None

    def run_batch(self, batch: Any) -> str:
        return "result"

    def process_batch_result(self, batch: Any, result: Any) -> None:
        for req in batch.reqs:
            req.output_ids.append(1)
            if len(req.output_ids) == req.sampling_params.max_new_tokens:
                req.finished_reason = types.SimpleNamespace(type="length")
        self.running = [req for req in self.running if not req.finished()]


class TokenizerManager:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[str]:
        tokenized = await self._tokenize_one_request(obj)
        req = Req(obj.rid, len(tokenized.input_ids), obj.limit)
        self.scheduler._add_request_to_queue(req)
        while not req.finished():
            batch = self.scheduler.get_next_batch_to_run()
            self.scheduler.process_batch_result(batch, self.scheduler.run_batch(batch))
            yield f"token {len(req.output_ids)}"

    async def _tokenize_one_request(self, obj: Any) -> Any:
        return types.SimpleNamespace(input_ids=[1, 2, 3, 4])


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangHooks]:
    places = {
        "sglang.srt.managers.scheduler": Scheduler,
        "sglang.srt.managers.tokenizer_manager": TokenizerManager,
    }
    for name, cls in places.items():
        for depth in range(1, len(name.split("."))):
            monkeypatch.setitem(
                sys.modules, ".".join(name.split(".")[:depth]), types.ModuleType("sglang")
            )
        module = types.ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
        for attribute in list(vars(cls)):
            if not attribute.startswith("__"):
                monkeypatch.setattr(cls, attribute, vars(cls)[attribute])  # put back as it was
    emitter = Emitter()
    monkeypatch.setattr(emitter, "start", lambda role, title: None)
    hooks = SglangHooks(emitter)
    registry = Registry()
    hooks.install(registry, "around")
    assert hooks.patches.misses == {}
    registry.apply()
    yield hooks


async def test_a_request_is_told_from_its_text_to_its_last_token(hooks: SglangHooks) -> None:
    manager = TokenizerManager(Scheduler())
    said = [
        token
        async for token in manager.generate_request(
            types.SimpleNamespace(rid="r1", stream=True, limit=3)
        )
    ]
    assert said == ["token 1", "token 2", "token 3"]
    state = TraceState()
    told = hooks.emitter.buffer.drain()[1]
    for event in told:
        state.apply("sglang", event)
    assert state.unknown == 0
    (seen,) = state.snapshot().requests
    assert (seen.phase, seen.prompt_tokens, seen.output_tokens) == (Phase.DONE, 4, 3)
    assert seen.finish_reason == "length"
    assert not seen.incomplete
    assert not [event for event in told if isinstance(event, events.HookFault)]
    assert {
        event.reason
        for event in told
        if isinstance(event, events.Coverage) and event.status == "measured"
    } == {"not run against a live SGLang server"}


async def test_our_own_errors_do_not_reach_the_engine(hooks: SglangHooks) -> None:
    scheduler = Scheduler()
    scheduler._add_request_to_queue(types.SimpleNamespace(rid="odd"))  # type: ignore[arg-type]
    assert len(scheduler.queue) == 1
    (fault,) = [
        event for event in hooks.emitter.buffer.drain()[1] if isinstance(event, events.HookFault)
    ]
    assert "_add_request_to_queue" in fault.hook


def test_a_place_that_changed_is_named(hooks: SglangHooks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "process_batch_result", lambda self, chosen, outcome: None)
    fresh = SglangHooks(Emitter())
    fresh.install(Registry(), "around")
    (reason,) = fresh.patches.misses.values()
    assert reason == "its parameters changed: batch, result missing"

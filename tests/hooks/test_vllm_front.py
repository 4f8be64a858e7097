"""vLLM's front end: its methods as small stand-ins, wrapped by the hooks as the real ones are."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine_hooks.base.emitter import FRONT, Emitter
from engine_hooks.base.http import current
from engine_hooks.base.patching import Patches
from engine_hooks.protocol import events
from engine_hooks.protocol.events import unpack_u32
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm import answers, front, offline
from engine_hooks.vllm.answers import VllmFronts
from engine_hooks.vllm.front import FrontHooks, FrontMiddleware
from engine_hooks.vllm.offline import OfflineHooks
from engine_hooks.vllm.roles import Roles
from tests.hooks.shapes import Clock, core_output, emitted, only


class BaseRenderer:
    def render_chat(self, conversations: Any) -> None:
        """Renders, and tokenises within."""

    def tokenize_prompts(self, prompts: Any) -> Any:
        return [{"prompt_token_ids": [3, 1, 4]} for _ in prompts]

    async def render_chat_async(self, conversations: Any) -> None:
        """Renders."""

    async def tokenize_prompts_async(self, prompts: Any) -> Any:
        return [{"prompt_token_ids": [3, 1, 4]} for _ in prompts]


class OutputProcessor:
    def add_request(self, request: Any) -> None:
        """Takes a request in."""

    def process_outputs(self, engine_core_outputs: Any, engine_core_timestamp: Any = None) -> Any:
        return SimpleNamespace(reqs_to_abort=[])

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        """Takes statistics."""

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        return request_ids

    def propagate_error(self, e: Exception) -> None:
        """The engine died."""


class RequestState:
    def __init__(self, rid: str, kind: str) -> None:
        self.request_id, self.output_kind = rid, SimpleNamespace(name=kind)

    def make_request_output(self, text: str) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(index=0, text=text)])


class LLMEngine:
    def __init__(self) -> None:
        self.processor = OutputProcessor()

    def add_request(self, request_id: str, error: Exception | None = None) -> None:
        if error is not None:
            raise error
        self.processor.add_request(
            SimpleNamespace(
                request_id=f"{request_id}-x", external_req_id=request_id, prompt_token_ids=[9]
            )
        )


class AsyncLLM:
    def __init__(self) -> None:
        self.processor = OutputProcessor()
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=81))

    async def add_request(self, request_id: str, prompt: Any) -> None:
        LLMEngine.add_request(self, request_id, prompt)  # type: ignore[arg-type]


MODULES = {
    "vllm.renderers.base": (BaseRenderer,),
    "vllm.v1.engine.output_processor": (OutputProcessor, RequestState),
    "vllm.v1.engine.llm_engine": (LLMEngine,),
    "vllm.v1.engine.async_llm": (AsyncLLM,),
}


class Hooked:
    """The front end's hooks on the stand-ins."""

    def __init__(self) -> None:
        self.emitter = Emitter()
        self.made: list[str] = []
        self.emitter.start = lambda role, title: self.made.append(title)  # type: ignore[method-assign]
        self.patches = Patches(lambda *fault: pytest.fail(str(fault)))
        self.front = FrontHooks(self.emitter, self.patches, Roles(self.emitter))
        self.offline = OfflineHooks(self.front)

    def emitted(self) -> list[events.Event]:
        return emitted(self.emitter)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hooked]:
    for name, classes in MODULES.items():
        for depth in range(1, name.count(".") + 1):
            package = ".".join(name.split(".")[:depth])
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        module = types.ModuleType(name)
        vars(module).update({cls.__name__: cls for cls in classes})
        monkeypatch.setitem(sys.modules, name, module)
    hooked = Hooked()
    assert hooked.patches.install(*hooked.front.table(), *hooked.offline.table())
    yield hooked
    hooked.patches.remove()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One more at each look, in all of the front end."""
    ticks = itertools.count(1)
    clock = Clock()
    for module in (answers, front, offline):
        monkeypatch.setattr(module, "now", lambda: next(ticks))
    return clock


def stages(found: list[events.Event]) -> list[tuple[str, Stage, int]]:
    """Beginnings and ends of stages, with the units of the ends."""
    return [
        (type(event).__name__, Stage(event.stage), getattr(event, "units", 0))
        for event in found
        if isinstance(event, events.Begin | events.End)
    ]


def test_a_chat_of_llm_is_told_once_the_engine_takes_it(hooked: Hooked, clock: Clock) -> None:
    renderer, engine = BaseRenderer(), LLMEngine()
    renderer.render_chat(["hello"])
    renderer.tokenize_prompts([{"prompt": "<|user|>hello"}])
    assert only(hooked.emitted(), events.Received) == [], "it has no id yet"
    engine.add_request("7")
    found = hooked.emitted()
    (received,) = only(found, events.Received)
    assert (received.route, received.t, received.offline, received.streaming) == (
        "LLM.chat", 1, True, 0
    )  # fmt: skip
    assert stages(found) == [
        ("End", Stage.RECEIVE, -1),
        ("Begin", Stage.TEMPLATE, 0),
        ("End", Stage.TEMPLATE, 13),
        ("Begin", Stage.TOKENISE, 0),
        ("End", Stage.TOKENISE, 3),
        ("Begin", Stage.ADMISSION, 0),
    ]
    (prompt,) = only(found, events.Prompt)
    assert (prompt.text, prompt.chars, list(unpack_u32(prompt.ids))) == (
        "<|user|>hello", 13, [3, 1, 4]
    )  # fmt: skip
    assert [event.rid for event in only(found, events.Alias)] == ["7", "7-x"]
    assert [event.t for event in only(found, events.Begin)] == [1, 2, 3]
    assert hooked.made == ["vLLM api"] and current.get() is None


def test_a_rendering_that_becomes_no_request_is_not_told(hooked: Hooked) -> None:
    renderer, engine = BaseRenderer(), LLMEngine()
    renderer.render_chat(["warm-up"])
    renderer.tokenize_prompts([{"prompt": "warm-up"}])
    renderer.tokenize_prompts([{"prompt": "plain"}])
    engine.add_request("8")
    found = hooked.emitted()
    assert [event.route for event in only(found, events.Received)] == ["LLM.generate"]
    assert [event.text for event in only(found, events.Prompt)] == ["plain"]
    assert ("Begin", Stage.TEMPLATE, 0) not in stages(found)
    engine.add_request("9")
    found = hooked.emitted()
    assert stages(found) == [("End", Stage.RECEIVE, -1), ("Begin", Stage.ADMISSION, 0)]
    (prompt,) = only(found, events.Prompt)
    assert (prompt.chars, list(unpack_u32(prompt.ids))) == (-1, [9]), "the engine knows its ids"


@pytest.mark.parametrize("prompts", [[], [{"prompt_token_ids": [1]}], ["text"], [{"prompt": 3}]])
def test_a_prompt_without_a_text_has_none(hooked: Hooked, prompts: list[Any]) -> None:
    BaseRenderer().tokenize_prompts(prompts)
    LLMEngine().add_request("1")
    (prompt,) = only(hooked.emitted(), events.Prompt)
    assert (prompt.text, prompt.chars) == ("", -1)


def test_a_request_that_the_engine_refuses_failed(hooked: Hooked) -> None:
    with pytest.raises(ValueError, match="too long"):
        LLMEngine().add_request("1", ValueError("too long"))
    found = hooked.emitted()
    (end,) = only(found, events.Finished)
    assert (end.reason, end.output_tokens, end.error) == ("failed", 0, "ValueError: too long")
    assert len(only(found, events.Closed)) == 1
    assert hooked.front.fronts.by_rid == {} and current.get() is None


@pytest.mark.parametrize(("kind", "texts", "output"), [
    ("CUMULATIVE", ["he", "hello", "hello"], "hello"), ("DELTA", ["he", "llo", ""], "hello"),
])  # fmt: skip
def test_output_of_an_llm_comes_from_its_outputs(
    hooked: Hooked, kind: str, texts: list[str], output: str
) -> None:
    engine = LLMEngine()
    engine.add_request("1")
    hooked.emitted()
    state = RequestState("1-x", kind)
    for text in texts[:-1]:
        state.make_request_output(text)
        engine.processor.process_outputs([core_output("1-x", 1)])
    state.make_request_output(texts[-1])
    engine.processor.process_outputs([core_output("1-x", 1, finish_reason="stop")])
    found = hooked.emitted()
    assert "".join(event.text for event in only(found, events.Output)) == output
    sent = only(found, events.Sent)[-1]
    assert (sent.chunks, sent.tokens) == (3, 3)
    assert stages(found) == [("End", Stage.STREAM, 0)], "handed out once"
    assert hooked.front.fronts.answers == {}


async def test_a_request_of_async_llm_is_handed_over(hooked: Hooked) -> None:
    client = AsyncLLM()
    await client.add_request("1", None)
    found = hooked.emitted()
    (received,) = only(found, events.Received)
    assert (received.route, received.streaming) == ("AsyncLLM.generate", 1)
    assert ("Begin", Stage.ADMISSION, 0) in stages(found)
    assert hooked.made == ["vLLM api"] and current.get() is None
    with pytest.raises(ValueError, match="no"):
        await client.add_request("2", ValueError("no"))
    assert [event.error for event in only(hooked.emitted(), events.Finished)] == ["ValueError: no"]
    assert current.get() is None
    client.processor.abort_requests(["1-x", "unknown"])
    assert hooked.front.fronts.by_rid == {}


def test_an_engine_that_died_says_why(hooked: Hooked) -> None:
    OutputProcessor().propagate_error(RuntimeError("out of memory"))
    (status,) = only(hooked.emitted(), events.EngineStatus)
    assert (status.status, status.reason) == ("dead", "RuntimeError: out of memory")


@pytest.mark.parametrize("gone", ["tokenize_prompts", None])
def test_coverage_names_what_is_gone(
    hooked: Hooked, monkeypatch: pytest.MonkeyPatch, gone: str | None
) -> None:
    hooked.patches.remove()
    fresh = Hooked()
    if gone is not None:
        monkeypatch.delattr(BaseRenderer, gone)
    fresh.patches.install(*fresh.front.table(), *fresh.offline.table())
    fresh.offline.start()
    told = {event.stage: event.status for event in only(fresh.emitted(), events.Coverage)}
    fresh.patches.remove()
    expected = "measured" if gone is None else "unavailable"
    assert told == {
        Stage.RECEIVE: "measured", Stage.TEMPLATE: expected, Stage.TOKENISE: expected,
        Stage.STREAM: "measured",
    }  # fmt: skip


# --- answers --------------------------------------------------------------------------------------


def opened(fronts: VllmFronts, route: str) -> Any:
    return fronts.open("inner", answers.ROUTES[route], events.Received(1, 0, "", route))


@pytest.mark.parametrize(("route", "external", "names"), [
    ("/v1/chat/completions", "chatcmpl-1", ["chatcmpl-1", "id-1"]),
    ("/v1/completions", "cmpl-1-0", ["cmpl-1", "cmpl-1-0", "id-1"]),
    ("/v1/completions", "cmpl-1-1", ["cmpl-1-1", "cmpl-1-1", "id-1"]),
    ("/v1/chat/completions", "", ["id-1"]),
])  # fmt: skip
def test_a_request_is_known_by_all_of_its_names(
    route: str, external: str, names: list[str]
) -> None:
    emitter = Emitter()
    fronts = VllmFronts(emitter)
    one = opened(fronts, route)
    first, second = fronts.add(one, "id-1", external), fronts.add(one, "id-2", "other")
    assert (first.first, second.first, first.offline) == (True, False, False)
    assert [event.rid for event in only(emitted(emitter), events.Alias)] == names
    assert emitter.key("id-1") == one.key != emitter.key("id-2")


def test_a_closed_request_leaves_no_answer_behind() -> None:
    emitter = Emitter()
    fronts = VllmFronts(emitter)
    one = opened(fronts, "/v1/completions")
    fronts.add(one, "id-1", "x")
    fronts.handed[one.key] = 5
    emitter.hold("id-1", FRONT)
    fronts.close(one, 9)
    assert (fronts.answers, fronts.handed, fronts.by_rid) == ({}, {}, {})
    assert not emitter.known("id-1") and not emitter.known("inner")


def test_the_last_output_of_an_offline_request_is_told_at_once() -> None:
    emitter = Emitter()
    fronts = VllmFronts(emitter)
    one = fronts.open_offline("LLM.generate", 10, 0)
    one.chunks, one.tokens, one.reported = 2, 3, 11
    one.text.append("end")
    fronts.close_offline(one, 12)
    found = emitted(emitter)
    assert [event.text for event in only(found, events.Output)] == ["end"]
    assert [(event.chunks, event.tokens) for event in only(found, events.Sent)] == [(2, 3)]
    assert only(found, events.Closed) == [], "the engine ends it"
    assert fronts.by_rid == {} and not emitter.known(one.rid)


@pytest.mark.parametrize(("chunk", "carries"), [
    (b'data: {"delta":{"role":"assistant","content":""}}', False),
    (b'data: {"delta":{"content":"x"}}', True),
    (b'data: {"delta":{"content":"","reasoning":"x"}}', True),
    (b'data: {"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}', True),
    (b'data: {"delta":{"content":"","token_ids":[1]}}', True),
    (b"data: [DONE]", False),
])  # fmt: skip
def test_a_chunk_with_the_role_alone_is_no_output(chunk: bytes, carries: bool) -> None:
    async def app(*_args: Any) -> None:
        raise AssertionError("nothing is sent")

    fronts = VllmFronts(Emitter())
    middleware = FrontMiddleware(app, fronts)
    assert middleware.carries(opened(fronts, "/v1/chat/completions"), chunk) == carries


@pytest.mark.parametrize(("body", "limit", "messages", "logprobs"), [
    ({"max_tokens": 5, "messages": [1, 2], "logprobs": True}, 5, 2, 1),
    ({"max_completion_tokens": 4, "max_tokens": 5, "messages": []}, 4, 0, 0),
    ({"max_completion_tokens": None, "max_tokens": None, "max_output_tokens": 6}, 6, -1, 0),
    ({"max_tokens": "5", "messages": "x"}, -1, -1, 0),
])  # fmt: skip
def test_what_a_body_asks_for(
    body: dict[str, Any], limit: int, messages: int, logprobs: int
) -> None:
    emitter = Emitter()
    fronts = VllmFronts(emitter)
    one = opened(fronts, "/v1/chat/completions")
    given = SimpleNamespace(user="u" * 200, model="/models/some", **body)
    fronts.parsed(one, lambda name: getattr(given, name, None), streaming=True)
    (asked,) = only(emitted(emitter), events.Params)
    assert (asked.max_tokens, asked.messages, asked.logprobs) == (limit, messages, logprobs)
    assert (asked.tenant, asked.model, asked.streaming) == ("u" * 128, "some", 1)

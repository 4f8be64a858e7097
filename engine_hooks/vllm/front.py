"""Hooks for vLLM's front end: stages 1 to 3 and 10 of requests over HTTP and of `AsyncLLM`, on the
event loop.

All but the middleware sit on methods of base classes that every renderer, client and server goes
through, so that a request is found by its context (`http.current`) and nothing has to follow it
into the renderer's thread pool. `offline` adds what `LLM` needs.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from engine_hooks.base.emitter import Emitter
from engine_hooks.base.http import (
    CLIENT_ID_LIMIT,
    REQUEST_ID,
    App,
    Front,
    Fronts,
    Receive,
    Scope,
    Send,
    TracingMiddleware,
    current,
    tenant_of,
)
from engine_hooks.base.model_name import model_name
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.base.prompt_text import IDS_KEPT, shortened
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm.answers import ROUTES, Answer, VllmFronts
from engine_hooks.vllm.public import PublicSteps

_ALSO: Final = (b'"reasoning":"', b'"arguments":"', b'"token_ids":[')
"""What else a chat chunk may carry instead of text."""

_ADD: Final = "AsyncLLM.add_request"
_OPENAI: Final = "vllm.entrypoints.openai."
MIDDLEWARE: Final = "vllm.entrypoints.launchers.app:init_entrypoints_middleware"


class FrontMiddleware(TracingMiddleware):
    """The ASGI middleware. vLLM makes ids unique itself, so the request goes through untouched."""

    def __init__(self, app: App, fronts: Fronts) -> None:
        super().__init__(app, fronts, ROUTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if current.get() is None:
            await super().__call__(scope, receive, send)
        else:  # it was put in twice, by the hooks and by hand
            await self.app(scope, receive, send)

    def _open(self, scope: Scope) -> tuple[Front, Scope, bytes | None]:
        at = now()
        sent = next((value for name, value in scope["headers"] if name.lower() == REQUEST_ID), b"")
        client_id = sent.decode("latin-1")[:CLIENT_ID_LIMIT]
        path = str(scope["path"])
        tenant = tenant_of(scope["headers"])
        return (
            self.fronts.open(uuid.uuid4().hex, path, client_id, self.routes[path], at, tenant),
            scope,
            None,
        )

    def carries(self, front: Front, body: bytes) -> bool:
        """The first chunk names the role beside an empty text: that is no output."""
        at = body.find(front.needle)
        if at >= 0 and body[at + len(front.needle) : at + len(front.needle) + 1] != b'"':
            return True
        return any(needle in body for needle in _ALSO)


class FrontHooks:
    """The hooks of the front end in this process. `on_client` is called when an engine's client is
    made here, `on_server` once it turns out to be an HTTP server."""

    def __init__(self, voice: Emitter, patches: Patches, on_client: Any, on_server: Any) -> None:
        self.voice = voice
        self.patches = patches
        self._on_client = on_client
        self.fronts = VllmFronts(voice)
        self.public: PublicSteps | None = None
        """Set where the engine core cannot be hooked."""
        self._on_server = on_server

    def server_table(self) -> list[Hook]:
        """The places in the HTTP server, each with the stages that depend on it."""
        receive = (Stage.RECEIVE,)
        return [
            Hook(MIDDLEWARE, (Stage.RECEIVE, Stage.STREAM), ("app",), after=self._served),
            Hook(
                _OPENAI + "chat_completion.serving:OpenAIServingChat.create_chat_completion",
                receive,
                ("request",),
                before=self._parsed,
                is_async=True,
            ),
            Hook(
                _OPENAI + "completion.serving:OpenAIServingCompletion.create_completion",
                (),
                ("request",),
                before=self._parsed,
                is_async=True,
            ),
            Hook(
                _OPENAI + "responses.serving:OpenAIServingResponses.create_responses",
                (),
                ("request",),
                before=self._parsed,
                is_async=True,
            ),
        ]

    def table(self) -> list[Hook]:
        """The places in the engine's client, which a server and `AsyncLLM` share."""
        renderer = "vllm.renderers.base:BaseRenderer."
        outputs = "vllm.v1.engine.output_processor:"
        return [
            Hook(
                renderer + "render_chat_async",
                (Stage.TEMPLATE,),
                (),
                before=self._render,
                is_async=True,
            ),
            Hook(
                renderer + "tokenize_prompts_async",
                (Stage.TEMPLATE, Stage.TOKENISE),
                ("prompts",),
                before=self._tokenise,
                after=self._tokenised,
                is_async=True,
            ),
            Hook("vllm.v1.engine.async_llm:AsyncLLM.__init__", (), (), after=self._client),
            Hook(
                "vllm.v1.engine.async_llm:AsyncLLM.add_request",
                (Stage.ADMISSION,),
                ("request_id", "prompt"),
                before=self._handed,
                after=self._hand_over,
                failed=self._hand_failed,
                is_async=True,
            ),
            Hook(
                outputs + "OutputProcessor.add_request",
                (Stage.ADMISSION, Stage.STREAM),
                ("request",),
                before=self._added,
            ),
            Hook(
                outputs + "OutputProcessor.process_outputs",
                (),
                ("engine_core_outputs",),
                before=_start,
                after=self._processed,
            ),
            Hook(outputs + "RequestState.make_request_output", (), (), after=self._made),
            Hook(
                outputs + "OutputProcessor.update_scheduler_stats",
                (),
                ("scheduler_stats",),
                before=self._gauges,
            ),
            Hook(outputs + "OutputProcessor.abort_requests", (), (), after=self._aborted),
            Hook(outputs + "OutputProcessor.propagate_error", (), ("e",), before=self._died),
        ]

    def install(self) -> None:
        """Put the client's hooks in."""
        for hook in self.table():
            self.patches.put(hook)

    def install_server(self) -> None:
        """Put the HTTP server's hooks in."""
        for hook in self.server_table():
            self.patches.put(hook)

    def tell_coverage(self, *, server: bool) -> None:
        """Say how the front end's stages are measured, in a server or for callers of `AsyncLLM`."""
        lost = self.patches.lost([*(self.server_table() if server else ()), *self.table()])
        handed = "ASGI send" if server else "the caller"
        named = {
            Stage.RECEIVE: "ASGI middleware → OpenAIServingChat.create_chat_completion"
            if server
            else _ADD,
            Stage.TEMPLATE: "BaseRenderer.render_chat_async → .tokenize_prompts_async",
            Stage.TOKENISE: "BaseRenderer.tokenize_prompts_async",
            Stage.STREAM: f"token ids on the host → OutputProcessor.process_outputs → {handed}",
        }
        for stage, path in named.items():
            if stage in lost:
                self.voice.cover(stage, "unavailable", *lost[stage])
            else:
                self.voice.cover(stage, "measured", path)
        if self.public is not None:
            self.public.tell_coverage()

    def _client(self, _token: Any, _result: Any, client: Any, *_args: Any, **_kwargs: Any) -> None:
        self._on_client(client)

    # --- the server ---

    def _served(self, _token: Any, _result: Any, *args: Any, **kwargs: Any) -> None:
        app = kwargs["app"] if "app" in kwargs else args[1]
        app.add_middleware(FrontMiddleware, fronts=self.fronts)
        self._on_server()

    def _parsed(self, _serving: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        front = current.get()
        if front is None or front.streaming >= 0:
            return
        at = now()
        self.voice.emit_lifecycle(events.End(at, front.key, Stage.RECEIVE, front.size_in))
        front.streaming = int(bool(getattr(request, "stream", False)))
        limit = next(
            (value for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")
             if isinstance(value := getattr(request, name, None), int)), -1
        )  # fmt: skip
        messages = getattr(request, "messages", None)
        self.voice.emit_lifecycle(
            events.Params(
                at,
                front.key,
                front.streaming,
                str(getattr(request, "user", None) or "")[:128],
                model_name(getattr(request, "model", None)),
                limit,
                len(messages) if isinstance(messages, list) else -1,
                int(bool(getattr(request, "logprobs", None))),
            )
        )

    # --- stages 2 to 4 ---

    def _render(self, *_args: Any, **_kwargs: Any) -> None:
        self.rendering(current.get())

    def rendering(self, front: Front | None) -> None:
        """The message list of `front` is about to be rendered."""
        if front is not None and not front.templated:
            front.templated = True
            self.voice.emit_lifecycle(events.Begin(now(), front.key, Stage.TEMPLATE))

    def _tokenise(self, _renderer: Any, prompts: Any, *_args: Any, **_kwargs: Any) -> Front | None:
        return self.tokenising(current.get(), prompts)

    def tokenising(self, front: Front | None, prompts: Any) -> Front | None:
        """The prompts of `front` are flat strings now and go to the tokeniser."""
        if front is None or front.tokenised:
            return None
        front.tokenised = True
        at = now()
        text = _text(prompts[0]) if prompts else ""
        front.prompt_text = text
        if front.templated:
            self.voice.emit_lifecycle(
                events.End(at, front.key, Stage.TEMPLATE, len(text) if text else -1)
            )
        self.voice.emit_lifecycle(events.Begin(at, front.key, Stage.TOKENISE))
        return front

    def _tokenised(self, front: Front | None, result: Any, *_args: Any, **_kwargs: Any) -> None:
        self.tokenised(front, result)

    def tokenised(self, front: Front | None, result: Any) -> None:
        """The token ids are there."""
        if front is None:
            return
        at = now()
        ids = result[0].get("prompt_token_ids") or () if result else ()
        self.fronts.handed[front.key] = at
        self.voice.emit_lifecycle(events.End(at, front.key, Stage.TOKENISE, len(ids)))
        prompt, front.prompt_text = front.prompt_text, ""
        self.voice.emit_lifecycle(
            events.Prompt(
                at,
                front.key,
                shortened(prompt),
                len(prompt) or -1,
                pack_u32(ids[:IDS_KEPT]),
                len(ids),
            )
        )

    def _handed(self, client: Any, *_args: Any, **_kwargs: Any) -> tuple[int, Any]:
        at = now()
        if self.public is not None:
            self.public.blocks = (client.vllm_config.cache_config.num_gpu_blocks or 0) - 1
        if current.get() is not None:
            return at, None
        front = self.fronts.open_offline("AsyncLLM.generate", at, 1)
        self.voice.emit_lifecycle(events.End(at, front.key, Stage.RECEIVE))
        self.fronts.handed[front.key] = at
        return at, current.set(front)

    def _hand_over(self, token: tuple[int, Any] | None, *_args: Any, **_kwargs: Any) -> None:
        if token is not None and token[1] is not None:
            current.reset(token[1])

    def _hand_failed(
        self, token: tuple[int, Any] | None, error: BaseException, *_args: Any, **_kwargs: Any
    ) -> None:
        if token is None or token[1] is None:
            return
        front = current.get()
        current.reset(token[1])
        if front is not None:
            self.refused(front, error)

    def refused(self, front: Front, error: BaseException) -> None:
        """The engine's client did not take a request of this process."""
        at = now()
        self.voice.emit_lifecycle(
            events.Finished(at, front.key, "failed", 0, f"{type(error).__name__}: {error}"[:500])
        )
        self.voice.emit_lifecycle(events.Closed(at, front.key))
        self.fronts.close_offline(front, at)

    def _added(self, _processor: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        front = current.get()
        if front is None or request.request_id in self.fronts.answers:
            return
        self.added(front, request)

    def added(self, front: Front, request: Any) -> None:
        """The engine's client takes `request` in for `front`: from here on it is the engine's."""
        offline = not front.needle
        answer = self.fronts.add(
            front, request.request_id, request.external_req_id or "", offline=offline
        )
        if answer.first:
            # What the client does between the token ids and this call (validation, copies) belongs
            # to the handing over.
            at = self.fronts.handed.pop(front.key, 0) or now()
            self.voice.emit_lifecycle(events.Begin(at, front.key, Stage.ADMISSION))
            if not front.tokenised and request.prompt_token_ids:
                ids = request.prompt_token_ids
                self.voice.emit_lifecycle(
                    events.Prompt(at, front.key, "", -1, pack_u32(ids[:IDS_KEPT]), len(ids))
                )

    # --- stage 10 ---

    def _processed(
        self,
        begin: int | None,
        result: Any,
        _processor: Any,
        engine_core_outputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        answers = self.fronts.answers
        if begin is None or not answers or not engine_core_outputs:
            return
        if self.public is not None:
            keys = {rid: answer.front.key for rid, answer in answers.items() if answer.first}
            timestamp = kwargs.get("engine_core_timestamp", args[0] if args else None)
            self.public.outputs(keys, engine_core_outputs, timestamp)
        at = now()
        share = (at - begin) // len(engine_core_outputs)
        for output in engine_core_outputs:
            answer = answers.get(output.request_id)
            if answer is None:
                continue
            front = answer.front
            front.work += share
            if answer.first:
                front.tokens += len(output.new_token_ids)
                if answer.offline:
                    front.chunks += 1
                    if not front.handed_out:
                        self.fronts.handed_out(front, at)
                    self.fronts.tell(front, at)
        for rid in result.reqs_to_abort:
            # It met a stop string: only the front end knows, the engine will merely hear of an
            # abort.
            answer = answers.get(rid)
            if answer is not None and answer.first:
                self.voice.emit_lifecycle(
                    events.Finished(at, answer.front.key, "stop", answer.front.tokens)
                )
        for rid in [
            output.request_id for output in engine_core_outputs if output.finish_reason is not None
        ]:
            self._ended(answers.get(rid), at)

    def _made(self, _token: Any, result: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        if result is None:
            return
        answer = self.fronts.answers.get(state.request_id)
        if answer is None or not answer.first:
            return
        completion = next((some for some in result.outputs if getattr(some, "index", 0) == 0), None)
        text = getattr(completion, "text", "")
        if text:
            new = text if state.output_kind.name == "DELTA" else text[answer.chars :]
            answer.chars += len(new)
            if new:
                answer.front.text.append(new)

    def _ended(self, answer: Answer | None, at: int) -> None:
        if answer is not None and answer.offline and answer.first:
            self.fronts.close_offline(answer.front, at)

    def _gauges(self, _processor: Any, scheduler_stats: Any) -> None:
        if self.public is not None:
            self.public.gauges(scheduler_stats)

    def _aborted(self, _token: Any, rids: list[str], *_args: Any, **_kwargs: Any) -> None:
        for rid in rids:
            self._ended(self.fronts.answers.get(rid), now())

    def _died(self, _processor: Any, e: BaseException) -> None:
        self.voice.status("dead", f"{type(e).__name__}: {e}"[:500])


def _start(*_args: Any, **_kwargs: Any) -> int:
    return now()


def _text(prompt: Any) -> str:
    text = prompt.get("prompt") if isinstance(prompt, dict) else None
    return text if isinstance(text, str) else ""

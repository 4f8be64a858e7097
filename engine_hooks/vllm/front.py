"""Hooks for vLLM's front end: stages 1 to 3 and 10 of requests over HTTP and of `AsyncLLM`, on the
event loop.

All but the middleware sit on methods of base classes that every renderer, client and server goes
through, so that a request is found by its context (`http.current`) and nothing has to follow it
into the renderer's thread pool. `offline` adds what `LLM` needs.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine_hooks.base import http
from engine_hooks.base.emitter import Emitter
from engine_hooks.base.http import Front, Scope, current
from engine_hooks.base.patching import Hook, Patches, stamp
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm.answers import ROUTES, Answer, VllmFronts
from engine_hooks.vllm.public import PublicSteps
from engine_hooks.vllm.roles import Roles

_ALSO: Final = (b'"reasoning":"', b'"arguments":"', b'"token_ids":[')
"""What else a chat chunk may carry instead of text."""

_ADD: Final = "AsyncLLM.add_request"
_OPENAI: Final = "vllm.entrypoints.openai."
MIDDLEWARE: Final = "vllm.entrypoints.launchers.app:init_entrypoints_middleware"


class FrontMiddleware(http.TracingMiddleware):
    """The ASGI middleware. vLLM makes ids unique itself, so the request goes through untouched."""

    def __init__(self, app: http.App, fronts: http.Fronts) -> None:
        super().__init__(app, fronts, ROUTES)

    async def __call__(self, scope: Scope, receive: http.Receive, send: http.Send) -> None:
        if current.get() is None:
            await super().__call__(scope, receive, send)
        else:  # installed twice, by the hooks and by hand
            await self.app(scope, receive, send)

    def identify(self, received: events.Received, scope: Scope) -> tuple[str, Scope, None]:
        received.rid = ""  # the engine's to choose: see `VllmFronts.add`
        return uuid.uuid4().hex, scope, None

    def carries(self, front: Front, body: bytes) -> bool:
        """True for a chunk with output: not for the first one, with a role and an empty text."""
        at = body.find(front.needle)
        if at >= 0 and body[at + len(front.needle) : at + len(front.needle) + 1] != b'"':
            return True
        return any(needle in body for needle in _ALSO)


class FrontHooks:
    """The hooks of the front end in this process."""

    def __init__(self, emitter: Emitter, patches: Patches, roles: Roles) -> None:
        self.emitter = emitter
        self.patches = patches
        self.roles = roles
        self.fronts = VllmFronts(emitter)
        self.public: PublicSteps | None = None
        """Set where the engine core cannot be hooked."""

    def server_table(self) -> list[Hook]:
        chat = "chat_completion.serving:OpenAIServingChat.create_chat_completion"
        completion = "completion.serving:OpenAIServingCompletion.create_completion"
        responses = "responses.serving:OpenAIServingResponses.create_responses"
        routes = ((chat, (Stage.RECEIVE,)), (completion, ()), (responses, ()))
        return [
            Hook(MIDDLEWARE, (Stage.RECEIVE, Stage.STREAM), ("app",), after=self._served),
            *(Hook(_OPENAI + path, stages, ("request",), self._parsed, is_async=True)
              for path, stages in routes),
        ]  # fmt: skip

    def table(self) -> list[Hook]:
        renderer = "vllm.renderers.base:BaseRenderer."
        client = "vllm.v1.engine.async_llm:AsyncLLM."
        outputs = "vllm.v1.engine.output_processor:OutputProcessor."
        return [
            Hook(renderer + "render_chat_async", (Stage.TEMPLATE,), (), self._render,
                 is_async=True),
            Hook(renderer + "tokenize_prompts_async", (Stage.TEMPLATE, Stage.TOKENISE),
                 ("prompts",), self._tokenise, self._tokenised, is_async=True),
            Hook(client + "__init__", after=self._client),
            Hook(client + "add_request", (Stage.ADMISSION,), ("request_id", "prompt"),
                 self._handed, self._hand_over, self._hand_failed, is_async=True),
            Hook(outputs + "add_request", (Stage.ADMISSION, Stage.STREAM), ("request",),
                 self._added),
            Hook(outputs + "process_outputs", (), ("engine_core_outputs",),
                 stamp, self._processed),
            Hook("vllm.v1.engine.output_processor:RequestState.make_request_output",
                 after=self._made),
            Hook(outputs + "update_scheduler_stats", (), ("scheduler_stats",), self._gauges),
            Hook(outputs + "abort_requests", after=self._aborted),
            Hook(outputs + "propagate_error", (), ("e",), self._died),
        ]  # fmt: skip

    def start(self, *, server: bool) -> None:
        """Emit that this process is a front end, of a server or for callers of `AsyncLLM`."""
        parsed = "ASGI middleware → OpenAIServingChat.create_chat_completion"
        handed = "ASGI send" if server else "the caller"
        paths = {
            Stage.RECEIVE: parsed if server else _ADD,
            Stage.TEMPLATE: "BaseRenderer.render_chat_async → .tokenize_prompts_async",
            Stage.TOKENISE: "BaseRenderer.tokenize_prompts_async",
            Stage.STREAM: f"token ids on the host → OutputProcessor.process_outputs → {handed}",
        }
        self.cover(paths, [*(self.server_table() if server else ()), *self.table()])

    def cover(self, paths: Mapping[Stage, str], hooks: Sequence[Hook]) -> None:
        """Emit the coverage of the front end's stages, and of the core's estimated ones."""
        self.roles.play("api")
        self.emitter.cover_all(paths, self.patches.lost(hooks))
        if self.public is not None:
            self.public.report_coverage()

    def _client(self, *_: Any, **__: Any) -> None:
        self.start(server=False)

    # --- the server ---

    def _served(self, _token: Any, _result: Any, *args: Any, **kwargs: Any) -> None:
        app = kwargs["app"] if "app" in kwargs else args[1]
        app.add_middleware(FrontMiddleware, fronts=self.fronts)
        self.start(server=True)

    def _parsed(self, _serving: Any, request: Any, *_: Any, **__: Any) -> None:
        front = current.get()
        if front is not None and front.streaming < 0:
            streaming = bool(getattr(request, "stream", False))
            self.fronts.parsed(
                front, lambda name: getattr(request, name, None), streaming=streaming
            )

    # --- stages 2 to 4 ---

    def _render(self, *_: Any, **__: Any) -> None:
        self.fronts.start(current.get(), Stage.TEMPLATE, now())

    def _tokenise(self, _renderer: Any, prompts: Any, *_: Any, **__: Any) -> Front | None:
        return self.tokenising(current.get(), prompts)

    def tokenising(self, front: Front | None, prompts: Any) -> Front | None:
        """Note that the prompts of `front` are flat strings now and go to the tokeniser."""
        if front is None or Stage.TOKENISE in front.started:
            return None
        at, text = now(), prompt_text(prompts)
        front.prompt_text = text
        if Stage.TEMPLATE in front.started:
            ended = events.End(at, front.key, Stage.TEMPLATE, len(text) or -1)
            self.emitter.emit_lifecycle(ended)
        return self.fronts.start(front, Stage.TOKENISE, at)

    def _tokenised(self, front: Front | None, result: Any, *_: Any, **__: Any) -> None:
        if front is not None:
            self.tokenised(front, result)

    def tokenised(self, front: Front, result: Any) -> None:
        at = self.fronts.handed[front.key] = now()
        self.fronts.tokenised(front, at, token_ids(result))

    def _handed(self, client: Any, *_: Any, **__: Any) -> Any:
        at = now()
        if self.public is not None:
            self.public.blocks = (client.vllm_config.cache_config.num_gpu_blocks or 0) - 1
        if current.get() is not None:
            return None
        front = self.fronts.open_offline("AsyncLLM.generate", at, 1)
        self.emitter.emit_lifecycle(events.End(at, front.key, Stage.RECEIVE))
        self.fronts.handed[front.key] = at
        return current.set(front)

    def _hand_over(self, token: Any, *_: Any, **__: Any) -> None:
        if token is not None:
            current.reset(token)

    def _hand_failed(self, token: Any, error: BaseException, *_: Any, **__: Any) -> None:
        front = current.get()
        self._hand_over(token)
        if front is not None and token is not None:
            self.refused(front, error)

    def refused(self, front: Front, error: BaseException) -> None:
        at, reason = now(), f"{type(error).__name__}: {error}"[:500]
        self.emitter.emit_lifecycle(events.Finished(at, front.key, "failed", 0, reason))
        self.emitter.emit_lifecycle(events.Closed(at, front.key))
        self.fronts.close_offline(front, at)

    def _added(self, _processor: Any, request: Any, *_: Any, **__: Any) -> None:
        front = current.get()
        if front is None or request.request_id in self.fronts.answers:
            return
        answer = self.fronts.add(front, request.request_id, request.external_req_id or "")
        if answer.first:
            # What the client does between the token ids and this call (validation, copies) belongs
            # to the handing over.
            at = self.fronts.handed.pop(front.key, 0) or now()
            self.emitter.emit_lifecycle(events.Begin(at, front.key, Stage.ADMISSION))
            if Stage.TOKENISE not in front.started and request.prompt_token_ids:
                self.emitter.prompt(at, front.key, "", request.prompt_token_ids)

    # --- stage 10 ---

    def _processed(
        self, begin: int | None, result: Any, _processor: Any, engine_core_outputs: Any,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
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
                    self.fronts.report(front, at)
        for rid in result.reqs_to_abort:
            # A stop string was met, which only the front end knows: the engine will merely hear of
            # an abort.
            answer = answers.get(rid)
            if answer is not None and answer.first:
                front = answer.front
                self.emitter.emit_lifecycle(events.Finished(at, front.key, "stop", front.tokens))
        for output in engine_core_outputs:
            if output.finish_reason is not None:
                self._ended(answers.get(output.request_id), at)

    def _made(self, _token: Any, result: Any, state: Any, *_: Any, **__: Any) -> None:
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

    def _aborted(self, _token: Any, rids: list[str], *_: Any, **__: Any) -> None:
        for rid in rids:
            self._ended(self.fronts.answers.get(rid), now())

    def _died(self, _processor: Any, e: BaseException) -> None:
        self.emitter.status("dead", f"{type(e).__name__}: {e}")


def prompt_text(prompts: Any) -> str:
    """Return the text of the first of a renderer's prompts; empty where it has none."""
    text = prompts[0].get("prompt") if prompts and isinstance(prompts[0], dict) else None
    return text if isinstance(text, str) else ""


def token_ids(result: Any) -> Sequence[int]:
    """Return the token ids of the first of a renderer's tokenised prompts."""
    ids: Sequence[int] = (result[0].get("prompt_token_ids") if result else None) or ()
    return ids

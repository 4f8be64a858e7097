"""Hooks for `transformers serve`: the front end's half (stages 1-3 and 10), on the server's event
loop."""

from __future__ import annotations

import threading
from typing import Any, Final

from engine_hooks.base.emitter import Emitter, emitter
from engine_hooks.base.http import Front, Fronts, TracingMiddleware, current
from engine_hooks.base.model_name import model_name
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.base.prompt_text import IDS_KEPT, shortened
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage
from engine_hooks.transformers import continuous_batching

ROUTES: Final = {
    "/v1/chat/completions": b'"content":"',
    "/v1/completions": b'"text":"',
    "/v1/responses": b".delta",
}
"""Path → what stands in a streamed chunk that carries text (see `http.TracingMiddleware`)."""

_STREAMED_UNASKED: Final = ("/v1/responses",)
"""Paths whose answer is streamed unless the body says otherwise."""

_SERVING: Final = "transformers.cli.serving."
_HANDLERS: Final = (
    ("chat_completion:ChatCompletionHandler", "content"),
    ("completion:CompletionHandler", "text"),
)


class ServerHooks:
    """The hooks of the front end in this process."""

    def __init__(self, voice: Emitter) -> None:
        self.voice = voice
        self.fronts = Fronts(voice)
        self.patches = Patches(voice.fault)

    def install(self) -> None:
        """Put every hook in whose place is as we know it, and tell the coverage."""
        for hook in self.table():
            self.patches.put(hook)
        self.tell_coverage()

    def remove(self) -> None:
        """Take the hooks out. A server that is up keeps our middleware, which then finds nothing to
        tell."""
        self.patches.remove()

    def table(self) -> list[Hook]:
        """The places, each with the stages that depend on it."""
        rows = [
            Hook(
                _SERVING + "server:build_server", (Stage.RECEIVE, Stage.STREAM), after=self._built
            ),
            Hook(
                _SERVING + "utils:BaseHandler._validate_request",
                (Stage.RECEIVE,),
                ("body",),
                after=self._validated,
            ),
            Hook(
                "transformers.tokenization_utils_base:render_jinja_template",
                (Stage.TEMPLATE,),
                before=self._render,
                after=self._rendered,
            ),
            Hook(
                "transformers.processing_utils:render_jinja_template",
                (),
                before=self._render,
                after=self._rendered,
            ),
            Hook(
                "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",
                (Stage.TOKENISE,),
                before=self._tokenise,
                after=self._tokenised,
            ),
            Hook(
                _SERVING + "utils:CBStreamer.put",
                (Stage.STREAM,),
                ("output",),
                before=_start,
                after=self._put,
            ),
            Hook(
                _SERVING + "utils:CBGenerateManager.generate_streaming",
                (Stage.ADMISSION,),
                before=self._handed,
            ),
            Hook(
                _SERVING + "utils:CBGenerateManager.generate_non_streaming",
                (Stage.ADMISSION,),
                before=self._handed,
                is_async=True,
            ),
        ]
        for path, field in _HANDLERS:
            rows.append(
                Hook(
                    f"{_SERVING}{path}._build_chunk_sse",
                    (Stage.STREAM,),
                    (field,),
                    before=_start,
                    after=self._chunk(field),
                )
            )
        rows.append(
            Hook(
                _SERVING + "chat_completion:ChatCompletionHandler._build_completion",
                (),
                ("content",),
                after=self._whole("content", 1),
            )
        )
        rows.append(Hook(_SERVING + "completion:CompletionHandler._build_completion", (), ("text",),
                         after=self._whole("text", 1)))  # fmt: skip
        return rows

    def tell_coverage(self) -> None:
        """Say how the front end's stages are measured."""
        lost = {
            stage: (hook.path, reason)
            for hook in self.table()
            if (reason := self.patches.misses.get(hook.path))
            for stage in hook.stages
        }
        named = {
            Stage.RECEIVE: "ASGI middleware → BaseHandler._validate_request",
            Stage.TEMPLATE: "tokenization_utils_base.render_jinja_template",
            Stage.TOKENISE: "PreTrainedTokenizerBase.__call__",
            Stage.STREAM: "prepare_batch_update → CBStreamer.put → ASGI send",
        }
        for stage, path in named.items():
            if stage in lost:
                self.voice.cover(stage, "unavailable", *lost[stage])
            else:
                self.voice.cover(stage, "measured", path)

    # --- stages 1 to 3 ---

    def _built(self, _token: Any, app: Any, *_args: Any, **_kwargs: Any) -> None:
        app.add_middleware(TracingMiddleware, fronts=self.fronts, routes=ROUTES)

    def _validated(
        self, _token: Any, _result: Any, _handler: Any, body: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        front = current.get()
        if front is None or not isinstance(body, dict):
            return
        at = now()
        self.voice.emit_lifecycle(events.End(at, front.key, Stage.RECEIVE, front.size_in))
        front.streaming = int(bool(body.get("stream", front.route in _STREAMED_UNASKED)))
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        messages = body.get("messages")
        self.voice.emit_lifecycle(
            events.Params(
                at,
                front.key,
                front.streaming,
                str(body.get("user") or "")[:128],
                model_name(body.get("model")),
                limit if isinstance(limit, int) else -1,
                len(messages) if isinstance(messages, list) else -1,
                int(bool(body.get("logprobs"))),
            )
        )

    def _render(self, *_args: Any, **_kwargs: Any) -> Front | None:
        front = current.get()
        if front is None or front.templated:
            return None
        front.templated = True
        self.voice.emit_lifecycle(events.Begin(now(), front.key, Stage.TEMPLATE))
        return front

    def _rendered(self, front: Front | None, result: Any, *_args: Any, **_kwargs: Any) -> None:
        if front is None:
            return
        at = now()
        texts = result[0] if isinstance(result, tuple) else result
        text = texts[0] if isinstance(texts, list) and texts else ""
        front.prompt_text = text if isinstance(text, str) else ""
        self.voice.emit_lifecycle(events.End(at, front.key, Stage.TEMPLATE, len(front.prompt_text)))

    def _tokenise(self, *_args: Any, **_kwargs: Any) -> Front | None:
        front = current.get()
        if front is None or front.tokenised:
            return None
        front.tokenised = True
        self.voice.emit_lifecycle(events.Begin(now(), front.key, Stage.TOKENISE))
        return front

    def _tokenised(
        self,
        front: Front | None,
        result: Any,
        _tokeniser: Any,
        text: Any = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        if front is None:
            return
        at = now()
        ids = result["input_ids"]
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if ids and isinstance(ids[0], list):
            ids = ids[0]
        self.voice.emit_lifecycle(events.End(at, front.key, Stage.TOKENISE, len(ids)))
        prompt = front.prompt_text or (text if isinstance(text, str) else "")
        front.prompt_text = ""
        chars = len(prompt)
        prompt = shortened(prompt)
        self.voice.emit_lifecycle(
            events.Prompt(at, front.key, prompt, chars, pack_u32(ids[:IDS_KEPT]), len(ids))
        )

    def _handed(self, *_args: Any, **_kwargs: Any) -> None:
        front = current.get()
        if front is not None:
            self.voice.emit_lifecycle(events.Begin(now(), front.key, Stage.ADMISSION))

    # --- stage 10 ---

    def _put(
        self,
        begin: int | None,
        _result: Any,
        streamer: Any,
        _output: Any,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        front = self.fronts.by_rid.get(streamer._request_id)
        if front is not None and begin is not None:
            front.tokens = streamer.total_tokens
            front.work += now() - begin

    def _chunk(self, field: str) -> Any:
        def built(
            begin: int | None, _result: Any, _handler: Any, *_args: Any, **kwargs: Any
        ) -> None:
            front = current.get()
            if front is None or begin is None:
                return
            front.work += now() - begin
            text = kwargs.get(field)
            if isinstance(text, str) and text:
                front.text.append(text)

        return built

    def _whole(self, field: str, position: int) -> Any:
        def built(_token: Any, _result: Any, _handler: Any, *args: Any, **kwargs: Any) -> None:
            front = current.get()
            if front is None:
                return
            text = kwargs.get(field, args[position] if len(args) > position else "")
            if isinstance(text, str) and text:
                front.text.append(text)

        return built


def _start(*_args: Any, **_kwargs: Any) -> int:
    return now()


_hooks: ServerHooks | None = None
_lock = threading.RLock()  # putting hooks in imports the engine, which may ask for them again


def install_server() -> ServerHooks:
    """Put the front end's hooks into this process, once."""
    global _hooks
    with _lock:
        if _hooks is None:
            continuous_batching.install_engine().serving()
            _hooks = ServerHooks(emitter())
            _hooks.install()
        return _hooks


def remove_server() -> None:
    """Take the front end's hooks out again."""
    global _hooks
    with _lock:
        if _hooks is not None:
            _hooks.remove()
            _hooks = None

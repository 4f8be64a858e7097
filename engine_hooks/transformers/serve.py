"""Hooks for `transformers serve`: the front end's half (stages 1-3 and 10), on the server's event
loop."""

from __future__ import annotations

import threading
from typing import Any, Final

from engine_hooks.base.emitter import Emitter, emitter
from engine_hooks.base.http import Front, Fronts, TracingMiddleware, current
from engine_hooks.base.patching import After, Hook, Patches, stamp
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.transformers import continuous_batching

ROUTES: Final = {
    "/v1/chat/completions": b'"content":"',
    "/v1/completions": b'"text":"',
    "/v1/responses": b".delta",
}
"""Path → bytes of a streamed chunk that carries text (see `http.TracingMiddleware`)."""

_STREAMED_UNASKED: Final = ("/v1/responses",)
"""Paths whose answer is streamed unless the body says otherwise."""

_SERVING: Final = "transformers.cli.serving."
_TOKENISER: Final = "transformers.tokenization_utils_base:"
_CHAT: Final = _SERVING + "chat_completion:ChatCompletionHandler."
_COMPLETION: Final = _SERVING + "completion:CompletionHandler."


class ServerHooks:
    """The hooks of the front end in this process."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.fronts = Fronts(emitter)
        self.patches = Patches(emitter.fault)

    def install(self) -> None:
        self.patches.install(*self.table())
        paths = {
            Stage.RECEIVE: "ASGI middleware → BaseHandler._validate_request",
            Stage.TEMPLATE: "tokenization_utils_base.render_jinja_template",
            Stage.TOKENISE: "PreTrainedTokenizerBase.__call__",
            Stage.STREAM: "prepare_batch_update → CBStreamer.put → ASGI send",
        }
        self.emitter.cover_all(paths, self.patches.lost(self.table()))

    def table(self) -> list[Hook]:
        receive, stream, admission = (Stage.RECEIVE,), (Stage.STREAM,), (Stage.ADMISSION,)
        render, rendered, utils = self._render, self._rendered, _SERVING + "utils:"
        return [
            Hook(_SERVING + "server:build_server", (*receive, *stream), after=self._built),
            Hook(utils + "BaseHandler._validate_request", receive, ("body",), after=self._parsed),
            Hook(_TOKENISER + "render_jinja_template", (Stage.TEMPLATE,), (), render, rendered),
            Hook("transformers.processing_utils:render_jinja_template", (), (), render, rendered),
            Hook(_TOKENISER + "PreTrainedTokenizerBase.__call__", (Stage.TOKENISE,), (),
                 self._tokenise, self._tokenised),
            Hook(utils + "CBStreamer.put", stream, ("output",), stamp, self._streamed),
            Hook(utils + "CBGenerateManager.generate_streaming", admission, (), self._handed),
            Hook(utils + "CBGenerateManager.generate_non_streaming", admission, (), self._handed,
                 is_async=True),
            Hook(_CHAT + "_build_chunk_sse", stream, ("content",), stamp, _built_with("content")),
            Hook(_COMPLETION + "_build_chunk_sse", stream, ("text",), stamp, _built_with("text")),
            Hook(_CHAT + "_build_completion", (), ("content",), after=_built_with("content", 1)),
            Hook(_COMPLETION + "_build_completion", (), ("text",), after=_built_with("text", 1)),
        ]  # fmt: skip

    # --- stages 1 to 3 ---

    def _built(self, _token: Any, app: Any, *_: Any, **__: Any) -> None:
        app.add_middleware(TracingMiddleware, fronts=self.fronts, routes=ROUTES)

    def _parsed(
        self, _token: Any, _result: Any, _handler: Any, body: Any, *_: Any, **__: Any
    ) -> None:
        front = current.get()
        if front is not None and isinstance(body, dict):
            streaming = bool(body.get("stream", front.route in _STREAMED_UNASKED))
            self.fronts.parsed(front, body.get, streaming=streaming)

    def _render(self, *_: Any, **__: Any) -> Front | None:
        return self.fronts.start(current.get(), Stage.TEMPLATE, now())

    def _rendered(self, front: Front | None, result: Any, *_: Any, **__: Any) -> None:
        if front is None:
            return
        at = now()
        texts = result[0] if isinstance(result, tuple) else result
        text = texts[0] if isinstance(texts, list) and texts else ""
        front.prompt_text = text if isinstance(text, str) else ""
        ended = events.End(at, front.key, Stage.TEMPLATE, len(front.prompt_text))
        self.emitter.emit_lifecycle(ended)

    def _tokenise(self, *_: Any, **__: Any) -> Front | None:
        return self.fronts.start(current.get(), Stage.TOKENISE, now())

    def _tokenised(
        self,
        front: Front | None,
        result: Any,
        _tokeniser: Any,
        text: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if front is None:
            return
        at = now()
        ids = result["input_ids"]
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        if ids and isinstance(ids[0], list):
            ids = ids[0]
        if not front.prompt_text and isinstance(text, str):
            front.prompt_text = text
        self.fronts.tokenised(front, at, ids)

    def _handed(self, *_: Any, **__: Any) -> None:
        front = current.get()
        if front is not None:
            self.emitter.emit_lifecycle(events.Begin(now(), front.key, Stage.ADMISSION))

    # --- stage 10 ---

    def _streamed(self, begin: int | None, _result: Any, streamer: Any, *_: Any, **__: Any) -> None:
        front = self.fronts.by_rid.get(streamer._request_id)
        if front is not None and begin is not None:
            front.tokens = streamer.total_tokens
            front.work += now() - begin


def _built_with(field: str, position: int = -1) -> After:
    """Keep the text of argument `field`, of which a chunk or a whole answer was built; `position`
    where the argument may also be positional. The time since a `stamp` counts as work."""

    def built(begin: int | None, _result: Any, _handler: Any, *args: Any, **kwargs: Any) -> None:
        front = current.get()
        if front is None:
            return
        if begin is not None:
            front.work += now() - begin
        text = kwargs.get(field, args[position] if 0 <= position < len(args) else "")
        if isinstance(text, str) and text:
            front.text.append(text)

    return built


_hooks: ServerHooks | None = None
_lock = threading.RLock()  # installing hooks imports the engine, which may ask for them again


def install_server() -> ServerHooks:
    global _hooks
    with _lock:
        if _hooks is None:
            continuous_batching.install_engine().serving()
            _hooks = ServerHooks(emitter())
            _hooks.install()
        return _hooks

"""Hooks for vLLM's `LLM`: a request without a socket, on the caller's own thread.

`LLM` renders and tokenises a prompt before the request has an id, one prompt after the other. Those
instants are kept in a draft and emitted once the engine takes the request; a rendering that becomes
no request (a warm-up) is never emitted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from engine_hooks.base.http import current
from engine_hooks.base.patching import Hook
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm.front import FrontHooks, prompt_text, token_ids


class Draft(threading.local):
    """The prompt that this thread prepares. Instants in monotonic ns, 0 where they did not come."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.template = self.tokenise = self.tokenised = 0
        self.text = ""
        self.ids: Sequence[int] = ()


class OfflineHooks:
    """The hooks of `LLM` in this process."""

    def __init__(self, front: FrontHooks) -> None:
        self.front = front
        self.draft = Draft()

    def table(self) -> list[Hook]:
        renderer = "vllm.renderers.base:BaseRenderer."
        engine = "vllm.v1.engine.llm_engine:LLMEngine."
        return [
            Hook(renderer + "render_chat", (Stage.TEMPLATE,), before=self._render),
            Hook(renderer + "tokenize_prompts", (Stage.TEMPLATE, Stage.TOKENISE), ("prompts",),
                 self._tokenise, self._tokenised),
            Hook(engine + "__init__", after=self._made),
            Hook(engine + "add_request", (Stage.RECEIVE, Stage.ADMISSION), ("request_id",),
                 self._add, self._added, self._refused),
        ]  # fmt: skip

    def start(self) -> None:
        """Note that this process has an `LLM`, and emit how its front end's stages are measured."""
        paths = {
            Stage.RECEIVE: "LLM.generate, LLM.chat",
            Stage.TEMPLATE: "BaseRenderer.render_chat → .tokenize_prompts",
            Stage.TOKENISE: "BaseRenderer.tokenize_prompts",
            Stage.STREAM: "OutputProcessor.process_outputs",
        }
        self.front.cover(paths, [*self.table(), *self.front.table()])

    def _made(self, *_: Any, **__: Any) -> None:
        self.start()

    def _render(self, *_: Any, **__: Any) -> None:
        if current.get() is None:
            self.draft.clear()
            self.draft.template = now()

    def _tokenise(self, _renderer: Any, prompts: Any, *_: Any, **__: Any) -> Any:
        front = current.get()
        if front is not None:
            return self.front.tokenising(front, prompts)
        draft = self.draft
        if draft.tokenise:  # the last one became no request
            draft.clear()
        draft.tokenise = now()
        draft.text = prompt_text(prompts)
        return None

    def _tokenised(self, front: Any, result: Any, *_: Any, **__: Any) -> None:
        if front is not None:
            self.front.tokenised(front, result)
        elif current.get() is None:
            self.draft.tokenised = now()
            self.draft.ids = token_ids(result)

    def _add(self, _engine: Any, *_: Any, **__: Any) -> Any:
        if current.get() is not None:
            return None
        at = now()
        draft, fronts, emit = self.draft, self.front.fronts, self.front.emitter.emit_lifecycle
        begin = draft.template or draft.tokenise or at
        front = fronts.open_offline("LLM.chat" if draft.template else "LLM.generate", begin, 0)
        key = front.key
        emit(events.End(begin, key, Stage.RECEIVE))
        if draft.template and draft.tokenise:
            front.started.add(Stage.TEMPLATE)
            emit(events.Begin(draft.template, key, Stage.TEMPLATE))
            emit(events.End(draft.tokenise, key, Stage.TEMPLATE, len(draft.text)))
        if draft.tokenised:
            front.started.add(Stage.TOKENISE)
            emit(events.Begin(draft.tokenise, key, Stage.TOKENISE))
            front.prompt_text = draft.text
            fronts.tokenised(front, draft.tokenised, draft.ids)
        fronts.handed[key] = draft.tokenised or at
        draft.clear()
        return front, current.set(front)

    def _added(self, token: Any, *_: Any, **__: Any) -> None:
        if token is not None:
            current.reset(token[1])

    def _refused(self, token: Any, error: BaseException, *_: Any, **__: Any) -> None:
        if token is not None:
            current.reset(token[1])
            self.front.refused(token[0], error)

"""Hooks for vLLM's `LLM`: a request without a socket, on the caller's own thread.

`LLM` renders and tokenises a prompt before the request has an id, one prompt after the other. Those
instants are kept in a draft and told once the engine takes the request; a rendering that becomes no
request (a warm-up) is never told.
"""

from __future__ import annotations

import threading
from typing import Any

from engine_hooks.base.http import current
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.base.prompt_text import IDS_KEPT, shortened
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm.front import FrontHooks


class Draft(threading.local):
    """What happened to the prompt that this thread prepares. Monotonic ns, 0 where it did not;
    `ids` its first token ids, packed, of `length` in all."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is being prepared."""
        self.template = self.tokenise = self.tokenised = 0
        self.text = ""
        self.ids = b""
        self.length = 0


class OfflineHooks:
    """The hooks of `LLM` in this process. `on_llm` is called when one is made."""

    def __init__(self, front: FrontHooks, patches: Patches, on_llm: Any) -> None:
        self.front = front
        self.patches = patches
        self.draft = Draft()
        self._on_llm = on_llm

    def table(self) -> list[Hook]:
        """The places, each with the stages that depend on it."""
        renderer = "vllm.renderers.base:BaseRenderer."
        engine = "vllm.v1.engine.llm_engine:LLMEngine."
        return [
            Hook(renderer + "render_chat", (Stage.TEMPLATE,), (), before=self._render),
            Hook(renderer + "tokenize_prompts", (Stage.TEMPLATE, Stage.TOKENISE), ("prompts",),
                 before=self._tokenise, after=self._tokenised),
            Hook(engine + "__init__", (), (), after=self._made),
            Hook(engine + "add_request", (Stage.RECEIVE, Stage.ADMISSION), ("request_id",),
                 before=self._add, after=self._added, failed=self._refused),
        ]  # fmt: skip

    def install(self) -> None:
        """Put every hook in whose place is as we know it."""
        for hook in self.table():
            self.patches.put(hook)

    def tell_coverage(self) -> None:
        """Say how the front end's stages are measured for `LLM`."""
        voice = self.front.voice
        lost = self.patches.lost([*self.table(), *self.front.table()])
        named = {
            Stage.RECEIVE: "LLM.generate, LLM.chat",
            Stage.TEMPLATE: "BaseRenderer.render_chat → .tokenize_prompts",
            Stage.TOKENISE: "BaseRenderer.tokenize_prompts",
            Stage.STREAM: "OutputProcessor.process_outputs",
        }
        for stage, path in named.items():
            if stage in lost:
                voice.cover(stage, "unavailable", *lost[stage])
            else:
                voice.cover(stage, "measured", path)
        if self.front.public is not None:
            self.front.public.tell_coverage()

    def _made(self, _token: Any, _result: Any, engine: Any, *_args: Any, **_kwargs: Any) -> None:
        self._on_llm(engine)

    def _render(self, *_args: Any, **_kwargs: Any) -> None:
        if current.get() is None:
            self.draft.clear()
            self.draft.template = now()

    def _tokenise(self, _renderer: Any, prompts: Any, *_args: Any, **_kwargs: Any) -> Any:
        front = current.get()
        if front is not None:
            return self.front.tokenising(front, prompts)
        draft = self.draft
        if draft.tokenise:  # the last one became no request
            draft.clear()
        draft.tokenise = now()
        text = prompts[0].get("prompt") if prompts and isinstance(prompts[0], dict) else None
        draft.text = text if isinstance(text, str) else ""
        return None

    def _tokenised(self, front: Any, result: Any, *_args: Any, **_kwargs: Any) -> None:
        if front is not None:
            self.front.tokenised(front, result)
        elif current.get() is None:
            self.draft.tokenised = now()
            ids = (result[0].get("prompt_token_ids") if result else None) or ()
            self.draft.ids, self.draft.length = pack_u32(ids[:IDS_KEPT]), len(ids)

    def _add(self, _engine: Any, *_args: Any, **_kwargs: Any) -> Any:
        if current.get() is not None:
            return None
        at = now()
        draft, fronts, emit = self.draft, self.front.fronts, self.front.voice.emit_lifecycle
        begin = draft.template or draft.tokenise or at
        front = fronts.open_offline("LLM.chat" if draft.template else "LLM.generate", begin, 0)
        key = front.key
        emit(events.End(begin, key, Stage.RECEIVE))
        if draft.template and draft.tokenise:
            front.templated = True
            emit(events.Begin(draft.template, key, Stage.TEMPLATE))
            emit(events.End(draft.tokenise, key, Stage.TEMPLATE, len(draft.text)))
        if draft.tokenised:
            front.tokenised = True
            emit(events.Begin(draft.tokenise, key, Stage.TOKENISE))
            emit(events.End(draft.tokenised, key, Stage.TOKENISE, draft.length))
            text, chars = shortened(draft.text), len(draft.text) or -1
            emit(events.Prompt(draft.tokenised, key, text, chars, draft.ids, draft.length))
        fronts.handed[key] = draft.tokenised or at
        draft.clear()
        return front, current.set(front)

    def _added(self, token: Any, *_args: Any, **_kwargs: Any) -> None:
        if token is not None:
            current.reset(token[1])

    def _refused(self, token: Any, error: BaseException, *_args: Any, **_kwargs: Any) -> None:
        if token is not None:
            current.reset(token[1])
            self.front.refused(token[0], error)

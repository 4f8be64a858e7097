"""Hooks inside an engine's process. One line traces it:

    import engine_hooks
    handle = engine_hooks.attach(model_or_manager)
    ...
    handle.detach()

Then `tracer attach` in another terminal shows its requests. `tracer run -- CMD` does the same to a command that knows
nothing of tracer.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["Handle", "UnknownEngineError", "attach"]


class UnknownEngineError(TypeError):
    """The object is no engine, model or manager that we know."""


class Handle:
    """What `attach` returns. The hooks are in until the last handle of the process is detached."""

    def __init__(self, remove: Any) -> None:
        self._remove = remove
        self._attached = True

    @property
    def coverage(self) -> dict[str, tuple[str, str]]:
        """Stage id → (status, reason), as `tracer doctor` shows it."""
        from engine_hooks.emitter import emitter
        from tracer.stages import Stage

        return {Stage(n).id: (event.status, event.reason) for n, event in sorted(emitter().coverage.items())}

    def detach(self) -> None:
        """Take the hooks out and close the socket: the engine is as it was. Calling it again does nothing."""
        if self._attached:
            self._attached = False
            _release(self._remove)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.detach()


_lock = threading.Lock()
_handles = 0


def _release(remove: Any) -> None:
    global _handles
    with _lock:
        _handles -= 1
        if _handles == 0:
            remove()


def _family(target: Any) -> str:
    """Top-level packages of the target's classes tell the engine; the target's own class may be the user's."""
    for cls in type(target).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in ("transformers", "vllm"):
            return package
    raise UnknownEngineError(
        f"a {type(target).__name__} is no engine that tracer knows; it takes a transformers model or "
        "ContinuousBatchingManager, or a vLLM LLM or AsyncLLM"
    )


def attach(target: Any) -> Handle:
    """Trace the engine that `target` belongs to: a transformers model or `ContinuousBatchingManager`, or a vLLM engine.

    Works before the first request and in the middle of traffic; requests that are already inside are shown from now on,
    marked incomplete. Raises UnknownEngineError for anything else; a part of the engine that cannot be hooked does not
    raise but shows in `Handle.coverage`.
    """
    global _handles
    family = _family(target)
    if family == "vllm":
        if "engine_hooks.vllm" not in sys.modules:
            raise UnknownEngineError("vLLM engines in this process are traced from their start: set TRACER=1")
        raise UnknownEngineError("this vLLM engine was started without TRACER=1")
    from engine_hooks import transformers_cb

    with _lock:
        hooks = transformers_cb.install_engine()
        _handles += 1
    hooks.adopt(target)
    return Handle(transformers_cb.remove_engine)

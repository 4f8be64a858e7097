"""Hooks inside an engine's process. One line traces it:

    import engine_hooks
    handle = engine_hooks.attach(model_or_manager)
    ...
    handle.detach()

Then `tracer attach` in another terminal shows its requests. `tracer run -- CMD` does the same to a
command that knows nothing of tracer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_hooks.protocol.errors import UnknownEngineError

__all__ = ["Handle", "UnknownEngineError", "attach"]


@dataclass(slots=True, eq=False, repr=False)
class Handle:
    """A traced engine, as `attach` returns it. The hooks stay until the last handle on this kind of
    engine is detached."""

    _family: str
    _remove: Callable[[], None]
    _attached: bool = True

    @property
    def coverage(self) -> dict[str, tuple[str, str]]:
        """Stage id → (status, reason), as `tracer doctor` shows it."""
        from engine_hooks.base.emitter import emitter
        from engine_hooks.protocol.stages import Stage

        found = sorted(emitter().coverage.items())
        return {Stage(n).id: (event.status, event.reason) for n, event in found}

    def detach(self) -> None:
        """Remove the hooks and close the socket. Does nothing the second time."""
        if self._attached:
            self._attached = False
            with _lock:
                _handles[self._family] -= 1
                if _handles[self._family] == 0:
                    self._remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.detach()


_lock = threading.Lock()
_handles: Counter[str] = Counter()


def _family(target: Any) -> str:
    """Return the engine's name. The target's own class may be the user's: its bases count too."""
    for cls in type(target).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in ("transformers", "vllm"):
            return package
    raise UnknownEngineError(
        f"a {type(target).__name__} is no engine that tracer knows; give a transformers model or "
        "ContinuousBatchingManager, or a vLLM LLM or AsyncLLM"
    )


def attach(target: Any) -> Handle:
    """Trace the engine that `target` belongs to: a transformers model or
    `ContinuousBatchingManager`, or a vLLM engine.

    Works before the first request and in the middle of traffic; requests that are already inside
    are shown from now on, marked incomplete. Raises UnknownEngineError for anything else, and for a
    vLLM engine whose core runs in another process that was started without ``TRACER=1``; a part of
    the engine that cannot be hooked does not raise but shows in `Handle.coverage`.
    """
    family = _family(target)
    with _lock:
        if family == "vllm":
            from engine_hooks.vllm import plugin

            plugin.attach(target)
            remove = plugin.remove
        else:
            from engine_hooks.transformers import continuous_batching

            hooks = continuous_batching.install_engine()
            remove = continuous_batching.remove_engine
        _handles[family] += 1
    if family == "transformers":
        hooks.adopt(target)
    return Handle(family, remove)

"""How `tracer run -- CMD` reaches an unmodified engine.

The child gets an environment in which Python finds our `sitecustomize` first. That installs a
finder that waits for the modules of a known engine to be imported and then installs the hooks.
Until such a module is imported nothing else of ours is loaded: a child that is no engine (pip, a
shell's helper) opens no socket and pays about a millisecond.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Final

from engine_hooks.protocol.environment import FAULT

WATCHED: Final[dict[str, tuple[str, str]]] = {
    "transformers.generation.continuous_batching.continuous_api": (
        "engine_hooks.transformers.continuous_batching",
        "install_engine",
    ),
    "transformers.cli.serving.server": ("engine_hooks.transformers.serve", "install_server"),
    "vllm.plugins": ("engine_hooks.vllm.plugin", "follow_plugins"),
    "vllm.entrypoints.launchers.app": ("engine_hooks.vllm.plugin", "install_server"),
}
"""Engine module → (module of ours, function called after it was imported)."""


class _Watcher(importlib.abc.MetaPathFinder):
    """Lets the other finders find a watched module, and its loader call our installer."""

    def __init__(self) -> None:
        self._inside: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in WATCHED or fullname in self._inside:
            return None
        self._inside.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._inside.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that runs the hooks' installer after the module."""

    def __init__(self, inner: importlib.abc.Loader, fullname: str) -> None:
        self._inner = inner
        self._fullname = fullname

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        call_installer(self._fullname)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def call_installer(watched: str) -> None:
    """Install the hooks of one watched module. Errors go to stderr, and the engine goes on.

    vLLM imports transformers for its tokenisers and configurations, generation included: that is no
    engine of its own.
    """
    if watched.startswith("transformers.") and "vllm" in sys.modules:
        return
    module_name, function_name = WATCHED[watched]
    try:
        # the fault lab: an engine that has a fault, around which the hooks go
        if os.environ.get(FAULT):
            import_module("engine_hooks.faults.injection").inject(watched)
        getattr(import_module(module_name), function_name)()
    except Exception as error:
        sys.stderr.write(f"tracer: hooks for {watched} are off: {type(error).__name__}: {error}\n")


def install() -> None:
    """Wait for engines in this process. Modules that are imported already are hooked at once."""
    import importlib.util  # noqa: F401  (used by the watcher; not always loaded this early)

    if any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watcher())
    for watched in WATCHED:
        if watched in sys.modules:
            call_installer(watched)

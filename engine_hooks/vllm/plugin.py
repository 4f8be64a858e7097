"""The vLLM adapter: an installed vLLM loads it as a plugin in each of its processes
(``vllm.general_plugins``). Inert unless ``TRACER=1`` is set.

Which part a process plays (API server, engine core, worker, or all of them in one) is not known
when the plugin is loaded: a forked process does not load it again, a spawned one does so too late
for some of its hooks. So the hooks of every role are installed in every process as soon as their
modules are there, and the first of them that is called decides the role.

The hook tables are in `front` and `offline` (stages 1 to 3, 10), `core` (4, 5, 11, 12) and `worker`
(6 to 9). Where the core's are gone, `public` makes do with what vLLM itself reports.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Final

from engine_hooks.base.emitter import Emitter, emitter
from engine_hooks.base.patching import Patches
from engine_hooks.protocol.errors import UnknownEngineError
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm.core import CoreHooks
from engine_hooks.vllm.front import FrontHooks
from engine_hooks.vllm.offline import OfflineHooks
from engine_hooks.vllm.public import PublicSteps
from engine_hooks.vllm.roles import Roles
from engine_hooks.vllm.worker import WorkerHooks

_SERVER: Final = "vllm.entrypoints.launchers.app"
_WORKERS_ELSEWHERE: Final = (
    "its workers run in processes of their own: set TRACER=1 before the engine is made"
)


class VllmHooks:
    """All hooks of this process."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.patches = Patches(emitter.fault)
        roles = Roles(emitter)
        self.core = CoreHooks(emitter, self.patches, roles)
        self.worker = WorkerHooks(emitter, self.patches, roles)
        self.front = FrontHooks(emitter, self.patches, roles)
        self.offline = OfflineHooks(self.front)

    def install(self) -> None:
        """Install the hooks whose modules every process loads anyway. The server's own follow with
        its module, the model runner's once it is known which one runs."""
        self.core.install()
        self.worker.install()
        self.patches.install(*self.front.table(), *self.offline.table())
        if _SERVER in sys.modules:
            self.install_server()
        lost = self.core.lost()
        if Stage.DECODE in lost:
            self.front.public = PublicSteps(self.emitter, lost)

    def install_server(self) -> None:
        self.patches.install(*self.front.server_table())

    def adopt(self, core: Any) -> None:
        """Follow an engine from before the hooks. `core`: its engine core, if in this process."""
        if core is not None:
            wrapper = getattr(core.model_executor, "driver_worker", None)
            worker = getattr(wrapper, "worker", None)
            if worker is not None:
                self.worker.adopt(worker)
            else:
                for stage in (Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE):
                    self.emitter.cover(stage, "unavailable", "", _WORKERS_ELSEWHERE)
            self.core.adopt(core.scheduler)
        self.offline.start()

    def remove(self) -> None:
        self.patches.remove()
        self.core.remove()
        self.worker.remove()


_hooks: VllmHooks | None = None
_lock = threading.RLock()  # installing hooks imports the engine, which may load the plugin again


def hooks() -> VllmHooks:
    """Return the hooks of this process, installed at the first call."""
    global _hooks
    with _lock:
        if _hooks is None:
            _hooks = VllmHooks(emitter())
            _hooks.install()
        return _hooks


def register() -> None:
    """Install the hooks in a process of vLLM, if ``TRACER=1``. Never raises."""
    if os.environ.get("TRACER") != "1":
        return
    try:
        hooks()
    except Exception as error:
        sys.stderr.write(f"tracer: hooks for vLLM are off: {type(error).__name__}: {error}\n")


def install_server() -> None:
    if _hooks is not None:
        _hooks.install_server()


def follow_plugins() -> None:
    """Load the hooks with vLLM's plugins, whatever ``VLLM_PLUGINS`` names and whether or not this
    package was installed with its entry point."""
    import vllm.plugins as loader

    original = loader.load_general_plugins

    def load_general_plugins() -> None:
        original()
        register()

    load_general_plugins.__doc__ = original.__doc__
    loader.load_general_plugins = load_general_plugins


def attach(engine: Any) -> None:
    """Install the hooks for an `LLM`, `LLMEngine` or `AsyncLLM` that exists already.

    Raises UnknownEngineError when its core runs in another process that has no hooks: nothing can
    be installed there.
    """
    inner = getattr(engine, "llm_engine", engine)
    client = getattr(inner, "engine_core", None)
    if client is None:
        raise UnknownEngineError(
            f"a {type(engine).__name__} is no vLLM engine: give the LLM or AsyncLLM that holds it"
        )
    core = getattr(client, "engine_core", None)
    if core is None and _hooks is None:
        raise UnknownEngineError(
            "this vLLM engine runs its core in another process: set TRACER=1 before it is made, or "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 to keep it in this one"
        )
    hooks().adopt(core)


def remove() -> None:
    global _hooks
    with _lock:
        if _hooks is not None:
            _hooks.remove()
            _hooks.emitter.stop()
            _hooks = None

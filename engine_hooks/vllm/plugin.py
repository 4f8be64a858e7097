"""The vLLM adapter: an installed vLLM loads it as a plugin in each of its processes
(``vllm.general_plugins``).

It does nothing unless ``TRACER=1`` is set. Which part a process plays (API server, engine core,
worker, or all of them in one) is not known when the plugin is loaded: a forked process does not
load it again, a spawned one does so too late for some of its hooks. So the hooks of every role go
into every process as soon as their modules are there, and the first of them that is called tells
the role.

The hook tables are in `front` and `offline` (stages 1 to 3, 10), `core` (4, 5, 11,
12) and `worker` (6 to 9). Where the core's are gone, `public` makes do with what vLLM
itself tells.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any, Final

from engine_hooks.base.emitter import Emitter, emitter
from engine_hooks.base.patching import Patches
from engine_hooks.protocol.errors import UnknownEngineError
from engine_hooks.protocol.stages import Stage
from engine_hooks.vllm.core import BOOT, CoreHooks
from engine_hooks.vllm.front import FrontHooks
from engine_hooks.vllm.offline import OfflineHooks
from engine_hooks.vllm.public import PublicSteps
from engine_hooks.vllm.worker import WorkerHooks

_SERVER: Final = "vllm.entrypoints.launchers.app"
_RUST: Final = "VLLM_USE_RUST_FRONTEND"


class VllmHooks:
    """All hooks of this process."""

    def __init__(self, voice: Emitter) -> None:
        self.voice = voice
        self.patches = Patches(voice.fault)
        self.core = CoreHooks(voice, self.patches, self._is_core)
        self.worker = WorkerHooks(voice, self.patches, self._is_worker)
        self.front = FrontHooks(voice, self.patches, self._is_client, self.serve)
        self.offline = OfflineHooks(self.front, self.patches, self._is_llm)
        self._roles: set[str] = set()
        self._pid = os.getpid()
        self._server = False

    def install(self) -> None:
        """Put the hooks in whose modules every process loads anyway. The server's own follow with
        its module, the model runner's once it is known which one runs."""
        self.core.install()
        for hook in self.worker.boot():
            self.patches.put(hook)
        self.front.install()
        self.offline.install()
        if _SERVER in sys.modules:
            self.install_server()
        public = PublicSteps(self.voice, self.core.lost())
        if public.needed:
            self.front.public = public
        self._tell_misses()

    def install_server(self) -> None:
        """Put the HTTP server's hooks in, once."""
        if not self._server:
            self._server = True
            self.front.install_server()

    def adopt(self, core: Any) -> None:
        """An engine that was made before the hooks were in. `core` is its engine core where that is
        in this process."""
        if core is not None:
            wrapper = getattr(core.model_executor, "driver_worker", None)
            worker = getattr(wrapper, "worker", None)
            if worker is not None:
                self.worker.adopt(worker)
            else:
                for stage in (Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE):
                    reason = (
                        "its workers run in processes of their own: set TRACER=1 before the engine "
                        "is made"
                    )
                    self.voice.cover(stage, "unavailable", "", reason)
            self.core.adopt(core.scheduler)
        self._is_llm(None)

    def remove(self) -> None:
        """Take everything out: the engine is as it was."""
        self.patches.remove()
        self.core.remove()
        self.worker.remove()

    def _tell_misses(self) -> None:
        """When the very place that tells a role is not there, its process is told by its name."""
        name = multiprocessing.current_process().name
        if name.startswith("EngineCore") and BOOT in self.patches.misses:
            self._play("core")
            self.core.tell_coverage()
        elif name.startswith("VllmWorker") and self.patches.lost(self.worker.boot()):
            self._play("worker")
            self.worker.tell_coverage()

    # --- who we are ---

    def serve(self) -> None:
        """This process answers HTTP."""
        self._play("api")
        self.front.tell_coverage(server=True)

    def _is_client(self, _client: Any) -> None:
        self._play("api")
        self.front.tell_coverage(server=False)

    def _is_llm(self, _engine: Any) -> None:
        self._play("api")
        self.offline.tell_coverage()

    def _is_core(self, _config: Any) -> None:
        self._play("core")
        if os.environ.get(_RUST) == "1":
            for stage in (Stage.RECEIVE, Stage.TEMPLATE, Stage.TOKENISE, Stage.STREAM):
                self.voice.cover(
                    stage, "unavailable", "", f"{_RUST}=1: the front end is not Python"
                )

    def _is_worker(self, worker: Any) -> None:
        self._play("worker", getattr(worker, "rank", -1))

    def _play(self, role: str, number: int = -1) -> None:
        """Open the socket, or say that this process plays one part more."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._roles.clear()
        self._roles.add(role)
        if len(self._roles - {"worker"}) > 1:
            role, number = "engine", -1
        elif role == "worker" and "core" in self._roles:
            return
        name = multiprocessing.current_process().name
        if number < 0 and name.startswith(("ApiServer_", "EngineCore_DP")):
            tail = name.rpartition("_")[2].removeprefix("DP")
            number = int(tail) if tail.isdecimal() else -1
        self.voice.start(role, f"vLLM {role}" + (f" {number}" if number >= 0 else ""))


_hooks: VllmHooks | None = None
_lock = threading.RLock()  # putting hooks in imports the engine, which may load the plugin again


def hooks() -> VllmHooks:
    """The hooks of this process, put in at the first call."""
    global _hooks
    with _lock:
        if _hooks is None:
            _hooks = VllmHooks(emitter())
            _hooks.install()
        return _hooks


def register() -> None:
    """What vLLM calls in each of its processes. Inert unless ``TRACER=1``; never raises."""
    if os.environ.get("TRACER") != "1":
        return
    try:
        hooks()
    except Exception as error:
        sys.stderr.write(f"tracer: hooks for vLLM are off: {type(error).__name__}: {error}\n")


def install_server() -> None:
    """The server's module was imported."""
    if _hooks is not None:
        _hooks.install_server()


def follow_plugins() -> None:
    """vLLM's plugin loader was imported: see that we are loaded with the plugins, whatever
    ``VLLM_PLUGINS`` names and whether or not this package was installed with its entry point."""
    import vllm.plugins as loader

    original = loader.load_general_plugins

    def load_general_plugins() -> None:
        original()
        register()

    load_general_plugins.__doc__ = original.__doc__
    loader.load_general_plugins = load_general_plugins


def attach(engine: Any) -> None:
    """Put the hooks in for an `LLM`, `LLMEngine` or `AsyncLLM` that exists already.

    Raises UnknownEngineError when its core runs in another process that has no hooks: nothing can
    be put in there.
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
    put = hooks()
    put.adopt(core)


def remove() -> None:
    """Take the hooks of this process out again."""
    global _hooks
    with _lock:
        if _hooks is not None:
            _hooks.remove()
            _hooks.voice.stop()
            _hooks = None

"""Runs inside the environment with vLLM: every place of the hook tables against the installed
version, as JSON.

Nothing of the engine runs: the modules are imported and the signatures and fields compared.
"""

from __future__ import annotations

import importlib
import inspect
import json

from engine_hooks.base.emitter import Emitter
from engine_hooks.base.patching import Patches
from engine_hooks.vllm.core import FIELDS, lacking_fields
from engine_hooks.vllm.facts import TESTED, version
from engine_hooks.vllm.plugin import VllmHooks
from engine_hooks.vllm.worker import V1, V2

CALLS = {
    V1: {
        "execute_model": ("self._model_forward(", "self.model.compute_logits("),
        "sample_tokens": ("self._sample(", "self._bookkeeping_sync(", "AsyncGPUModelRunnerOutput("),
    },
    V2: {
        "execute_model": ("self.step_timing.forward_start()", "self.model(**model_inputs)"),
        "sample": ("self.model.compute_logits(", "self.sampler("),
        "sample_tokens": ("self.sample(", "AsyncOutput("),
    },
}
"""What each method of a runner calls, in this order: the hooks sit on these."""


def lacking_calls() -> dict[str, str]:
    """Runner method → the call that is not where we know it."""
    lacking: dict[str, str] = {}
    for kind, methods in CALLS.items():
        runner = importlib.import_module(kind).GPUModelRunner
        for name, calls in methods.items():
            source, at = inspect.getsource(getattr(runner, name)), 0
            for call in calls:
                at = source.find(call, at)
                if at < 0:
                    lacking[f"{kind}:{name}"] = call
                    break
    return lacking


def main() -> None:
    hooks = VllmHooks(Emitter())
    tables = {
        "core": hooks.core.table(),
        "front": hooks.front.table(),
        "server": hooks.front.server_table(),
        "offline": hooks.offline.table(),
        "worker": [*hooks.worker.boot(), hooks.worker.loading()],
        "runner V1": hooks.worker.table(V1),
        "runner V2": hooks.worker.table(V2),
    }
    said: dict[str, object] = {"version": version(), "tested": version().startswith(TESTED)}
    for name, table in tables.items():
        patches = Patches(lambda *fault: None)
        fits = [patches.install(hook) for hook in table]
        patches.remove()
        said[name] = {"places": len(fits), "misses": patches.misses}
    misses = {row.path: why for row in FIELDS if (why := lacking_fields(row))}
    said["fields"] = {"places": len(FIELDS), "misses": misses}
    said["calls"] = lacking_calls()
    print()
    print(json.dumps(said))


if __name__ == "__main__":
    main()

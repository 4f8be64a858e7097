"""The faults of the lab inside vLLM's processes; see `injection`.

They are installed when vLLM loads its plugins, in every process and before the tracing hooks are.
Which process a changed place is used in is vLLM's business: the detokeniser and the template in the
API server, the sampler and the callback in the engine core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from engine_hooks.faults import means
from engine_hooks.faults.means import Fault

PLUGINS: Final = "vllm.plugins"
"""The module after whose import they go in, as `inject.WATCHED` names it."""

_STEP: Final = "vllm.v1.engine.core:EngineCore.post_step"
_UPDATE: Final = "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update"
_RUNNERS: Final = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
)
"""Sampling methods of both model runners, whose first argument is a matrix of a row for each
sequence. They are not used for the dummy batches of a start, as the sampler is: a fault that starts
half-way counts from the first request."""

_SENDERS: Final = (
    "uvicorn.protocols.http.httptools_impl:RequestResponseCycle.send",
    "uvicorn.protocols.http.h11_impl:RequestResponseCycle.send",
)


def before_plugins(install: Callable[[], None]) -> None:
    """Call `install` once in this process, when vLLM starts to load its plugins: all that a fault
    changes can be imported then, and the hooks, which are a plugin, are not installed yet."""
    import vllm.plugins as loader

    original = loader.load_general_plugins
    done: list[object] = []

    def load_general_plugins() -> None:
        if not done:
            done.append(None)
            install()
        original()

    load_general_plugins.__doc__ = original.__doc__
    loader.load_general_plugins = load_general_plugins


def _whole_output(detokeniser: Any, *_: Any, **__: Any) -> float:
    """As if the whole output were decoded again for each token: the work grows with its length."""
    return means.DECODE_S * float(detokeniser.num_output_tokens())


def _each_chunk(_cycle: Any, message: Any) -> float:
    """As if something on the way of each chunk took its time: a logger of the HTTP server."""
    sent = message.get("type") == "http.response.body" and message.get("body")
    return means.CHUNK_S if sent else 0.0


FAULTS: Final = {
    "slow-sampler": Fault(PLUGINS, _RUNNERS, means.slow_sampling),
    "slow-detokenise": Fault(PLUGINS, (_UPDATE,), means.slowed(_whole_output)),
    "slow-stream": Fault(PLUGINS, _SENDERS, means.slowed(_each_chunk)),
    "stalled-callback": Fault(PLUGINS, (_STEP,), means.stalling()),
    "doubled-bos": Fault(PLUGINS, ("vllm.renderers.hf:safe_apply_chat_template",), means.doubling),
    "cpu-oversubscription": Fault(PLUGINS, (_STEP,), means.crowding()),
}

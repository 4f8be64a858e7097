"""The faults of the lab inside vLLM's processes; see `injection`.

They go in when vLLM loads its plugins, in every process and before the tracing hooks do. Which
process a changed place is used in is vLLM's business: the detokeniser and the template in the API
server, the sampler and the callback in the engine core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from engine_hooks.faults.means import (
    CHUNK_S,
    DECODE_S,
    SORT_S,
    Around,
    Gate,
    busy,
    crowding,
    doubled,
    stalling,
    wrap,
)

PLUGINS: Final = "vllm.plugins"
"""The module after whose import they go in, as `inject.WATCHED` names it."""

CORE: Final = "vllm.v1.engine.core"
RUNNERS: Final = (
    ("vllm.v1.worker.gpu_model_runner", "_sample"),
    ("vllm.v1.worker.gpu.model_runner", "sample"),
)
"""Module and sampling method of both model runners, whose first argument is a matrix of a row for
each sequence. They are not used for the dummy batches of a start, as the sampler is: a fault that
begins half-way counts from the first request."""


def before_plugins(put: Callable[[], None]) -> None:
    """Call `put` once in this process, when vLLM begins to load its plugins: all that it changes
    can be imported then, and the hooks, which are a plugin, are not in yet."""
    import vllm.plugins as loader

    original = loader.load_general_plugins
    done: list[object] = []

    def load_general_plugins() -> None:
        if not done:
            done.append(None)
            put()
        original()

    load_general_plugins.__doc__ = original.__doc__
    loader.load_general_plugins = load_general_plugins


def _slow_sampler(gate: Gate) -> None:
    """A logits processor that sorts the whole vocabulary again and again."""

    def around(original: Around, runner: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
        if scores is not None:
            busy(SORT_S, lambda: scores.sort(dim=-1))
        return original(runner, scores, *args, **kwargs)

    def put() -> None:
        for module, name in RUNNERS:
            with contextlib.suppress(ImportError, AttributeError):  # not every build has both
                wrap(gate, module, "GPUModelRunner", name, around)

    before_plugins(put)


def _slow_detokenise(gate: Gate) -> None:
    """The whole output is decoded again for each token: the work grows with its length."""

    def around(original: Around, detokeniser: Any, *args: Any, **kwargs: Any) -> Any:
        busy(
            DECODE_S * detokeniser.num_output_tokens(),
            lambda: "".join(map(str, detokeniser.token_ids)),
        )
        return original(detokeniser, *args, **kwargs)

    before_plugins(
        lambda: wrap(
            gate, "vllm.v1.engine.detokenizer", "BaseIncrementalDetokenizer", "update", around
        )
    )


def _slow_stream(gate: Gate) -> None:
    """Something on the way of each chunk takes its time on the event loop: a logger of the HTTP
    server."""

    def around(original: Around, cycle: Any, message: Any) -> Any:
        if message.get("type") == "http.response.body" and message.get("body"):
            busy(CHUNK_S, lambda: repr(message))
        return original(cycle, message)

    def put() -> None:
        for module in ("httptools_impl", "h11_impl"):
            with contextlib.suppress(ImportError):  # uvicorn takes what is installed
                wrap(
                    gate, f"uvicorn.protocols.http.{module}", "RequestResponseCycle", "send", around
                )

    before_plugins(put)


def _stalled_callback(gate: Gate) -> None:
    """A callback of the engine core blocks now and then: no step runs meanwhile."""
    before_plugins(lambda: wrap(gate, CORE, "EngineCore", "post_step", stalling()))


def _doubled_bos(gate: Gate) -> None:
    """The rendered prompt begins with its first special token twice."""

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        return doubled(original(*args, **kwargs))

    before_plugins(lambda: wrap(gate, "vllm.renderers.hf", "", "safe_apply_chat_template", around))


def _crowded(gate: Gate) -> None:
    """Other programs, from the first step on."""
    before_plugins(lambda: wrap(gate, CORE, "EngineCore", "post_step", crowding()))


FAULTS: Final[dict[str, tuple[str, Callable[[Gate], None]]]] = {
    "slow-sampler": (PLUGINS, _slow_sampler),
    "slow-detokenise": (PLUGINS, _slow_detokenise),
    "slow-stream": (PLUGINS, _slow_stream),
    "stalled-callback": (PLUGINS, _stalled_callback),
    "doubled-bos": (PLUGINS, _doubled_bos),
    "cpu-oversubscription": (PLUGINS, _crowded),
}
"""Fault → (module after whose import it goes in, how)."""
